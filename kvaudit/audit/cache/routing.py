"""Which experts a mixture-of-experts model sent each token to: noted while sampling, held to while learning.

Two passes round differently, so a token whose best experts are nearly tied may go elsewhere in the learner's pass,
which moves log-probs by far more than rounding. The choice is therefore part of the record. Only the choice is: the
experts' weights are computed by the model's own formula from the learner's own router, so gradients flow through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from kvaudit.audit.cache.attention import ExpertRoutes, find_decoder, inner_model
from kvaudit.core.errors import DataError, RunError

NO_EXPERT = -1  # in a table of experts: this token was never sent anywhere
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # names of one number in configs
_CHOOSES = (torch.topk, torch.Tensor.topk)


class RecordedRoutes:
    """The choices of a sampler's forwards, one after the other: int16 [B, T, M, k] of M blocks."""

    def __init__(self, blocks: int, rows: int) -> None:
        self._blocks, self._rows = blocks, rows
        self._table: Tensor | None = None  # [B, C + 1, M, k]; the last column takes the choices of padding
        self._at = torch.empty(0, dtype=torch.int64)
        self._needed, self._met = 0, 0

    def begin(self, positions: Tensor, longest: int) -> None:
        """Announce a forward: row positions [B, Q], -1 = padding, of rows that have then seen ``longest`` at most."""
        self._at, self._needed, self._met = positions.long(), longest, 0

    def chosen(self, block: int, own: Tensor) -> Tensor:
        table = self._grown(own)
        # [B, Q, k]: padding goes to the last column
        at = torch.where(self._at >= 0, self._at, table.shape[1] - 1)[..., None].expand(*self._at.shape, own.shape[-1])
        table[:, :, block].scatter_(1, at, own.view(at.shape).to(table.dtype))  # own [B*Q, k]
        self._met += 1
        return own

    def _grown(self, own: Tensor) -> Tensor:
        table = self._table
        if table is None:
            table = own.new_full((self._rows, 1, self._blocks, own.shape[-1]), NO_EXPERT, dtype=torch.int16)
        if self._needed >= table.shape[1]:
            # twice what is needed, so that few steps copy; the column of padding is dropped and comes last again
            more = table.new_full((self._rows, 2 * self._needed - table.shape[1] + 1, *table.shape[2:]), NO_EXPERT)
            table = torch.cat([table[:, :-1], more], 1)
        self._table = table
        return table

    def settle(self) -> None:
        """After a forward: raise RunError where some block did not say what it chose."""
        _require_every(self._met, self._blocks)

    @property
    def noted(self) -> Tensor:
        """A copy of all choices so far."""
        assert self._table is not None
        return self._table.clone()

    def take(self, noted: Tensor) -> None:
        """Let the forward under way have chosen what another cache ``noted`` of it, as its first."""
        self._table, self._met = noted.clone(), self._blocks

    def table(self, tokens: int) -> Tensor:
        """The experts of the first ``tokens`` tokens, NOBODY for those never fed: [B, tokens, M, k] on CPU."""
        assert self._table is not None
        known = self._table[:, :-1][:, :tokens].cpu()  # [B, tokens at most, M, k]
        return torch.nn.functional.pad(known, (0, 0, 0, 0, 0, tokens - known.shape[1]), value=NO_EXPERT)

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        assert self._table is not None
        self._rows, self._table = len(rows), self._table[rows]

    def join(self, other: RecordedRoutes) -> None:
        """Hold the choices for the rows of another record too, behind its own."""
        assert self._table is not None
        assert other._table is not None
        width = max(self._table.shape[1], other._table.shape[1])
        both = (table[:, :-1] for table in (self._table, other._table))  # the column of padding comes last again
        wider = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, width - t.shape[1]), value=NO_EXPERT) for t in both]
        self._rows, self._table = self._rows + other._rows, torch.cat(wider)


class ReplayedRoutes:
    """Choices of a learner's pass: experts [B, Q, M, k] along its columns; where they are NOBODY, the model's own."""

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts.long()
        self._met: set[int] = set()

    def settle(self) -> None:
        """After a forward: raise RunError where some block did not ask."""
        _require_every(len(self._met), self._experts.shape[2])

    def chosen(self, block: int, own: Tensor) -> Tensor:
        self._met.add(block)
        wanted = self._experts[:, :, block].flatten(0, 1)  # [B*Q, k], as the router gives them
        if wanted.shape != own.shape:
            raise DataError(
                f"the ledger sends {len(wanted)} tokens to {wanted.shape[1]} experts each, the model {len(own)} to "
                f"{own.shape[1]}: it is of another model"
            )
        return torch.where(wanted >= 0, wanted, own)


def _require_every(met: int, blocks: int) -> None:
    if met != blocks:
        raise RunError(
            f"{met} of the model's {blocks} mixture-of-experts blocks said which experts they chose; which it uses "
            "cannot be recorded; use another model"
        )


class _Choice(TorchFunctionMode):
    """While a block computes: its one top-k over all experts is shown to the routes, which may decide otherwise."""

    def __init__(self, routes: ExpertRoutes, block: int, experts: int) -> None:
        super().__init__()
        self._routes, self._block, self._experts = routes, block, experts
        self.met = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # another top-k is none of experts: some models choose groups of them first
        if func not in _CHOOSES or args[0].dim() != 2 or args[0].shape[1] != self._experts:
            return result
        self.met += 1
        chosen = self._routes.chosen(self._block, result.indices)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))  # this router's scores, with gradient


class _BlockHooks:
    """The hooks of one mixture-of-experts block, which, unlike its layer and the attention, is not handed ``kv=``.

    The attention says it too, because a layer that is computed again for its gradient calls no hooks of its own.
    """

    def __init__(self, layer: Any, block: int, experts: int) -> None:
        self._layer, self._block, self._experts = layer, block, experts
        self._routes: ExpertRoutes | None = None
        self._from_attention = False
        self._choice: _Choice | None = None

    def arrive(self, module: Any, _: Any, kwargs: dict[str, Any]) -> None:
        """Before the layer, and before its attention."""
        kv = kwargs.get("kv")
        if kv is not None:
            self._routes, self._from_attention = kv.routes, module is not self._layer

    def leave(self, *_: Any) -> None:
        """After the layer."""
        self._routes, self._from_attention = None, False

    def __call__(self, *_: Any) -> None:
        """Before the block."""
        if self._routes is None:
            return
        if not self._from_attention and _is_computed_again(self._layer):
            raise RunError(
                f"a {type(self._layer).__name__} computed again would choose its experts anew; switch gradient "
                "checkpointing off for this model"
            )
        self._choice = _Choice(self._routes, self._block, self._experts)
        # left open until ``after``: the router is called inside the block
        self._choice.__enter__()  # type: ignore[no-untyped-call]

    def after(self, block: Any, _: Any, output: Any) -> None:
        """After the block, however it ended: without output, an error is under way already."""
        choice, self._choice = self._choice, None
        if choice is None:
            return
        choice.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.leave()  # a layer computed again for its gradient calls no hook that would
        if choice.met != 1 and output is not None:
            raise RunError(
                f"a {type(block).__name__} chose experts {choice.met} times by a top-k over all {self._experts}, "
                "wanted once: which experts it uses cannot be recorded; use another model"
            )


def _is_computed_again(layer: Any) -> bool:
    return isinstance(layer, GradientCheckpointingLayer) and layer.training and layer.gradient_checkpointing


def hook_expert_blocks(model: Any) -> int:
    """How many mixture-of-experts blocks a model has, each of them hooked from now on; 0 for a dense model.

    Raises RunError for experts that no block known by its form chooses among.
    """
    model = inner_model(model)
    found = [
        (layer, block)
        for layers in find_decoder(model).children()
        if isinstance(layers, torch.nn.ModuleList)
        for layer in layers
        for block in layer.modules()
        if "experts" in dict(block.named_children())
    ]
    _require_all(model, [block for _, block in found])
    for number, (layer, block) in enumerate(found):
        # a copy of a hooked model is hooked too, so the block itself has to say it
        if not any(isinstance(hook, _BlockHooks) for hook in block._forward_pre_hooks.values()):
            _register(_BlockHooks(layer, number, _experts(model)), layer, block)
    return len(found)


def _register(hooks: _BlockHooks, layer: Any, block: Any) -> None:
    # the layer and the attention inside it: either may be the first that is handed ``kv=``
    for module in (layer, *(part for part in layer.modules() if "layer_idx" in vars(part) and part is not layer)):
        module.register_forward_pre_hook(hooks.arrive, with_kwargs=True)
    layer.register_forward_hook(hooks.leave, always_call=True)
    block.register_forward_pre_hook(hooks)
    block.register_forward_hook(hooks.after, always_call=True)


def _require_all(model: Any, blocks: list[Any]) -> None:
    """Every router that transformers knows of stands in one of the blocks."""
    recorded = (type(model)._can_record_outputs or {}).get("router_logits", [])
    classes = [router.target_class for router in (recorded if isinstance(recorded, list) else [recorded])]
    inside = {part for block in blocks for part in block.modules()}
    for module in find_decoder(model).modules():
        if type(module) in classes and module not in inside:
            raise RunError(
                f"model {model.config.model_type!r} routes tokens by a {type(module).__name__} outside of any block of "
                "experts: which experts it uses cannot be recorded; use another model"
            )


def _experts(model: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    numbers = [config.to_dict()[name] for name in _EXPERTS if name in config.to_dict()]
    if not numbers:
        raise RunError(
            f"the config of model {model.config.model_type!r} has none of {', '.join(_EXPERTS)}: which experts it uses "
            "cannot be recorded; use another model"
        )
    return int(numbers[0])


def check_experts(records: Sequence[Tensor | None], model: Any, *, reroute: bool) -> None:
    """Raise DataError where recorded experts [..., M, k] are not of the model's blocks, or are missing unasked."""
    blocks = hook_expert_blocks(model)
    for experts in records:
        if experts is None and blocks and not reroute:
            raise DataError(
                f"the ledger does not say which experts of the model's {blocks} mixture-of-experts blocks were chosen; "
                "sample again, or let the learner choose anew: reroute=True"
            )
        if experts is not None and (experts.shape[-2] != blocks or int(experts.max()) >= _experts(model)):
            raise DataError(
                f"the ledger has {experts.shape[-2]} blocks that choose experts up to number {int(experts.max())}, the "
                f"model {blocks} blocks: it is of another model"
            )
