"""vLLM in a worker process for training: weights reloaded in each step, keys and values returned.

    [{"push": FILE.npz, "known": false}]                        -> [{"sha256": of the loaded weights}]
    [{"ids": [...], "max_tokens": 24, "keep": FILE, ...}, ...]  -> [{"ids", "finish", "logprobs", "weights": sha256}]

Weights are loaded by the workers' ``reload_weights``. Keys and values are the inputs of each attention layer, before
the cache quantises them.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from kvaudit.audit.engines.inside.worker import arrays_sha256


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """Start the engine on a model folder; return its description and a function that answers requests (rows).

    The flags are those of vLLM's server, and its own parser checks them.
    """
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
    return description, _RolloutEngine(engine).answer


class _RolloutEngine:
    """vLLM's engine, with the hash of its weights and the keys and values of the rows being sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._sha256, self._row_count = engine, "", 0
        self._kept: dict[str, dict[int, list[Any]]] = {}  # request -> layer -> keys and values of its tokens
        (self._runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
        engine.apply_model(self._add_hooks)

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sample a completion for each row; or load new weights, if the only row is ``{"push": FILE, ...}``."""
        if len(rows) == 1 and "push" in rows[0]:
            return [{"sha256": self._push(rows[0]["push"])}]
        names = [f"row{self._row_count + n}" for n in range(len(rows))]
        self._kept = {name: {} for name, row in zip(names, rows, strict=True) if row["keep"]}
        self._row_count += len(rows)
        for name, row in zip(names, rows, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": row["ids"]}, _sampling(row))
        outputs: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in self._engine.step() if output.finished}
        replies = [self._reply(outputs[name], row) for name, row in zip(names, rows, strict=True)]
        self._save(names, replies, rows)
        return replies

    def _reply(self, output: Any, row: dict[str, Any]) -> dict[str, Any]:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        logprobs = [float(by_id[token].logprob) for by_id, token in zip(completion.logprobs, ids, strict=True)]
        finish = "stop" if ids and ids[-1] in row["stops"] else "length"
        read = list(output.prompt_token_ids)
        return {"ids": ids, "finish": finish, "logprobs": logprobs, "weights": self._sha256, "read": read}

    def _push(self, path: str) -> str:
        """Load a file of weights and return their sha256.

        Raises ValueError if a weight that can be read back from the model differs from the file.
        """
        import torch

        with np.load(path, allow_pickle=False) as file:
            weights = {name: torch.from_numpy(file[name]) for name in file.files}
        self._engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights.items()), "is_checkpoint_format": True}
        )

        self._engine.apply_model(_tie_head)

        def wrong_names(model: Any) -> list[str]:
            """Return the names of parameters whose shape is as in the file, but whose numbers are not."""
            named = {name: tensor for name, tensor in model.named_parameters() if name in weights}
            comparable = {name: tensor for name, tensor in named.items() if tensor.shape == weights[name].shape}
            return [n for n, tensor in comparable.items() if not torch.equal(tensor, weights[n].to(tensor.dtype))]

        (wrong,) = self._engine.apply_model(wrong_names)
        if wrong:
            raise ValueError(f"{len(wrong)} weights differ from the file after loading: {wrong[0]}")
        self._sha256 = arrays_sha256({name: tensor.numpy() for name, tensor in weights.items()})
        return self._sha256

    def _add_hooks(self, model: Any) -> None:
        from vllm.model_executor.layers.attention import Attention

        for module in model.modules():
            if isinstance(module, Attention):
                layer = int(re.findall(r"\d+", module.layer_name)[0])
                module.register_forward_pre_hook(lambda _, args, layer=layer: self._record(layer, args[1], args[2]))

    def _record(self, layer: int, keys: Any, values: Any) -> None:
        """Append the keys and values that this forward pass computed in one layer, for the rows with a "keep" file."""
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if not self._kept or metadata is None:  # None in the engine's own warm-up
            return
        # all layers have the same metadata
        table = next(iter(metadata.values()))
        # where each row's tokens begin in this pass, and its length afterwards
        begins, ends = table.query_start_loc.tolist(), table.seq_lens.tolist()
        for n, request in enumerate(self._runner.input_batch.req_ids):
            tokens = slice(begins[n], begins[n + 1])
            # the engine may append a suffix to a request's name
            layers = self._kept.get(request.partition("-")[0])
            if layers is None:
                continue
            pairs = layers.setdefault(layer, [])
            del pairs[ends[n] - (tokens.stop - tokens.start) :]  # of a preempted row, which is read again
            pairs += zip(
                keys[tokens].float().flatten(1).numpy(), values[tokens].float().flatten(1).numpy(), strict=True
            )

    def _save(self, names: list[str], replies: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        """Save the keys and values of the rows that name a file under "keep", as float32 arrays [tokens, L, H * D].

        They include those of the prompt, but not of the last token. ``names`` are the requests' names in the engine.
        """
        arrays: dict[str, Any] = {}
        for n, name in enumerate(names):
            if name not in self._kept:
                continue
            layers = self._kept[name]
            length = len(rows[n]["ids"]) + len(replies[n]["ids"]) - 1
            short = [layer for layer, pairs in layers.items() if len(pairs) < length]
            if short:
                raise ValueError(f"keys of {len(layers[short[0]])} tokens were recorded, expected {length}")
            for which, array in enumerate(("keys", "values")):
                stacked = [np.stack([pair[which] for pair in layers[layer][:length]]) for layer in sorted(layers)]
                arrays[f"{n}.{array}"] = np.stack(stacked, 1)
        for path in {row["keep"] for row in rows} - {None}:
            np.savez(path, **arrays)


def _tie_head(model: Any) -> None:
    """Make an output head that is tied to the embeddings use their present weights.

    On a CPU the head keeps its own packed copy, which reloading weights does not update.
    """
    head, embeddings = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    if is_tied and head is not None and embeddings is not None and head.weight.device.type == "cpu":
        head.weight = embeddings.weight
        head.quant_method.process_weights_after_loading(head)


def _sampling(row: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=row["temperature"],
        top_p=1.0,
        max_tokens=row["max_tokens"],
        seed=row["seed"] % 2**63,
        stop_token_ids=row["stops"],
        ignore_eos=True,  # only stop_token_ids end an answer
        logprobs=0,  # of the drawn token only
        detokenize=False,
    )
