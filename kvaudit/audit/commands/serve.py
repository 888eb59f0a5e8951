"""``kvaudit serve``: an OpenAI-compatible server of checkpoints; ``kvaudit harness``: commands for other harnesses."""

from __future__ import annotations

import logging
import os
import socket
import sys
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import (
    USAGE,
    Command,
    Dtype,
    Run,
    argument,
    check_dtype,
    option,
    print_line,
    typed_command,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.provenance import read_provenance
from kvaudit.core.text import inline, install_command, one_line, safe_variable_name

_GRACE = 5  # seconds for requests in progress when the server is stopped
_Models = Annotated[list[str], argument(help="Folders, hub ids, or NAME=PATH. A client asks for NAME@POLICY.")]
_Aliases = Annotated[
    list[str] | None,
    option(
        "--alias",
        metavar="ALIAS=NAME@POLICY",
        help="Serve under a name that hides the policy. May be repeated.",
    ),
]
_KeyEnv = Annotated[str | None, option(help="Environment variable with the API key that clients must send.")]


def serve(
    models: _Models,
    *,
    alias: _Aliases = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    key_env: _KeyEnv = None,
    dtype: Dtype = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Serve a model under compression, as the OpenAI API does.

    Every checkpoint is served under any policy: a client asks for NAME@POLICY.
    """
    with user_errors(*typed_command()):
        paths = parse_models(models)
        aliases = parse_aliases(alias or [], paths)
        try:
            import uvicorn

            from kvaudit.audit.serving.app import application
        except ImportError:
            raise RunError(f"two packages are missing for serving: {install_command('serve')}") from None
        from rich.console import Console

        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
        from kvaudit.audit.serving.engine import SamplingEngine

        key = None if key_env is None else os.environ.get(key_env)
        if key_env is not None and not key:
            raise SpecError(f"--key-env: the environment variable {safe_variable_name(key_env)} is not set")
        dtype_name = check_dtype(dtype)
        listener = _listen(host, port)  # before models are loaded, which takes minutes
        console = Console()
        loaded = {name: load_model_or_adapter(path, dtype=dtype_name, device=device) for name, path in paths.items()}
        engine = SamplingEngine(loaded, aliases)
        for name in engine.names:
            print_line(console, f"model: {name}")
        app = application(engine, key=key, log=lambda line: print_line(console, line))
        config = uvicorn.Config(
            app, host=host, port=port, log_level="error", access_log=False, timeout_graceful_shutdown=_GRACE
        )
        logging.getLogger("uvicorn.error").addFilter(_is_fault)
        print_line(console, f"serving: {_address(host, listener.getsockname()[1])}")
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _address(host: str, port: int) -> str:
    """Return the base URL at which clients reach the server; an IPv6 host is in brackets there."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _is_fault(record: logging.LogRecord) -> bool:
    """Return whether a line of the server's log reports a fault; a request cut off when the server stops is none."""
    return not (record.exc_info and isinstance(record.exc_info[1], CancelledError))


def parse_models(models: Sequence[str]) -> dict[str, str]:
    """Return each model's path by the name it is served under; raise SpecError for a repeated name or one with an @."""
    paths: dict[str, str] = {}
    for text in models:
        name, path = _split_pair(text, "MODEL") if "=" in text else (text.rstrip("/").rpartition("/")[2] or text, text)
        if name in paths or "@" in name:
            raise SpecError(f"model name {name!r} is given twice or holds an @; give another name as NAME=PATH")
        paths[name] = path
    return paths


def parse_aliases(aliases: Sequence[str], models: Mapping[str, str]) -> dict[str, str]:
    """Return the NAME@POLICY that each alias stands for; raise SpecError for an alias that could be a model's name."""
    targets: dict[str, str] = {}
    for text in aliases:
        name, target = _split_pair(text, "--alias")
        if name in targets or name in models or "@" in name:
            raise SpecError(f"alias {name!r} is given twice, names a model or holds an @; give another alias")
        targets[name] = target
    return targets


def _split_pair(text: str, option_name: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise SpecError(f"{option_name} is {text!r}, wanted NAME=VALUE")
    return name, value


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host and port; raise SpecError if the address is not available."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # now, so that no other server takes the port while models load
    except OSError as error:
        listener.close()
        raise SpecError(
            f"cannot listen on {host} port {port} ({error.strerror}); give another --port or --host"
        ) from None
    return listener


COMMAND = Command("serve", group="Serve and ask", order=1, call=serve)


def export(run: Run, *, out: Annotated[Path, option(help="Folder to write the logs to.")]) -> None:
    """Write a run's records as Inspect logs.

    Each finished unit becomes one `.eval` file.
    """
    with user_errors(*typed_command()):
        try:
            from kvaudit.audit.serving.harness.inspect_log import write_logs
        except ImportError:
            raise RunError(f"a package is missing to write Inspect logs: {install_command('inspect')}") from None
        created = str(read_provenance(run).get("started") or "1970-01-01T00:00:00+00:00")
        logs = list(write_logs(run, out, created))
        print_line(
            wide_console(), f"logs: {len(logs)} in {inline(str(out))}; view them with: inspect view --log-dir DIR"
        )


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on a compressed model.

    All options go to its command line: --model kvaudit
    --model_args 'pretrained=embedded,policy=snapkv:budget=96;window=8'.
    """
    with user_errors():
        try:
            import kvaudit.audit.serving.harness.model  # noqa: F401 - registers the model "kvaudit" with the harness
        except ModuleNotFoundError as error:
            raise RunError(f"a package is missing for lm-eval: {install_command('lm-eval')} ({error})") from error
        from lm_eval.__main__ import cli_evaluate

        sys.argv = ["kvaudit harness lm-eval", *context.args]
        try:
            cli_evaluate()
        except SystemExit as end:
            if end.code == USAGE:  # it has said what is wrong
                raise typer.Exit(USAGE) from None
            if not context.args or {"-h", "--help"} & set(context.args):
                raise typer.Exit from None
            raise
        except ValueError as error:  # raised by the harness for unknown names and options
            raise SpecError(f"lm-eval: {one_line(error)}") from error


HARNESS = Command("harness", group="Extend", order=3, help="Work with Inspect and lm-evaluation-harness.")
EXPORT = Command("export", group="harness", order=1, call=export, former_names={"export": "harness export"})
LM_EVAL = Command(
    "lm-eval",
    group="harness",
    order=3,
    call=lm_eval,
    former_names={"lm-eval": "harness lm-eval"},
    settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},  # passed on
)
