"""OpenVINO as training draws from it: its paged attention and its cache, weights that change, K and V as they go in.

OpenVINO GenAI hands out neither the keys and values that its cache codes nor log-probs at another temperature than 1,
so the compiled model is fed here: the same transformation, the same kernels, the same cache under the same properties.
A prompt is read whole, once for all rows that begin with it; then every row grows by a token at a time.

    [{"push": FILE.npz, "known": false}]                  -> [{"sha256": of the weights that the model holds now}]
    [{"ids": [...], "most": 24, "keep": FILE, ...}, ...]  -> [{"ids", "finish", "logprobs", "weights": their sha256}]
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
_AT_ONCE = 2048  # tokens of prompts in one forward
_GIB = 1 << 30


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """The model of a folder under the settings; what the engine does not know it says itself."""
    settings, device = dict(setup["settings"]), setup["device"]
    space = float(settings.pop("cache_size", 2))
    core = ov.Core()
    check_properties(core, device, settings)
    properties = {**settings, "INFERENCE_NUM_THREADS": setup["threads"]}
    model = _Served(core, setup["folder"], device, properties, space, setup["at_once"])
    description = {
        "version": f"openvino {ov.get_version()}",
        "device": f"{device} ({core.get_property(device, 'FULL_DEVICE_NAME')})",
        "scheduler": "prompts whole, then a token a row",
        **{name: str(value) for name, value in properties.items()},
    }
    return description, model.answer


class _Row:
    """A row under way: its tokens, the blocks that hold them, and what it drew."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.ids, self.asked = list(asked["ids"]), asked
        self.blocks: list[int] = []
        self.logprobs: list[float] = []
        self.draws = np.random.Generator(np.random.Philox(key=asked["seed"] % 2**64))
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []  # of each token: keys and values [L, H * D]
        self.finish = ""

    @property
    def seen(self) -> int:
        """Tokens in the cache before the next forward."""
        return len(self.ids) - 1

    def draw(self, logits: np.ndarray) -> None:
        """Take the next token from logits [V], and end where it is the last."""
        temperature = self.asked["temperature"]
        scaled = logits.astype(np.float64) / (temperature or 1.0)
        # so that no exponential overflows
        scaled -= scaled.max()
        logprobs = scaled - np.log(np.exp(scaled).sum())
        token = int(logits.argmax()) if temperature == 0 else self._drawn(np.exp(logprobs))
        self.ids.append(token)
        self.logprobs.append(float(logprobs[token]))
        new = len(self.ids) - len(self.asked["ids"])
        self.finish = "stop" if token in self.asked["stops"] else "length" if new >= self.asked["most"] else ""

    def _drawn(self, shares: np.ndarray) -> int:
        # right: a token without probability is never drawn
        place = np.searchsorted(np.cumsum(shares), self.draws.random() * shares.sum(), side="right")
        return int(min(place, len(shares) - 1))


class _Forward(NamedTuple):
    """Logits [rows, V] of each row's last token, and keys and values of all tokens [tokens, L, H * D]."""

    logits: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class _Served:
    """A compiled model with its cache."""

    def __init__(
        self, core: ov.Core, folder: str, device: str, properties: dict[str, Any], space: float, at_once: int
    ) -> None:
        self._core, self._device, self._properties = core, device, properties
        self._space, self._at_once = space, at_once
        self._model = core.read_model(f"{folder}/openvino_model.xml")
        paged_attention_transformation(self._model)
        self._layers = self._show_keys_and_values()
        self._show_last_tokens()
        self._model.validate_nodes_and_infer_types()
        self._first: dict[tuple[int, ...], np.ndarray] = {}  # logits behind each prompt
        self._held = ""  # the sha256 of the weights in the model
        self._places: dict[str, list[tuple[Any, tuple[int, ...]]]] = {}  # of weights: who reads them, in which shape
        self._compile()

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take weights, or draw rows."""
        if len(rows) == 1 and "push" in rows[0]:
            return [{"sha256": self._push(rows[0]["push"], known=rows[0]["known"])}]
        found = [_Row(row) for row in rows]
        for part in _parts(found, self._at_once):
            self._draw(part)
        _save(found)
        return [
            {
                "ids": row.ids[len(row.asked["ids"]) :],
                "finish": row.finish,
                "logprobs": row.logprobs,
                "weights": self._held,
            }
            for row in found
        ]

    def _draw(self, rows: list[_Row]) -> None:
        self._free, self._first = list(range(self._blocks)), {}
        leaders: dict[tuple[int, ...], _Row] = {}
        for row in rows:
            # the first row of a prompt reads it for all others
            leaders.setdefault(tuple(row.ids), row)
        for some in _batches(list(leaders.values())):
            self._prefill(some)
        for row in rows:
            self._follow(row, leaders[tuple(row.asked["ids"])])
        for row in rows:  # after all have taken the prompt over
            row.draw(self._first[tuple(row.asked["ids"])])
        while open_ := [row for row in rows if not row.finish]:
            self._step(open_)

    def _prefill(self, rows: list[_Row]) -> None:
        for row in rows:
            row.blocks = self._taken(-(-len(row.ids) // _BLOCK), row)
        said = self._forward([row.ids for row in rows], [0] * len(rows), [row.blocks for row in rows])
        start = 0
        for n, row in enumerate(rows):
            self._first[tuple(row.ids)] = said.logits[n]
            part = slice(start, start + len(row.ids))
            row.kept = list(zip(said.keys[part], said.values[part], strict=True))
            start = part.stop

    def _follow(self, row: _Row, leader: _Row) -> None:
        """Take a prompt over that was read for another row: whole blocks are shared, the one that grows is copied."""
        if row is leader:
            return
        row.kept, whole = list(leader.kept[: len(row.ids)]), len(row.ids) // _BLOCK
        row.blocks = leader.blocks[:whole]
        if len(row.ids) % _BLOCK:
            (own,) = self._taken(1, row)
            for store in self._stores:
                store[own] = store[leader.blocks[whole]]  # every layer's keys and values of that block
            row.blocks.append(own)

    def _step(self, rows: list[_Row]) -> None:
        for row in rows:
            # the last block is full
            if row.seen % _BLOCK == 0:
                row.blocks += self._taken(1, row)
        said = self._forward([row.ids[-1:] for row in rows], [row.seen for row in rows], [row.blocks for row in rows])
        for n, row in enumerate(rows):
            if row.asked["keep"]:
                row.kept.append((said.keys[n], said.values[n]))
            row.draw(said.logits[n])

    def _taken(self, count: int, row: _Row) -> list[int]:
        if len(self._free) < count:
            raise ValueError(
                f"the cache has {self._blocks} blocks of {_BLOCK} tokens, too few for a row of {len(row.ids)} tokens "
                "beside the others: a larger cache_size may hold it, or fewer rows at once"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _forward(self, ids: list[list[int]], past: list[int], blocks: list[list[int]]) -> _Forward:
        lengths = [len(own) for own in ids]
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
        # keys and values by turns, layer after layer, each [tokens, H * D]
        shown = [self._request.get_output_tensor(n).data for n in range(1, 1 + 2 * self._layers)]
        keys, values = (np.stack([np.array(part) for part in shown[which::2]], 1) for which in (0, 1))
        return _Forward(logits.reshape(len(ids), -1), keys, values)

    def _push(self, path: str, *, known: bool) -> str:
        """Put the weights of a file in; where they are ``known`` to lie there, learn which constant is which.

        Returns the sha256 of what the model holds afterwards, by the file's names in their order.
        """
        with np.load(path, allow_pickle=False) as file:
            weights = {name: file[name] for name in file.files}
        if known:
            self._places = _places(self._model, weights)
        else:
            for name, own in weights.items():
                for reader, shape in self._places[name]:
                    fresh = opset13.constant(own.reshape(shape))
                    reader.replace_source_output(fresh.output(0))
            self._compile()
        held = hashlib.sha256()
        for name in sorted(weights):
            # all that read a weight must hold the same numbers, or this is another hash
            read = {reader.get_source_output().get_node().data.tobytes() for reader, _ in self._places[name]}
            held.update(b"".join([name.encode(), *sorted(read)]))
        self._held = held.hexdigest()
        return self._held

    def _show_keys_and_values(self) -> int:
        """Outputs for what each layer's attention is given; how many layers there are."""
        found = [node for node in self._model.get_ordered_ops() if "PagedAttention" in node.get_type_name()]
        # by the number of their cache, the order in which the learner counts
        found.sort(key=lambda node: int(node.input_value(3).get_node().get_friendly_name().rpartition(".")[2]))
        for node in found:
            self._model.add_results([opset13.result(node.input_value(1)), opset13.result(node.input_value(2))])
        return len(found)

    def _show_last_tokens(self) -> None:
        """Logits of each row's last token alone: those of whole prompts would be most of the work."""
        head = self._model.get_results()[0].input_value(0).get_node()
        # back to the product that makes logits of states
        while head.get_type_name() != "MatMul":
            head = head.input_value(0).get_node()
        last = opset13.parameter([-1], ov.Type.i64, name="last_tokens")
        last.output(0).get_tensor().set_names({"last_tokens"})
        states = head.input_value(0)  # [tokens, D]
        chosen = opset13.gather(states, last, opset13.constant(np.int64(0)))
        head.input(0).replace_source_output(chosen.output(0))
        self._model.add_parameters([last])

    def _compile(self) -> None:
        compiled = self._core.compile_model(self._model, self._device, self._properties)
        self._request = compiled.create_infer_request()
        caches = [port for port in compiled.inputs if "cache." in port.get_any_name()]
        shapes = [[part.get_length() for part in list(port.get_partial_shape())[1:]] for port in caches]  # of a block
        kinds = [port.get_element_type() for port in caches]
        sizes = [int(np.prod(shape) * kind.bitwidth // 8) for shape, kind in zip(shapes, kinds, strict=True)]  # bytes
        self._blocks = int(self._space * _GIB // sum(sizes))
        self._stores = [np.zeros((self._blocks, size), dtype=np.uint8) for size in sizes]  # [blocks, bytes of a block]
        for port, store, shape, kind in zip(caches, self._stores, shapes, kinds, strict=True):
            self._request.set_tensor(port, ov.Tensor(store, ov.Shape([self._blocks, *shape]), kind))


def _places(model: Any, weights: dict[str, np.ndarray]) -> dict[str, list[tuple[Any, tuple[int, ...]]]]:
    """Where each weight is read in a model that holds these very numbers, told apart by the path of the reader."""
    by_content: dict[bytes, list[str]] = {}
    for name, own in weights.items():
        by_content.setdefault(_digest(own), []).append(name)
    found: dict[str, list[tuple[Any, tuple[int, ...]]]] = {name: [] for name in weights}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
            continue
        names = by_content.get(_digest(node.data), [])
        for reader in node.output(0).get_target_inputs() if names else ():
            path = f"{node.get_friendly_name()} {reader.get_node().get_friendly_name()}"
            # several weights may hold the same numbers, such as norms that are all ones
            fitting = names if len(names) == 1 else [one for one in names if f".{one.rpartition('.')[0]}" in path]
            if len(fitting) == 1:
                found[fitting[0]].append((reader, tuple(node.data.shape)))
    lacking = [name for name, places in found.items() if not places]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(weights)} weights of the learner are not in the engine's model, or not by "
            f"themselves: {lacking[0]}"
        )
    return found


def _digest(numbers: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(numbers, dtype=np.float32).tobytes()).digest()


def _parts(rows: list[_Row], most: int) -> list[list[_Row]]:
    """Rows of the same prompt together, ``most`` rows at once or one prompt's."""
    groups: dict[tuple[int, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.ids), []).append(row)
    parts: list[list[_Row]] = [[]]
    for own in groups.values():
        if parts[-1] and len(parts[-1]) + len(own) > most:
            parts.append([])
        parts[-1].extend(own)
    return parts


def _batches(rows: list[_Row]) -> list[list[_Row]]:
    parts: list[list[_Row]] = [[]]
    for row in rows:
        if parts[-1] and sum(len(one.ids) for one in parts[-1]) + len(row.ids) > _AT_ONCE:
            parts.append([])
        parts[-1].append(row)
    return parts


def _save(rows: list[_Row]) -> None:
    """Keys and values [tokens, L, H * D] float32 of the rows that are to be kept, those of their prompts among them."""
    arrays = dict[str, Any]()
    for n, row in enumerate(rows):
        if row.asked["keep"]:
            arrays[f"{n}.keys"] = np.stack([keys for keys, _ in row.kept])
            arrays[f"{n}.values"] = np.stack([values for _, values in row.kept])
    for path in {row.asked["keep"] for row in rows} - {None}:
        np.savez(path, **arrays)
