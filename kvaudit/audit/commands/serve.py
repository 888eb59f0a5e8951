"""``kvaudit serve``: an OpenAI-compatible server over checkpoints, each under any policy."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.base import print_line, user_errors
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import install_command, safe_variable_name

_Models = Annotated[list[str], argument(help="Folders, hub ids, or NAME=PATH; a client asks for NAME@POLICY.")]
_Aliases = Annotated[
    list[str] | None, option("--alias", help="ALIAS=NAME@POLICY, a name that does not tell its policy.")
]

_GRACE = 5  # seconds that requests under way have once the server is told to end
_KeyEnv = Annotated[str | None, option(help="The environment variable with the key.")]


def serve(
    models: _Models,
    *,
    alias: _Aliases = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    key_env: _KeyEnv = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Serve a model under compression, as the OpenAI API does.

    Checkpoints are served under any policy: a client asks for NAME@POLICY.
    """
    with user_errors("kvaudit", "serve", "MODEL"):
        paths = parse_models(models)
        aliases = parse_aliases(alias or [], paths)
        try:
            import uvicorn

            from kvaudit.audit.serving.app import application
        except ImportError:
            raise RunError(f"serving needs two more packages: {install_command('serve')}") from None
        from rich.console import Console

        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
        from kvaudit.audit.serving.engine import SamplingEngine

        key = None if key_env is None else os.environ.get(key_env)
        if key_env is not None and not key:
            raise SpecError(f"--key-env: the environment variable {safe_variable_name(key_env)} is not set")
        if dtype not in ("float32", "bfloat16", "auto"):
            raise SpecError(f"--dtype is {dtype!r}, wanted float32, bfloat16 or auto")
        listening = _listen(host, port)  # before models are loaded, which takes minutes
        console = Console()
        loaded = {name: load_model_or_adapter(path, dtype=dtype, device=device) for name, path in paths.items()}  # type: ignore[arg-type]
        engine = SamplingEngine(loaded, aliases)
        for name in engine.names:
            print_line(console, f"model: {name}")
        app = application(engine, key=key, log=lambda line: print_line(console, line))
        config = uvicorn.Config(
            app, host=host, port=port, log_level="error", access_log=False, timeout_graceful_shutdown=_GRACE
        )
        print_line(console, f"serving: http://{host}:{listening.getsockname()[1]}/v1")
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


def parse_models(models: list[str]) -> dict[str, str]:
    """Name -> path; raises SpecError for two of one name, and for a name that holds what separates it from a policy."""
    found: dict[str, str] = {}
    for text in models:
        name, path = _pair(text, "MODEL") if "=" in text else (text.rstrip("/").rpartition("/")[2] or text, text)
        if name in found or "@" in name:
            raise SpecError(f"model name {name!r} is given twice or holds an @; name it by NAME=PATH")
        found[name] = path
    return found


def parse_aliases(aliases: Sequence[str], models: Mapping[str, str]) -> dict[str, str]:
    """Alias -> NAME@POLICY; raises SpecError for one that a client would take for a checkpoint, or for a policy."""
    found: dict[str, str] = {}
    for text in aliases:
        name, served = _pair(text, "--alias")
        if name in found or name in models or "@" in name:
            raise SpecError(f"alias {name!r} is given twice, names a model or holds an @; give it another name")
        found[name] = served
    return found


def _pair(text: str, what: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise SpecError(f"{what} is {text!r}, wanted NAME=VALUE")
    return name, value


def _listen(host: str, port: int) -> socket.socket:
    """A socket of this address, port 0 being any that is free; raises SpecError where it cannot be had."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # or another server could have the port while our models load
    except OSError as error:
        listening.close()
        raise SpecError(f"{host} port {port} cannot be listened on ({error.strerror}); give another --port") from None
    return listening


COMMAND = Command("serve", group="Serve and ask", order=1, call=serve)
