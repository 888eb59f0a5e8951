"""The experts that a mixture-of-experts model selects for each token: recorded in sampling, replayed in learning.

The sampler's and the learner's passes round differently, so a token whose best experts nearly tie may get other experts
from the learner, which changes log-probs by far more than rounding. The ledger therefore records the selection. The
experts' weights are computed by the model's formula from the learner's router, so gradients flow through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from kvaudit.audit.cache.attention import ExpertRoutes, find_decoder, inner_model
from kvaudit.core.errors import DataError, RunError

NO_EXPERT = -1  # in a table of experts: the token was never sent anywhere
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # keys in configs
_TOPK = (torch.topk, torch.Tensor.topk)


class RecordedRoutes:
    """The recorder of the experts in a sampler's forwards, k per token from each of M blocks: int16 [B, T, M, k]."""

    def __init__(self, blocks: int, rows: int) -> None:
        self._blocks, self._rows = blocks, rows
        self._table: Tensor | None = None  # [B, C + 1, M, k]; the last column takes the experts of padding
        self._positions = torch.empty(0, dtype=torch.int64)
        self._needed, self._calls = 0, 0

    def begin(self, positions: Tensor, longest: int) -> None:
        """Begin to record a forward whose tokens have the positions [B, Q] in their rows, -1 = padding.

        ``longest`` is the length in tokens of the longest row after the forward.
        """
        self._positions, self._needed, self._calls = positions.long(), longest, 0

    def route(self, block: int, experts: Tensor) -> Tensor:
        table = self._grow(experts)
        positions = torch.where(self._positions >= 0, self._positions, table.shape[1] - 1)[..., None]
        index = positions.expand(*self._positions.shape, experts.shape[-1])  # [B, Q, k]
        table[:, :, block].scatter_(1, index, experts.view(index.shape).to(table.dtype))  # experts [B*Q, k]
        self._calls += 1
        return experts

    def _grow(self, experts: Tensor) -> Tensor:
        table = self._table
        if table is None:
            table = experts.new_full((self._rows, 1, self._blocks, experts.shape[-1]), NO_EXPERT, dtype=torch.int16)
        if self._needed >= table.shape[1]:
            # grow to twice the need, so that few steps copy; the last column, for padding, moves to the new end
            new = table.new_full((self._rows, 2 * self._needed - table.shape[1] + 1, *table.shape[2:]), NO_EXPERT)
            table = torch.cat([table[:, :-1], new], 1)
        self._table = table
        return table

    def settle(self) -> None:
        """Check a finished forward: raise RunError if some block did not report its experts."""
        _require_every(self._calls, self._blocks)

    def copy_table(self) -> Tensor:
        """Return a copy of the experts recorded so far, to be passed to ``set_first`` of another recorder."""
        assert self._table is not None
        return self._table.clone()

    def set_first(self, table: Tensor) -> None:
        """Set the experts of the first forward, which another cache has recorded."""
        self._table, self._calls = table.clone(), self._blocks

    def table(self, tokens: int) -> Tensor:
        """Return the experts of the first ``tokens`` tokens, on the CPU: [B, tokens, M, k].

        They are NO_EXPERT for a token that was never fed.
        """
        assert self._table is not None
        recorded = self._table[:, :-1][:, :tokens].cpu()
        return _pad_tokens(recorded, tokens)

    def reindex(self, rows: Tensor) -> None:
        assert self._table is not None
        self._rows, self._table = len(rows), self._table[rows]

    def join(self, other: RecordedRoutes) -> None:
        assert self._table is not None
        assert other._table is not None
        width = max(self._table.shape[1], other._table.shape[1])
        # without the column of padding, which comes last again
        tables = [_pad_tokens(table[:, :-1], width) for table in (self._table, other._table)]
        self._rows, self._table = self._rows + other._rows, torch.cat(tables)


def _pad_tokens(experts: Tensor, tokens: int) -> Tensor:
    return pad(experts, (0, 0, 0, 0, 0, tokens - experts.shape[1]), value=NO_EXPERT)


class ReplayedRoutes:
    """The recorded experts [B, Q, M, k] for a learner's pass; where they are NO_EXPERT, the model selects by itself."""

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts.long()
        self._called: set[int] = set()

    def settle(self) -> None:
        """Check a finished forward: raise RunError if some block did not ask for its experts."""
        _require_every(len(self._called), self._experts.shape[2])

    def route(self, block: int, experts: Tensor) -> Tensor:
        self._called.add(block)
        recorded = self._experts[:, :, block].flatten(0, 1)  # [B*Q, k], as the router returns them
        if recorded.shape != experts.shape:
            raise DataError(
                f"the ledger sends {len(recorded)} tokens to {recorded.shape[1]} experts each, the model "
                f"{len(experts)} to {experts.shape[1]}: it is of another model"
            )
        return torch.where(recorded >= 0, recorded, experts)


def _require_every(calls: int, blocks: int) -> None:
    if calls != blocks:
        raise RunError(
            f"{calls} of the model's {blocks} mixture-of-experts blocks reported which experts they chose; which it "
            "uses cannot be recorded; use another model"
        )


class _TopkInterceptor(TorchFunctionMode):
    """The torch function mode that passes an expert block's top-k experts to ``routes``, which may override them."""

    def __init__(self, routes: ExpertRoutes, block: int, experts: int) -> None:
        super().__init__()
        self._routes, self._block, self._experts = routes, block, experts
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # other calls of top-k are not over experts: some models first choose groups of them
        if func not in _TOPK or args[0].dim() != 2 or args[0].shape[1] != self._experts:
            return result
        self.calls += 1
        experts = self._routes.route(self._block, result.indices)
        return torch.return_types.topk((args[0].gather(1, experts), experts))  # this router's scores, with gradient


class _BlockHooks:
    """The hooks of one mixture-of-experts block, which find the forward's ``kv`` and intercept the choice of experts.

    Blocks are not passed ``kv``, so it is taken from the arguments of the layer around the block, and also of that
    layer's attention, because gradient checkpointing recomputes a layer without the layer's own hooks.
    """

    def __init__(self, layer: Any, block: int, experts: int) -> None:
        self._layer, self._block, self._experts = layer, block, experts
        self._routes: ExpertRoutes | None = None
        self._from_attention = False
        self._interceptor: _TopkInterceptor | None = None

    def enter_layer(self, module: Any, _: Any, kwargs: dict[str, Any]) -> None:
        """Take ``kv``, the cache, from the call (a hook before the layer and before its attention)."""
        kv = kwargs.get("kv")
        if kv is not None:
            self._routes, self._from_attention = kv.routes, module is not self._layer

    def leave_layer(self, *_: Any) -> None:
        """Forget ``kv``, the cache (a hook after the layer)."""
        self._routes, self._from_attention = None, False

    def __call__(self, *_: Any) -> None:
        """Start intercepting the block's call of top-k, by which it chooses its experts (a hook before the block)."""
        if self._routes is None:
            return
        layer = self._layer
        may_recompute = not self._from_attention and isinstance(layer, GradientCheckpointingLayer) and layer.training
        if may_recompute and layer.gradient_checkpointing:
            raise RunError(
                f"a {type(layer).__name__} recomputed for its gradient would choose other experts; "
                "switch gradient checkpointing off for this model"
            )
        self._interceptor = _TopkInterceptor(self._routes, self._block, self._experts)
        # left by ``leave_block``: the router is called inside the block
        self._interceptor.__enter__()  # type: ignore[no-untyped-call]

    def leave_block(self, block: Any, _: Any, output: Any) -> None:
        """Stop intercepting the block's choice of experts (a hook after the block).

        It runs also after an error, when there is no output.
        """
        interceptor, self._interceptor = self._interceptor, None
        if interceptor is None:
            return
        interceptor.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.leave_layer()  # a recomputed layer does not call that hook
        if interceptor.calls != 1 and output is not None:
            raise RunError(
                f"a {type(block).__name__} chose experts {interceptor.calls} times by a top-k over all "
                f"{self._experts}, wanted once: which experts it uses cannot be recorded; use another model"
            )


def hook_expert_blocks(model: Any) -> int:
    """Hook a model's mixture-of-experts blocks, so that a pass can record or override the experts; return their number.

    Raises RunError for experts of an unknown kind.
    """
    model = inner_model(model)
    blocks = [
        (layer, block)
        for layers in find_decoder(model).children()
        if isinstance(layers, torch.nn.ModuleList)
        for layer in layers
        for block in layer.modules()
        if "experts" in dict(block.named_children())
    ]
    _require_routers_inside(model, [block for _, block in blocks])
    for number, (layer, block) in enumerate(blocks):
        # checked on the block itself, since a copy of a hooked model is hooked too
        if not any(isinstance(hook, _BlockHooks) for hook in block._forward_pre_hooks.values()):
            _register(_BlockHooks(layer, number, _expert_count(model)), layer, block)
    return len(blocks)


def _register(hooks: _BlockHooks, layer: Any, block: Any) -> None:
    # the layer and the attention inside it: either may be the first to be passed ``kv=``
    for module in (layer, *(part for part in layer.modules() if "layer_idx" in vars(part) and part is not layer)):
        module.register_forward_pre_hook(hooks.enter_layer, with_kwargs=True)
    layer.register_forward_hook(hooks.leave_layer, always_call=True)
    block.register_forward_pre_hook(hooks)
    block.register_forward_hook(hooks.leave_block, always_call=True)


def _require_routers_inside(model: Any, blocks: list[Any]) -> None:
    """Raise RunError if the model has a router, as transformers declares them, outside of the expert ``blocks``."""
    recorders = (type(model)._can_record_outputs or {}).get("router_logits", [])
    classes = [router.target_class for router in (recorders if isinstance(recorders, list) else [recorders])]
    inside = {part for block in blocks for part in block.modules()}
    for module in find_decoder(model).modules():
        if type(module) in classes and module not in inside:
            raise RunError(
                f"model {model.config.model_type!r} routes tokens by a {type(module).__name__} outside of any block of "
                "experts: which experts it uses cannot be recorded; use another model"
            )


def _expert_count(model: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    counts = [config.to_dict()[name] for name in _EXPERT_COUNTS if name in config.to_dict()]
    if not counts:
        raise RunError(
            f"the config of model {model.config.model_type!r} has none of {', '.join(_EXPERT_COUNTS)}: "
            "which experts it uses cannot be recorded; use another model"
        )
    return int(counts[0])


def check_experts(records: Sequence[Tensor | None], model: Any, *, reroute: bool) -> None:
    """Raise DataError if recorded experts [..., M, k] do not fit the model, or if they are missing but needed.

    With ``reroute`` they are not needed, because the model selects its experts again.
    """
    blocks = hook_expert_blocks(model)
    for experts in records:
        if experts is None and blocks and not reroute:
            raise DataError(
                f"the ledger does not say which experts of the model's {blocks} mixture-of-experts blocks were chosen; "
                "sample again, or let the learner choose them: reroute=True"
            )
        if experts is not None and (experts.shape[-2] != blocks or int(experts.max()) >= _expert_count(model)):
            raise DataError(
                f"the ledger has {experts.shape[-2]} blocks that choose experts up to number {int(experts.max())}, the "
                f"model {blocks} blocks: it is of another model"
            )
