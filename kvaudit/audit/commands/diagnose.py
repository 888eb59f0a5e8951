"""``kvaudit diagnose``: find which part of a KV cache suffers from a coarser quantisation, and what to try instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.audit.commands.base import (
    Command,
    Dtype,
    check_dtype,
    option,
    print_line,
    print_table,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.provenance import MAX_THREADS
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.rerun.diagnose import Codes, Diagnosis, Floats, Harm

_EMBEDDED_TOKENS = 192  # a length that the suites of the embedded model have
_MOST_BITS, _MOST_PROMPTS = 6, 400
_SHOWN_LAYERS = 5
_FLOATS = ("fp8", "fp8_e4m3", "fp8_e5m2")
_COLUMNS = ("stored", "bits a number", "nats a token", "of the harm", "in refusals", "refusals that begin otherwise")
# how to try a remedy, by the beginning of its name, in the engines' own settings
_TRY = {
    "keys by channel": "openvino KEY_CACHE_QUANT_MODE=BY_CHANNEL, its default; kivi:bits={bits} of kvaudit's cache",
    "groups half as large": "openvino KEY_CACHE_GROUP_SIZE, VALUE_CACHE_GROUP_SIZE",
    "keys in 8 bits": "llama.cpp type_k=q8_0 type_v=q4_0; openvino --kv u8/u4",
    "values in 8 bits": "llama.cpp type_k=q4_0 type_v=q8_0; openvino --kv u4/u8",
    "layers": "vllm kv_cache_dtype_skip_layers; skip_layers of kvaudit's policies",
    "fp8_e4m3": "vllm kv_cache_dtype=fp8_e4m3",
    "last": "kivi or fp8 of kvaudit's cache with residual={window}; transformers' quantized cache, residual_length",
}


def diagnose(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, a .gguf file, or 'embedded'.")],
    *,
    bits: Annotated[
        int | None, option(min=2, max=_MOST_BITS, help="Bits per key and value number. Default: 4.")
    ] = None,
    group: Annotated[int | None, option(min=8, help="Channels per scale. Default: 32, as in llama.cpp.")] = None,
    kv_cache_dtype: Annotated[str | None, option(help="Instead of --bits: vLLM's fp8, fp8_e4m3 or fp8_e5m2.")] = None,
    suite: Annotated[str | None, option(help="Suite to ask. Default: xstest (embedded model: refusal).")] = None,
    prompts: Annotated[int, typer.Option(min=4, max=_MOST_PROMPTS, help="Requests, half of them harmful.")] = 20,
    context_tokens: Annotated[int | None, option(min=64, help="Prompt length in tokens, if the suite has one.")] = None,
    dtype: Dtype = "float32",
    out: Annotated[Path | None, option(help="Also write the result to this JSON file.")] = None,
    threads: Annotated[int | None, option(min=1, max=MAX_THREADS, help="Threads. Default: those of torch.")] = None,
) -> None:
    """Say what a coarse KV code harms in a model, and what to try.

    Answers a few requests, then runs the answers again with coded keys and values: all of them, keys or values alone,
    one layer, and finer codes. This is no verdict: give the setting you choose to `check`.
    """
    with user_errors():
        import torch
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from kvaudit.audit.rerun.diagnose import check_group, collect_requests, count_cases, run_diagnosis
        from kvaudit.audit.runs.progress import Meter
        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
        from kvaudit.audit.sampling.model import EMBEDDED
        from kvaudit.core.files import write_output
        from kvaudit.suites.base import SUITES

        dtype_name = check_dtype(dtype)
        setting = _parse_setting(bits, group, kv_cache_dtype)
        chosen_suite = SUITES.get(suite or ("refusal" if model == EMBEDDED else "xstest"))()
        if chosen_suite.lengths == "none" and context_tokens:
            raise SpecError(f"suite {chosen_suite.name!r} has no prompt length to set; leave out --context-tokens")
        length = 0 if chosen_suite.lengths == "none" else context_tokens or _EMBEDDED_TOKENS
        set_verbosity_error()
        disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        console = wide_console()
        loaded = load_model_or_adapter(model, dtype=dtype_name)
        check_group(loaded, setting)
        with Meter(console, "answers", prompts) as meter:
            requests = collect_requests(
                loaded, chosen_suite, prompts, length, lambda count: meter.at(count, f"request {count}")
            )
        counts = f"{sum(r.refused for r in requests)} refused, {sum(r.harmful for r in requests)} should be refused"
        print_line(console, inline(f"{loaded.name}: {len(requests)} requests of {chosen_suite.name}, {counts}"))

        harms: list[Harm] = []
        with Meter(console, "codes", count_cases(loaded, setting)) as meter:

            def print_harm(harm: Harm) -> None:
                harms.append(harm)
                print_line(console, f"  {harm.case.name:<28} {harm.nats:.4f} nats a token")
                meter.at(len(harms), harm.case.name)

            diagnosis = run_diagnosis(loaded, requests, setting, print_harm)
        print_line(console, "")
        _print_diagnosis(diagnosis, console)
        if out is not None:
            write_output(out, _to_json(diagnosis, loaded.name, loaded.sha256))
            print_line(console, inline(f"written: {out}"))


def _parse_setting(bits: int | None, group: int | None, kv_cache_dtype: str | None) -> Codes | Floats:
    from kvaudit.audit.engines import ENGINES
    from kvaudit.audit.rerun.diagnose import Codes, Floats

    if kv_cache_dtype is None:
        return Codes(bits or 4, group or 32)
    if bits or group:
        raise SpecError("--kv-cache-dtype sets bits and groups itself; leave out --bits and --group")
    if kv_cache_dtype not in _FLOATS:
        raise UnknownName("kv_cache_dtype", kv_cache_dtype, _FLOATS)
    stores = {name: ENGINES.get("vllm").store({"kv_cache_dtype": name}) for name in _FLOATS}
    store, better = stores[kv_cache_dtype], stores["fp8_e4m3"]
    assert store is not None
    return Floats(kv_cache_dtype, store, None if better == store else better)


def _print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print how much the quantisation setting, each part of it alone and each remedy change the model's answers.

    Then print the layers that change them most, the kind of harm (mode), and the remedies that help.
    """
    from kvaudit.reports.sections.shared.tables import table_of

    rows = []
    fine = () if diagnosis.fine is None else (diagnosis.fine,)
    for harm in (diagnosis.overall, *diagnosis.parts, *fine, *diagnosis.remedies):
        bits = f"{harm.case.bits:.3g}" if harm.case.bits else "-"  # a part alone cannot be served
        turned = f"{harm.turned} of {diagnosis.refused}"
        share = _share(harm, diagnosis)
        rows.append([harm.case.name, bits, f"{harm.nats:.4f}", share, f"{harm.refusals:.4f}", turned])
    print_table(console, table_of(_COLUMNS, rows))
    layers = sorted(diagnosis.layers, key=lambda harm: -harm.nats)[:_SHOWN_LAYERS]
    numbers = (f"{harm.case.name.removeprefix('layer ')} {harm.nats:.4f}" for harm in layers)
    print_line(console, f"layers, each alone: {', '.join(numbers)}")
    if (ratio := diagnosis.along_refusals) is not None:
        direction = "noise of keys along the refusal direction"
        print_line(console, f"{direction}: {ratio:.3g} times less by channel than by token (median)")
    print_line(console, f"mode: {diagnosis.mode}: {diagnosis.meaning}")
    for harm in diagnosis.effective_remedies:
        cost = f"{harm.case.bits:.2g} bits a number, leaves {_share(harm, diagnosis)} of the harm"
        settings = next((text for start, text in _TRY.items() if harm.case.name.startswith(start)), "")
        advice = f" ({settings.format(bits=diagnosis.setting.bits, window=harm.case.window)})" if settings else ""
        print_line(console, f"try: {harm.case.name}, {cost}{advice}")
    if diagnosis.mode != "nothing" and not diagnosis.effective_remedies:
        print_line(console, "try: no remedy removes half of the harm")
    print_line(console, "this is no verdict: check the setting you choose with `kvaudit check`")


def _share(harm: Harm, diagnosis: Diagnosis) -> str:
    return f"{100 * harm.nats / diagnosis.overall.nats:.1f} %" if diagnosis.overall.nats > 0 else "-"


def _to_json(diagnosis: Diagnosis, model: str, sha256: str) -> str:
    from kvaudit.audit.rerun.diagnose import Codes

    def row(harm: Harm) -> dict[str, Any]:
        return {
            "stored": harm.case.name,
            "bits": round(harm.case.bits, 4),
            "nats": harm.nats,
            "nats_refusals": harm.refusals,
            "nats_others": harm.others,
            "refusals_turned": harm.turned,
        }

    if isinstance(diagnosis.setting, Codes):
        setting: dict[str, Any] = {"bits": diagnosis.setting.bits, "group": diagnosis.setting.group}
    else:
        setting = {"kv_cache_dtype": diagnosis.setting.dtype}
    table = {
        "format": 1,
        "model": model,
        "base_sha256": sha256,
        **setting,
        "requests": {"asked": diagnosis.requests, "to_be_refused": diagnosis.harmful, "refused": diagnosis.refused},
        "setting": row(diagnosis.overall),
        "parts": [row(harm) for harm in diagnosis.parts],
        "layers": [row(harm) for harm in diagnosis.layers],
        "remedies": [row(harm) for harm in diagnosis.remedies],
        **({} if diagnosis.fine is None else {"eight_bits": row(diagnosis.fine)}),
        **({} if diagnosis.along_refusals is None else {"refusal_direction_reduction": diagnosis.along_refusals}),
        "mode": diagnosis.mode,
    }
    return json.dumps(table, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


COMMAND = Command("diagnose", group="Look", order=5, call=diagnose)
