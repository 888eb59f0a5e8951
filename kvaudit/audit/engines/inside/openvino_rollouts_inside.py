"""OpenVINO in a worker process for training: its paged cache, with changing weights, and keys and values returned.

OpenVINO GenAI returns neither the keys and values that its cache quantises nor log-probs at another temperature than 1,
so this file runs the compiled model itself, with the same transformation, kernels, cache and properties. A prompt is
read whole, once for all rows that begin with it; then every row grows by one token per forward pass.

    [{"push": FILE.npz, "known": false}]                        -> [{"sha256": of the weights that the model holds now}]
    [{"ids": [...], "max_tokens": 24, "keep": FILE, ...}, ...]  -> [{"ids", "finish", "logprobs", "weights": sha256}]
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from kvaudit.audit.engines.inside.openvino_properties import check_properties

_BLOCK = 32  # tokens of a block of the cache
_PREFILL_TOKENS = 2048  # in one forward pass
_GIB = 1 << 30


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """Compile the model of a folder; return its description and a function that answers requests (rows).

    For an unknown setting it raises the engine's own error, which names the setting.
    """
    settings, device = dict(setup["settings"]), setup["device"]
    cache_gib = float(settings.pop("cache_size", 2))
    core = ov.Core()
    check_properties(core, device, settings)
    properties = {**settings, "INFERENCE_NUM_THREADS": setup["threads"]}
    model = _PagedModel(core, setup["folder"], device, properties, cache_gib, setup["at_once"])
    description = {
        "version": f"openvino {ov.get_version()}",
        "device": f"{device} ({core.get_property(device, 'FULL_DEVICE_NAME')})",
        "scheduler": "prompts whole, then a token a row",
        **{name: str(value) for name, value in properties.items()},
    }
    return description, model.answer


class _Row:
    """A rollout under way: its token ids, the cache blocks that hold them, and its log-probs."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.ids, self.request = list(request["ids"]), request
        self.blocks: list[int] = []
        self.logprobs: list[float] = []
        self.generator = np.random.Generator(np.random.Philox(key=request["seed"] % 2**64))
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []  # of each token: keys and values [L, H * D]
        self.finish = ""

    @property
    def cached(self) -> int:
        """The number of tokens in the cache before the next forward pass."""
        return len(self.ids) - 1

    def draw(self, logits: np.ndarray) -> None:
        """Sample the next token from logits [V], and set ``finish`` if it is the last."""
        temperature = self.request["temperature"]
        scaled = logits.astype(np.float64) / (temperature or 1.0)
        # so that no exponential overflows
        scaled -= scaled.max()
        logprobs = scaled - np.log(np.exp(scaled).sum())
        token = int(logits.argmax()) if temperature == 0 else self._sample(np.exp(logprobs))
        self.ids.append(token)
        self.logprobs.append(float(logprobs[token]))
        new = len(self.ids) - len(self.request["ids"])
        if token in self.request["stops"]:
            self.finish = "stop"
        elif new >= self.request["max_tokens"]:
            self.finish = "length"

    def _sample(self, probabilities: np.ndarray) -> int:
        # side="right": a token of probability 0 is never drawn
        threshold = self.generator.random() * probabilities.sum()
        index = np.searchsorted(np.cumsum(probabilities), threshold, side="right")
        return int(min(index, len(probabilities) - 1))


class _Forward(NamedTuple):
    """A forward pass's output: logits [rows, V] after each row's last token; keys and values [tokens, L, H * D]."""

    logits: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class _PagedModel:
    """A compiled model with its paged cache."""

    def __init__(
        self, core: ov.Core, folder: str, device: str, properties: dict[str, Any], cache_gib: float, at_once: int
    ) -> None:
        self._core, self._device, self._properties = core, device, properties
        self._cache_gib, self._at_once = cache_gib, at_once
        self._model = core.read_model(f"{folder}/openvino_model.xml")
        paged_attention_transformation(self._model)
        self._layers = self._output_keys_and_values()
        self._select_last_tokens()
        self._model.validate_nodes_and_infer_types()
        self._first: dict[tuple[int, ...], np.ndarray] = {}  # logits after each prompt
        self._sha256 = ""  # of the weights in the model
        self._readers: dict[str, list[tuple[Any, tuple[int, ...]]]] = {}  # weight -> its readers, with shapes
        self._compile()

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sample a rollout for each row; or load new weights, if the only row is ``{"push": FILE, "known": bool}``."""
        if len(rows) == 1 and "push" in rows[0]:
            return [{"sha256": self._push(rows[0]["push"], known=rows[0]["known"])}]
        rollouts = [_Row(row) for row in rows]
        for batch in _batches(rollouts, self._at_once):
            self._draw(batch)
        _save(rollouts)
        return [
            {
                "ids": row.ids[len(row.request["ids"]) :],
                "finish": row.finish,
                "logprobs": row.logprobs,
                "weights": self._sha256,
            }
            for row in rollouts
        ]

    def _draw(self, rows: list[_Row]) -> None:
        self._free, self._first = list(range(self._blocks)), {}
        leaders: dict[tuple[int, ...], _Row] = {}  # the first row of each prompt
        for row in rows:
            leaders.setdefault(tuple(row.ids), row)
        for batch in _prefill_batches(list(leaders.values())):
            self._prefill(batch)
        for row in rows:
            self._share_prompt(row, leaders[tuple(row.request["ids"])])
        for row in rows:  # only after all rows share the prompt
            row.draw(self._first[tuple(row.request["ids"])])
        while unfinished := [row for row in rows if not row.finish]:
            self._step(unfinished)

    def _prefill(self, rows: list[_Row]) -> None:
        for row in rows:
            row.blocks = self._allocate(-(-len(row.ids) // _BLOCK), row)
        output = self._forward([row.ids for row in rows], [0] * len(rows), [row.blocks for row in rows])
        start = 0
        for n, row in enumerate(rows):
            self._first[tuple(row.ids)] = output.logits[n]
            tokens = slice(start, start + len(row.ids))
            row.kept = list(zip(output.keys[tokens], output.values[tokens], strict=True))
            start = tokens.stop

    def _share_prompt(self, row: _Row, leader: _Row) -> None:
        """Give a row the cached prompt of its leader, the first row with that prompt.

        Full blocks are shared. If the last block is not full, it will grow, so the row gets a copy of it.
        """
        if row is leader:
            return
        row.kept, full = list(leader.kept[: len(row.ids)]), len(row.ids) // _BLOCK
        row.blocks = leader.blocks[:full]
        if len(row.ids) % _BLOCK:
            (copy,) = self._allocate(1, row)
            for store in self._stores:  # keys or values of a layer
                store[copy] = store[leader.blocks[full]]
            row.blocks.append(copy)

    def _step(self, rows: list[_Row]) -> None:
        for row in rows:
            # the last block is full
            if row.cached % _BLOCK == 0:
                row.blocks += self._allocate(1, row)
        output = self._forward(
            [row.ids[-1:] for row in rows], [row.cached for row in rows], [row.blocks for row in rows]
        )
        for n, row in enumerate(rows):
            if row.request["keep"]:
                row.kept.append((output.keys[n], output.values[n]))
            row.draw(output.logits[n])

    def _allocate(self, count: int, row: _Row) -> list[int]:
        if len(self._free) < count:
            raise ValueError(
                f"the cache has {self._blocks} blocks of {_BLOCK} tokens, too few for a row of {len(row.ids)} tokens "
                "in addition to the others: set a larger cache_size, or draw fewer rows at once"
            )
        blocks, self._free = self._free[:count], self._free[count:]
        return blocks

    def _forward(self, ids: list[list[int]], past: list[int], blocks: list[list[int]]) -> _Forward:
        lengths = [len(row_ids) for row_ids in ids]
        begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)  # [rows + 1], where each row's tokens begin
        positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, lengths, strict=True)])  # [tokens]
        inputs = {
            "input_ids": np.concatenate(ids).astype(np.int64),  # [tokens]
            "position_ids": positions.astype(np.int64),  # [tokens]
            "past_lens": np.array(past, dtype=np.int32),  # [rows], tokens in the cache
            "subsequence_begins": begins,  # [rows + 1]
            "block_indices": np.concatenate(blocks).astype(np.int32),  # [blocks of all rows]
            "block_indices_begins": np.concatenate([[0], np.cumsum([len(b) for b in blocks])]).astype(np.int32),
            "max_context_len": np.array(max(p + n for p, n in zip(past, lengths, strict=True)), dtype=np.int32),
            "last_tokens": (begins[1:] - 1).astype(np.int64),  # [rows]
        }
        for name, value in inputs.items():
            self._request.set_tensor(name, ov.Tensor(value))
        self._request.infer()
        logits = np.array(self._request.get_output_tensor(0).data)  # [rows, 1, V]
        # keys and values in turn, layer after layer, each [tokens, H * D]
        outputs = [self._request.get_output_tensor(n).data for n in range(1, 1 + 2 * self._layers)]
        keys, values = (np.stack([np.array(array) for array in outputs[which::2]], 1) for which in (0, 1))
        return _Forward(logits.reshape(len(ids), -1), keys, values)

    def _push(self, path: str, *, known: bool) -> str:
        """Load the weights of a file into the model; return the sha256 of the weights that the model then holds.

        ``known``: the model holds these weights already, so nothing is replaced; the function only finds out which
        operators of the model read each weight. The hash covers the names in sorted order, each with its numbers.
        """
        with np.load(path, allow_pickle=False) as file:
            weights = {name: file[name] for name in file.files}
        if known:
            self._readers = _find_readers(self._model, weights)
        else:
            for name, array in weights.items():
                for reader, shape in self._readers[name]:
                    reader.replace_source_output(opset13.constant(array.reshape(shape)).output(0))
            self._compile()
        hasher = hashlib.sha256()
        for name in sorted(weights):
            # if the readers of a weight held different numbers, the hash would differ from the learner's
            contents = {reader.get_source_output().get_node().data.tobytes() for reader, _ in self._readers[name]}
            hasher.update(b"".join([name.encode(), *sorted(contents)]))
        self._sha256 = hasher.hexdigest()
        return self._sha256

    def _output_keys_and_values(self) -> int:
        """Add the keys and values of each attention layer to the model's outputs; return the number of layers."""
        nodes = [node for node in self._model.get_ordered_ops() if "PagedAttention" in node.get_type_name()]
        # the number in the name of a cache is that of the layer
        nodes.sort(key=lambda node: int(node.input_value(3).get_node().get_friendly_name().rpartition(".")[2]))
        for node in nodes:
            self._model.add_results([opset13.result(node.input_value(1)), opset13.result(node.input_value(2))])
        return len(nodes)

    def _select_last_tokens(self) -> None:
        """Make the model compute logits of each row's last token only, which saves most of the work on a prompt."""
        head = self._model.get_results()[0].input_value(0).get_node()
        # back to the product that computes logits from hidden states
        while head.get_type_name() != "MatMul":
            head = head.input_value(0).get_node()
        last = opset13.parameter([-1], ov.Type.i64, name="last_tokens")
        last.output(0).get_tensor().set_names({"last_tokens"})
        states = head.input_value(0)  # [tokens, D]
        selected = opset13.gather(states, last, opset13.constant(np.int64(0)))
        head.input(0).replace_source_output(selected.output(0))
        self._model.add_parameters([last])

    def _compile(self) -> None:
        compiled = self._core.compile_model(self._model, self._device, self._properties)
        self._request = compiled.create_infer_request()
        caches = [port for port in compiled.inputs if "cache." in port.get_any_name()]
        shapes = [[size.get_length() for size in list(port.get_partial_shape())[1:]] for port in caches]  # of a block
        types = [port.get_element_type() for port in caches]
        sizes = [int(np.prod(shape) * kind.bitwidth // 8) for shape, kind in zip(shapes, types, strict=True)]  # bytes
        self._blocks = int(self._cache_gib * _GIB // sum(sizes))
        self._stores = [np.zeros((self._blocks, size), dtype=np.uint8) for size in sizes]  # [blocks, bytes of a block]
        for port, store, shape, kind in zip(caches, self._stores, shapes, types, strict=True):
            self._request.set_tensor(port, ov.Tensor(store, ov.Shape([self._blocks, *shape]), kind))


def _find_readers(model: Any, weights: dict[str, np.ndarray]) -> dict[str, list[tuple[Any, tuple[int, ...]]]]:
    """Return, by weight name, the (operator input, shape) pairs at which operators of the model read this weight.

    The model must hold exactly these ``weights``, since its constants are matched to weights by their content. If
    several weights have equal content, the path of the operator decides.
    """
    by_content: dict[bytes, list[str]] = {}
    for name, array in weights.items():
        by_content.setdefault(_content_hash(array), []).append(name)
    readers: dict[str, list[tuple[Any, tuple[int, ...]]]] = {name: [] for name in weights}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
            continue
        names = by_content.get(_content_hash(node.data), [])
        for reader in node.output(0).get_target_inputs() if names else ():
            path = f"{node.get_friendly_name()} {reader.get_node().get_friendly_name()}"
            # norms that are all ones, for example, have equal content
            matches = names if len(names) == 1 else [name for name in names if f".{name.rpartition('.')[0]}" in path]
            if len(matches) == 1:
                readers[matches[0]].append((reader, tuple(node.data.shape)))
    missing = [name for name, inputs in readers.items() if not inputs]
    if missing:
        raise ValueError(
            f"{len(missing)} of the learner's {len(weights)} weights match no constant in the engine's model: "
            f"{missing[0]}"
        )
    return readers


def _content_hash(numbers: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(numbers, dtype=np.float32).tobytes()).digest()


def _batches(rows: list[_Row], limit: int) -> list[list[_Row]]:
    """Split rows into batches of at most ``limit`` rows; rows with the same prompt stay together even beyond it."""
    groups: dict[tuple[int, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.ids), []).append(row)
    batches: list[list[_Row]] = [[]]
    for group in groups.values():
        if batches[-1] and len(batches[-1]) + len(group) > limit:
            batches.append([])
        batches[-1].extend(group)
    return batches


def _prefill_batches(rows: list[_Row]) -> list[list[_Row]]:
    batches: list[list[_Row]] = [[]]
    for row in rows:
        if batches[-1] and sum(len(other.ids) for other in batches[-1]) + len(row.ids) > _PREFILL_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _save(rows: list[_Row]) -> None:
    """Save the keys and values of the rows that name a file under "keep", as float32 arrays [tokens, L, H * D].

    They include those of the prompt, but not of the last token.
    """
    arrays = dict[str, Any]()
    for n, row in enumerate(rows):
        if row.request["keep"]:
            arrays[f"{n}.keys"] = np.stack([keys for keys, _ in row.kept])
            arrays[f"{n}.values"] = np.stack([values for _, values in row.kept])
    for path in {row.request["keep"] for row in rows} - {None}:
        np.savez(path, **arrays)
