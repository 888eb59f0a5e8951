"""``kvaudit diagnose``: which part of a KV cache a coarser code harms, and what to try in its place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.base import print_table, print_line, user_errors, wide_console
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.provenance import MAX_THREADS
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.audit.rerun.diagnose import Codes, Diagnosis, Floats, Harm

_EMBEDDED_TOKENS = 192  # a length that the suites of the embedded model can be asked at
_MOST_BITS, _MOST_PROMPTS = 6, 400
_SHOWN = 5  # layers
_FLOATS = ("fp8", "fp8_e4m3", "fp8_e5m2")
_COLUMNS = ("stored", "bits a number", "nats a token", "of the harm", "in refusals", "refusals that begin otherwise")
# in the engines' own words; whoever reads a name that is not here asks their engine for it
_TRY = {
    "keys by channel": "openvino KEY_CACHE_QUANT_MODE=BY_CHANNEL, its default; kivi:bits={bits} of our own",
    "groups half as large": "openvino KEY_CACHE_GROUP_SIZE, VALUE_CACHE_GROUP_SIZE",
    "keys in 8 bits": "llama.cpp type_k=q8_0 type_v=q4_0; openvino --kv u8/u4",
    "values in 8 bits": "llama.cpp type_k=q4_0 type_v=q8_0; openvino --kv u4/u8",
    "layers": "vllm kv_cache_dtype_skip_layers; skip_layers of our own policies",
    "fp8_e4m3": "vllm kv_cache_dtype=fp8_e4m3",
    "last": "kivi or fp8 with residual={window} of our own; transformers' quantized cache, residual_length",
}


def diagnose(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, a .gguf file, or 'embedded'.")],
    *,
    bits: Annotated[int | None, option(min=2, max=_MOST_BITS, help="Of every key and value; default: 4.")] = None,
    group: Annotated[int | None, option(min=8, help="Channels that share a scale; default: 32, as llama.cpp.")] = None,
    kv_cache_dtype: Annotated[str | None, option(help="In their place: vLLM's fp8, fp8_e4m3 or fp8_e5m2.")] = None,
    suite: Annotated[str | None, option(help="What is asked; default: xstest, of the embedded model refusal.")] = None,
    prompts: Annotated[int, typer.Option(min=4, max=_MOST_PROMPTS, help="Requests, half of them for harm.")] = 20,
    context_tokens: Annotated[int | None, option(min=64, help="Of suites that are made to a length.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    out: Annotated[Path | None, option(help="Also write it into this JSON file.")] = None,
    threads: Annotated[int | None, option(min=1, max=MAX_THREADS, help="Default: as many as torch takes.")] = None,
) -> None:
    """Say what a coarse KV code harms in a model, and what to try.

    A few requests are answered, and the answers passed again with keys and values coded token by token, in parts, layer
    by layer, and in finer ways. Nothing is decided by it: what it suggests goes through `check`.
    """
    with user_errors():
        import torch
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from kvaudit.audit.rerun.diagnose import check_group, collect_requests, run_diagnosis
        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
        from kvaudit.audit.sampling.model import EMBEDDED, DtypeName
        from kvaudit.suites.base import SUITES

        if dtype not in get_args(DtypeName):
            raise UnknownName("dtype", dtype, get_args(DtypeName))
        setting = _setting(bits, group, kv_cache_dtype)
        chosen = SUITES.get(suite or ("refusal" if model == EMBEDDED else "xstest"))()
        if chosen.lengths == "none" and context_tokens:
            raise SpecError(
                f"suite {chosen.name!r} is asked as published, without a length; leave --context-tokens out"
            )
        length = 0 if chosen.lengths == "none" else context_tokens or _EMBEDDED_TOKENS
        set_verbosity_error()
        disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        console = wide_console()
        loaded = load_model_or_adapter(model, dtype=dtype)  # type: ignore[arg-type]  # checked above
        check_group(loaded, setting)
        asked = collect_requests(loaded, chosen, prompts, length)
        known = f"{sum(one.refused for one in asked)} refused, {sum(one.harmful for one in asked)} to be refused"
        print_line(console, inline(f"{loaded.name}: {len(asked)} requests of {chosen.name}, {known}"))

        def heard(one: Harm) -> None:
            print_line(console, f"  {one.case.name:<28} {one.nats:.4f} nats a token")

        found = run_diagnosis(loaded, asked, setting, heard)
        print_line(console, "")
        _show(found, console)
        if out is not None:
            from kvaudit.core.files import write_output

            write_output(out, _json(found, loaded.name, loaded.sha256))
            print_line(console, inline(f"written: {out}"))


def _setting(bits: int | None, group: int | None, kv_cache_dtype: str | None) -> Codes | Floats:
    from kvaudit.audit.engines import ENGINES
    from kvaudit.audit.rerun.diagnose import Codes, Floats

    if kv_cache_dtype is None:
        return Codes(bits or 4, group or 32)
    if bits or group:
        raise SpecError("--kv-cache-dtype is a format of its own; leave --bits and --group out")
    if kv_cache_dtype not in _FLOATS:
        raise UnknownName("kv_cache_dtype", kv_cache_dtype, _FLOATS)
    known = {word: ENGINES.get("vllm").store({"kv_cache_dtype": word}) for word in _FLOATS}
    store, better = known[kv_cache_dtype], known["fp8_e4m3"]
    assert store is not None
    return Floats(kv_cache_dtype, store, None if better == store else better)


def _show(found: Diagnosis, console: Any) -> None:
    """The parts and the remedies beside the setting, the layers that carry most, and the words of it."""
    from kvaudit.reports.sections.shared.tables import table_of

    rows = []
    finer = () if found.fine is None else (found.fine,)
    for one in (found.whole, *found.parts, *finer, *found.remedies):
        bits = f"{one.case.bits:.3g}" if one.case.bits else "-"  # of a part alone, which nobody serves
        turned = f"{one.turned} of {found.refused}"
        rows.append([one.case.name, bits, f"{one.nats:.4f}", _share(one, found), f"{one.refusals:.4f}", turned])
    print_table(console, table_of(_COLUMNS, rows))
    most = sorted(found.layers, key=lambda one: -one.nats)[:_SHOWN]
    # their numbers, without the word "layer"
    print_line(console, "layers, each alone: " + ", ".join(f"{one.case.name[6:]} {one.nats:.4f}" for one in most))
    if (ratio := found.along_refusals) is not None:
        print_line(
            console,
            f"noise of keys along the refusal direction: {ratio:.3g} times less by channel than by token (median)",
        )
    print_line(console, f"mode: {found.mode}: {found.meaning}")
    for one in found.effective_remedies:
        least = f"{one.case.bits:.2g} bits a number, leaves {_share(one, found)}"
        settings = next((text for start, text in _TRY.items() if one.case.name.startswith(start)), "")
        how = f" ({settings.format(bits=found.setting.bits, window=one.case.window)})" if settings else ""
        print_line(console, f"try: {one.case.name}, {least}{how}")
    if found.mode != "nothing" and not found.effective_remedies:
        print_line(console, "try: nothing here takes away half of it")
    print_line(console, "a diagnosis decides nothing: put what you choose to `kvaudit check`")


def _share(one: Harm, found: Diagnosis) -> str:
    return f"{100 * one.nats / found.whole.nats:.1f} %" if found.whole.nats > 0 else "-"


def _json(found: Diagnosis, model: str, sha256: str) -> str:
    import json

    from kvaudit.audit.rerun.diagnose import Codes

    def one(harm: Harm) -> dict[str, Any]:
        return {
            "stored": harm.case.name,
            "bits": round(harm.case.bits, 4),
            "nats": harm.nats,
            "nats_refusals": harm.refusals,
            "nats_others": harm.others,
            "refusals_turned": harm.turned,
        }

    if isinstance(found.setting, Codes):
        setting: dict[str, Any] = {"bits": found.setting.bits, "group": found.setting.group}
    else:
        setting = {"kv_cache_dtype": found.setting.word}
    table = {
        "format": 1,
        "model": model,
        "base_sha256": sha256,
        **setting,
        "requests": {"asked": found.asked, "to_be_refused": found.harmful, "refused": found.refused},
        "setting": one(found.whole),
        "parts": [one(part) for part in found.parts],
        "layers": [one(layer) for layer in found.layers],
        "remedies": [one(remedy) for remedy in found.remedies],
        **({} if found.fine is None else {"eight_bits": one(found.fine)}),
        **({} if found.along_refusals is None else {"refusal_direction_reduction": found.along_refusals}),
        "mode": found.mode,
    }
    return json.dumps(table, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


COMMAND = Command("diagnose", group="Look", order=5, call=diagnose)
