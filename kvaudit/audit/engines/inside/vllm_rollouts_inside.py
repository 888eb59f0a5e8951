"""vLLM as training draws from it, in one process: its engine, weights that it loads anew, K and V as they go in.

    [{"push": FILE.npz, "known": false}]                  -> [{"sha256": of the weights that were loaded}]
    [{"ids": [...], "most": 24, "keep": FILE, ...}, ...]  -> [{"ids", "finish", "logprobs", "weights": their sha256}]

Weights go in by the workers' ``reload_weights``. Keys and values are what each layer's attention
is handed, before the cache codes them.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

import numpy as np


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """The engine on a folder under its server's flags; what it does not know it says itself."""
    os.environ.update({**setup["environment"], "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})  # read when vllm is imported
    from vllm import __version__
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args([f"--model={setup['folder']}", *setup["flags"]]))
    engine = LLMEngine.from_engine_args(arguments)
    description = {
        "version": f"vllm {__version__}",
        "flags": " ".join(setup["flags"]),
        "cache_dtype": str(engine.vllm_config.cache_config.cache_dtype),
        "dtype": str(engine.vllm_config.model_config.dtype),
    }
    return description, _Served(engine).answer


class _Served:
    """An engine, the weights it has loaded, and the keys and values of the rows under way."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._held, self._number = engine, "", 0
        self._kept: dict[str, dict[int, list[Any]]] = {}  # request -> layer -> keys and values of its tokens
        (self._runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
        engine.apply_model(self._listen)

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take weights, or draw rows."""
        if len(rows) == 1 and "push" in rows[0]:
            return [{"sha256": self._push(rows[0]["push"])}]
        names = [f"row{self._number + n}" for n in range(len(rows))]
        self._kept = {name: {} for name, row in zip(names, rows, strict=True) if row["keep"]}
        self._number += len(rows)
        for name, row in zip(names, rows, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": row["ids"]}, _sampling(row))
        done: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            done |= {output.request_id: output for output in self._engine.step() if output.finished}
        found = [self._reply(done[name], row) for name, row in zip(names, rows, strict=True)]
        self._save(names, found, rows)
        return found

    def _reply(self, output: Any, row: dict[str, Any]) -> dict[str, Any]:
        said = output.outputs[0]
        ids = list(said.token_ids)
        logprobs = [float(own[token].logprob) for own, token in zip(said.logprobs, ids, strict=True)]
        finish = "stop" if ids and ids[-1] in row["stops"] else "length"
        read = list(output.prompt_token_ids)
        return {"ids": ids, "finish": finish, "logprobs": logprobs, "weights": self._held, "read": read}

    def _push(self, path: str) -> str:
        """Load a file of weights; returns their sha256 by name once those that can be read back are they."""
        import torch

        with np.load(path, allow_pickle=False) as file:
            weights = {name: torch.from_numpy(file[name]) for name in file.files}
        self._engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights.items()), "is_checkpoint_format": True}
        )

        self._engine.apply_model(_tie_again)

        def others(model: Any) -> list[str]:
            """Weights that stand by themselves in the model, and are not those of the file."""
            own = {name: tensor for name, tensor in model.named_parameters() if name in weights}
            alike = {name: tensor for name, tensor in own.items() if tensor.shape == weights[name].shape}
            return [n for n, tensor in alike.items() if not torch.equal(tensor, weights[n].to(tensor.dtype))]

        (wrong,) = self._engine.apply_model(others)
        if wrong:
            raise ValueError(f"{len(wrong)} weights were not loaded as they are: {wrong[0]}")
        self._held = _digest({name: tensor.numpy() for name, tensor in weights.items()})
        return self._held

    def _listen(self, model: Any) -> None:
        from vllm.model_executor.layers.attention import Attention

        for module in model.modules():
            if isinstance(module, Attention):
                layer = int(re.findall(r"\d+", module.layer_name)[0])
                module.register_forward_pre_hook(lambda _, given, layer=layer: self._hear(layer, given[1], given[2]))

    def _hear(self, layer: int, keys: Any, values: Any) -> None:
        from vllm.forward_context import get_forward_context

        known = get_forward_context().attn_metadata
        if not self._kept or known is None:  # a trial of the engine's own
            return
        # one layer's stands for all: they were fed the same
        table = next(iter(known.values()))
        # where each row's tokens begin in this forward, and how many it has seen after it
        begins, ends = table.query_start_loc.tolist(), table.seq_lens.tolist()
        for n, request in enumerate(self._runner.input_batch.req_ids):
            part = slice(begins[n], begins[n + 1])
            # the engine may put something of its own behind a request's name
            layers = self._kept.get(request.partition("-")[0])
            if layers is None:
                continue
            own = layers.setdefault(layer, [])
            del own[ends[n] - (part.stop - part.start) :]  # of a row that was put off and is read again
            own += zip(keys[part].float().flatten(1).numpy(), values[part].float().flatten(1).numpy(), strict=True)

    def _save(self, names: list[str], found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        """Keys and values [tokens, L, H * D] float32 of the rows that are kept, those of their prompts among them."""
        arrays: dict[str, Any] = {}
        for n, name in enumerate(names):
            if name not in self._kept:
                continue
            layers = self._kept[name]
            wanted = len(rows[n]["ids"]) + len(found[n]["ids"]) - 1
            short = [layer for layer, own in layers.items() if len(own) < wanted]
            if short:
                raise ValueError(f"keys of {len(layers[short[0]])} tokens were seen, wanted {wanted}")
            for which, what in enumerate(("keys", "values")):
                parts = [np.stack([own[which] for own in layers[layer][:wanted]]) for layer in sorted(layers)]
                arrays[f"{n}.{what}"] = np.stack(parts, 1)
        for path in {row["keep"] for row in rows} - {None}:
            np.savez(path, **arrays)


def _tie_again(model: Any) -> None:
    """Have a head that shares the embeddings take them over: reloading leaves the form in which a CPU holds it."""
    head, embeddings = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and head is not None and embeddings is not None and head.weight.device.type == "cpu":
        head.weight = embeddings.weight
        head.quant_method.process_weights_after_loading(head)


def _sampling(row: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=row["temperature"],
        top_p=1.0,
        max_tokens=row["most"],
        seed=row["seed"] % 2**63,
        stop_token_ids=row["stops"],
        ignore_eos=True,  # beside those there is no end
        logprobs=0,  # of the drawn token alone
        detokenize=False,
    )


def _digest(weights: dict[str, Any]) -> str:
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(name.encode() + weights[name].tobytes())
    return whole.hexdigest()
