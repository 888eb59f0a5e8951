"""What a run asks: the evaluate section of a spec, and what each of its suites does otherwise; how a probe asks it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvaudit.core.policy_names import ENGINE
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.spec_parts import (
    PUBLISHED,
    BatchTokens,
    ContextLength,
    Count,
    Group,
    PluginNames,
    Number,
    Seed,
    Share,
    SpecSection,
    Steps,
    TemperatureOrGreedy,
    Text,
    canonical_policy,
    check_unique,
)
from kvaudit.core.text import short_repr

STRIP = "strip"
# items: what the margins need, by the pilot; every template with each of its twins once
AUTO_ITEMS, ALL_ITEMS = "auto", "all"
FLOOR_ITEMS = 64
FIRST_LOOK = 100  # rows: the fewest that show 5 points where nothing changes
PILOT_ITEMS = 32  # items at each length, where a spec does not say
LEAST_PILOT, MOST_PILOT, _MOST_ITEMS = 24, 48, 1_000_000


def _several(value: Any) -> Any:
    """One value may stand without its brackets."""
    return value if value is None or isinstance(value, list | tuple) else [value]


def _items(value: Any) -> Any:
    if value in (AUTO_ITEMS, ALL_ITEMS) or (type(value) is int and 1 <= value <= _MOST_ITEMS):
        return value
    raise PydanticCustomError("items", f"a whole number from 1 to 1,000,000, {AUTO_ITEMS} or {ALL_ITEMS}")


def _pilot(value: Any) -> Any:
    if value is None or (type(value) is int and (value == 0 or LEAST_PILOT <= value <= MOST_PILOT)):
        return value
    raise PydanticCustomError("pilot", f"0 for none, or a whole number from {LEAST_PILOT} to {MOST_PILOT}")


def _without_reference(policy: Any) -> tuple[Any, Any]:
    """A policy, and the reference that is written next to an engine's settings, None where none is."""
    if not isinstance(policy, Mapping) or ENGINE not in policy:
        return policy, None
    return {key: field for key, field in policy.items() if key != "reference"}, policy.get("reference")


class SuiteSpec(SpecSection):
    """How much of a suite is asked, and what it does otherwise than the grid or the suite itself says.

    ``items`` is a number, ``auto`` or ``all``; what these come to is in the run's provenance once it is known.

    ``max_new_tokens`` and ``placement`` (some of the suite's) stand for what the suite says, ``samples`` and
    ``context_tokens`` for what the grid says. Public rows are asked as published, which is the length 0, unless the
    suite names a context: SUITE@CONTEXT, or ``context:`` with one or several of them, which stands for such suites.
    """

    later = ("max_new_tokens", "samples", "context_tokens", "placement")

    items: Annotated[int | str, BeforeValidator(_items)] = AUTO_ITEMS
    max_new_tokens: Count | None = None
    samples: Group | None = None
    context_tokens: Annotated[tuple[ContextLength, ...], Field(min_length=1), BeforeValidator(_several)] | None = None
    placement: Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(_several)] | None = None


class Thinking(SpecSection):
    """Answers may begin with a thought, for which there are ``budget`` tokens more than for an answer."""

    budget: Steps = 0


def _thinking(value: Any) -> Any:
    if value == STRIP:
        return {"budget": 0}
    if value is not None and not isinstance(value, Mapping | Thinking):
        raise PydanticCustomError("thinking", f"{STRIP}, or {{budget: TOKENS}}")
    return value


def _in_contexts(name: str, part: Any, names: PluginNames | None) -> dict[str, Any]:
    """A suite's part of a spec, or one for each of the contexts that it names; what has no length is given none."""
    if not isinstance(part, Mapping) or "context" not in part:
        return {name: {} if part is None else part}
    if ":" in name:
        raise SpecError(f"evaluate.suites.{name}.context: a task of another harness asks as it asks; leave it out")
    contexts, rest = _several(part["context"]), {key: value for key, value in part.items() if key != "context"}
    if not contexts or not all(isinstance(context, str) for context in contexts):
        raise SpecError(
            f"evaluate.suites.{name}.context is {short_repr(part['context'])}, wanted {PUBLISHED} or names of contexts "
            "(kvaudit list contexts)"
        )
    check_unique(f"evaluate.suites.{name}.context", tuple(contexts))
    bare = {key: value for key, value in rest.items() if key != "context_tokens"}
    found = [name if one == PUBLISHED else f"{name}@{one}" for one in contexts]
    short = {one for one in found if names is not None and names.lengths(one) == "none"}
    if len(short) == len(found):  # nothing takes the length, if one is given: that is for whoever checks it to say
        return dict.fromkeys(found, rest)
    return {one: bare if one in short else rest for one in found}


class Rounds(SpecSection):
    """How long rows are asked, a round at a time, under every way of serving: until each gated facet is decided.

    The gate then decides by bounds that hold at every look (``kvaudit.reports.stats.betting``). ``minutes`` are those
    of asking, without the loading of models; ``first`` is how many rows of a suite the first look has.
    """

    minutes: Annotated[Number, Field(gt=0, le=10_000)] = 10.0
    first: Annotated[int, Field(strict=True, ge=32, le=1_000_000)] = FIRST_LOOK


class EvaluateSpec(SpecSection):
    """The grid: every checkpoint under every policy, on every suite, at every context length.

    ``context_tokens`` are the lengths of suites that are made to one; public rows as published have none (0). With
    ``own_policy_only`` what was trained under a policy is served under that one and none.
    """

    later = ("think", "own_policy_only", "references", "floor", "pilot", "rounds")

    policies: tuple[str, ...] = Field(min_length=1)
    suites: dict[str, SuiteSpec] = Field(min_length=1)
    context_tokens: Annotated[
        tuple[ContextLength, ...], BeforeValidator(lambda one: () if one == PUBLISHED else one)
    ] = ()
    base: bool = False  # evaluate the model before training too, as arm "base"
    samples: Group = 1
    temperature: TemperatureOrGreedy = 0.0
    top_p: Share = 1.0
    seed: Seed = 1000
    batch_tokens: BatchTokens = 16384
    think: Annotated[Thinking | None, BeforeValidator(_thinking)] = None
    own_policy_only: bool = False
    # an engine's condition -> the uncompressed one of the same engine that it is compared with; filled in by names
    references: dict[str, str] = Field(default_factory=dict)
    # items of a suite and length that an engine answers twice more, once in another order; 0: none
    floor: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = FLOOR_ITEMS
    pilot: Annotated[int | None, BeforeValidator(_pilot)] = None  # items that the reference answers first; 0: none
    rounds: Rounds | None = None

    @property
    def pilot_size(self) -> int:
        """How many items of a suite the reference answers at each length before the grid is served."""
        return PILOT_ITEMS if self.pilot is None else self.pilot

    def sized(self, numbers: Mapping[str, int]) -> EvaluateSpec:
        """The same grid with ``numbers`` of items in place of ``auto`` and ``all``, and without suites of 0."""
        open_ = {
            name: part for name, part in self.suites.items() if name in numbers and not isinstance(part.items, int)
        }
        sized = {name: part.model_copy(update={"items": numbers[name]}) for name, part in open_.items()}
        suites = {name: part for name, part in {**self.suites, **sized}.items() if part.items != 0}
        return self.model_copy(update={"suites": suites})

    def contexts_of(self, suite: str) -> tuple[int, ...]:
        """The lengths at which a suite is asked."""
        return self.suites[suite].context_tokens or self.context_tokens

    def samples_of(self, suite: str) -> int:
        """How often each item of a suite is answered."""
        return self.suites[suite].samples or self.samples

    def written(self) -> dict[str, Any]:
        """As of any section, with the word for thoughts that have no budget."""
        row = super().written()
        thinking = row.pop("think", None)
        if thinking is not None:
            row["think"] = thinking if thinking["budget"] else STRIP
        return row

    @property
    def contexts(self) -> tuple[int, ...]:
        """Every length at which some suite is asked."""
        return tuple(dict.fromkeys(length for suite in self.suites for length in self.contexts_of(suite)))

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, value: Any, info: ValidationInfo) -> Any:
        """Policies in their one spelling, and behind them what each engine's condition is compared with."""
        if not isinstance(value, Mapping) or not isinstance(value.get("policies"), list):
            return value
        written = [_without_reference(policy) for policy in value["policies"]]
        texts = [canonical_policy(policy, info.context) for policy, _ in written]
        if info.context is None:
            return {**value, "policies": texts}
        kept = value.get("references")  # of a spec that was written complete
        kept = kept if isinstance(kept, Mapping) else {}
        both = [(text, named or kept.get(text)) for text, (_, named) in zip(texts, written, strict=True)]
        named = {text: info.context.reference(text, one) for text, one in both if one is not None}
        # not every engine has a reference of its own
        others = [text for text in texts if not any(own != text == ref for own, ref in named.items())]
        pairs = [(text, named.get(text) or info.context.reference(text, None)) for text in others]
        compared = {reference for text, reference in pairs if reference != text}
        # one that nothing is compared with is its own reference, or it would pass for a policy of ours
        references = {text: ref for text, ref in pairs if ref is not None and (ref != text or text not in compared)}
        added = [reference for reference in dict.fromkeys(references.values()) if reference not in texts]
        return {**value, "policies": [*texts, *added], "references": references}

    @field_validator("suites", mode="before")
    @classmethod
    def _as_mapping(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return {name: {} for name in check_unique("evaluate.suites", tuple(value))}
        if not isinstance(value, dict):
            return value
        found = [_in_contexts(str(name), part, info.context) for name, part in value.items()]
        names = [name for part in found for name in part]
        check_unique("evaluate.suites", tuple(names))
        return {name: part for each in found for name, part in each.items()}

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> Self:
        check_unique("evaluate.context_tokens", self.context_tokens)
        for suite, part in self.suites.items():
            check_unique(f"evaluate.suites.{suite}.context_tokens", part.context_tokens or ())
            check_unique(f"evaluate.suites.{suite}.placement", part.placement or ())
            self._check_pilot(suite, part)
            if info.context is not None:
                info.context.kind(suite)
                known = info.context.placements(suite)
                for placement in part.placement or ():
                    if placement not in known:
                        raise UnknownName(f"placement of suite {suite}", placement, known)
                self._fill_lengths(suite, info.context)
        asked = info.context and {info.context.lengths(suite) for suite in self.suites}
        if asked == {"none"} and self.context_tokens:
            raise SpecError(
                f"evaluate.context_tokens is {', '.join(map(str, self.context_tokens))}, but every suite asks its rows "
                f"as published; leave it out, or put rows into a context (context: [{PUBLISHED}, book])"
            )
        engines = {*self.references, *self.references.values()}
        if DENSE_POLICY not in check_unique("evaluate.policies", self.policies) and not set(self.policies) <= engines:
            raise SpecError("evaluate.policies lacks 'none'; drift is measured against the uncompressed reference")
        return self

    def _fill_lengths(self, suite: str, names: PluginNames) -> None:
        """Write the length 0 where none can be asked for; raises SpecError where one is lacking, or none fits."""
        part, lengths, key = self.suites[suite], names.lengths(suite), f"evaluate.suites.{suite}.context_tokens"
        bare = names.bare(suite)
        if bare not in self.suites:
            raise SpecError(
                f"evaluate.suites holds {suite} without {bare}: what a context does to the answers is seen beside the "
                f"rows as published; add {bare}: {{}}, or context: [{PUBLISHED}, ...]"
            )
        if lengths == "given":
            if 0 in self.contexts_of(suite) or not self.contexts_of(suite):
                raise SpecError(f"{key} is missing: the suite's items are made to a length; give one in tokens")
        elif lengths == "none" and any(part.context_tokens or ()):
            raise SpecError(
                f"{key} is {', '.join(map(str, part.context_tokens or ()))}, but its rows are asked as published; put "
                "them into a context to have a length (context: book, see kvaudit list contexts)"
            )
        elif part.context_tokens is None and (lengths == "none" or not self.context_tokens):
            filled = part.model_copy(update={"context_tokens": (0,)})
            object.__setattr__(self, "suites", {**self.suites, suite: filled})  # frozen, but still in the making

    def _check_pilot(self, suite: str, part: SuiteSpec) -> None:
        if self.pilot == 0 and part.items == AUTO_ITEMS:
            raise SpecError(
                f"evaluate.suites.{suite}.items is {AUTO_ITEMS}, which takes its size from the pilot, and "
                f"evaluate.pilot is 0; give a number, {ALL_ITEMS}, or leave pilot out"
            )
        if isinstance(part.items, int) and part.items < (self.pilot or 0):
            raise SpecError(
                f"evaluate.pilot is {self.pilot}, suite {suite} has {part.items} items; leave pilot out, or ask more"
            )

    def check_rounds(self, *, trains: bool, gated: Collection[str]) -> None:
        """Raise SpecError where rounds cannot go on until everything is decided."""
        if self.rounds is None:
            return
        if trains:
            raise SpecError("evaluate.rounds is of one checkpoint; leave it out beside train or checkpoints")
        for name, part in self.suites.items():
            if part.items != ALL_ITEMS or part.samples not in (None, 1) or self.samples != 1:
                raise SpecError(f"evaluate.rounds asks each row once; give suite {name} items: {ALL_ITEMS}, samples: 1")
            if len(self.contexts_of(name)) > 1:
                raise SpecError(f"evaluate.rounds asks suite {name} at one length; give one in context_tokens")
        if scores := [name for name in gated if name in self.suites]:
            raise SpecError(
                f"gate.margins names the score of {scores[0]}, and rounds are decided by facets: {scores[0]}.FACET"
            )
        if self.pilot == 0:
            raise SpecError("evaluate.rounds begins with what the pilot finds; leave evaluate.pilot out")

    def check_draws(self) -> None:
        """Raise SpecError where a checkpoint would be asked for the same greedy answer again."""
        asked = {f"evaluate.suites.{suite}.samples": part.samples or 1 for suite, part in self.suites.items()}
        for key, samples in {"evaluate.samples": self.samples, **asked}.items():
            if self.temperature == 0 and samples > 1:
                raise SpecError(
                    f"{key} is {samples} at temperature 0: greedy answers are all the same; "
                    "set samples: 1 or a temperature above 0"
                )


_Price = Annotated[Number, Field(ge=0, le=1e6)]


class Prices(SpecSection):
    """What a million tokens cost, in whatever currency."""

    input: _Price
    output: _Price


class ProbeSpec(SpecSection):
    """How an endpoint is asked, in place of a checkpoint; ``model`` of the spec is its name there.

    ``tokenizer`` (a folder or hub id) counts lengths; without one they are estimated. ``key`` names an environment
    variable. ``timeout`` is in seconds for a whole reply, ``per_minute`` counts requests. ``seeded``: requests carry
    the seed of their draw. ``limit`` is what the endpoint calls the limit of an answer, ``tool_role`` whose message a
    tool's result is: few endpoints take one of a tool that was not called by their own rules.
    """

    tokenizer: Text | None = None
    key: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,99}$")] | None = None
    at_once: Annotated[int, Field(strict=True, ge=1, le=256)] = 4
    per_minute: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    timeout: Annotated[Number, Field(ge=1, le=3600)] = 120.0
    tries: Annotated[int, Field(strict=True, ge=1, le=20)] = 4
    seeded: bool = True
    limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    tool_role: Literal["user", "tool"] = "user"
    price: Prices | None = None

    def measured(self) -> dict[str, Any]:
        """What answers depend on, as plain values: the rest may change while a probe goes on."""
        return self.model_dump(mode="json", include={"tokenizer", "seeded", "tool_role"})


class EngineSpec(SpecSection):
    """How an engine is run, whatever its settings are.

    ``python``: of the environment that holds it, None for our own. ``weights``: a file or folder in the engine's own
    format, which is served instead of a conversion of the checkpoint. ``at_once`` requests are in flight. ``start`` and
    ``answer`` are the seconds that it may take to start, and to answer a batch.
    """

    python: Text | None = None
    weights: Text | None = None
    at_once: Annotated[int, Field(strict=True, ge=1, le=1024)] = 16
    start: Annotated[Number, Field(ge=1, le=36_000)] = 600.0
    answer: Annotated[Number, Field(ge=1, le=36_000)] = 900.0

    def measured(self) -> dict[str, Any]:
        """What answers depend on, as plain values."""
        return self.model_dump(mode="json", include={"weights", "at_once"})


# what a probe asks unless its plan says otherwise: over 300 items of over 99 templates at each length, all twice
PROBE_DEFAULTS: Mapping[str, Any] = {
    "policies": ("none",),  # none of ours: what the endpoint does to its cache is the question
    "suites": {"refusal": {"items": 144}, "agent": {"items": 144}, "pressure": {"items": 48}},
    "context_tokens": (1024, 16_384, 32_768),
    "samples": 2,
}


def fill_probe_grid(grid: Any, names: PluginNames | None = None) -> Any:
    """The evaluate section of a probe's plan with what it leaves open; rows as published need no lengths."""
    if not isinstance(grid, Mapping):
        return PROBE_DEFAULTS if grid is None else grid
    found = {**PROBE_DEFAULTS, **grid}
    suites = found["suites"] if isinstance(found["suites"], Mapping | list) else ()
    published = names is not None and suites and all(names.lengths(str(name)) == "none" for name in suites)
    return {**found, "context_tokens": ()} if published and "context_tokens" not in grid else found


def check_probe_grid(grid: EvaluateSpec) -> None:
    """Raise SpecError for a grid that cannot be asked of an endpoint."""
    if grid.policies != PROBE_DEFAULTS["policies"]:
        raise SpecError("evaluate.policies: nobody chooses the cache policy of an endpoint; leave it out")
    for suite, part in grid.suites.items():
        if not isinstance(part.items, int):
            raise SpecError(
                f"evaluate.suites.{suite}.items is {part.items}: a probe has no pilot and pays for every answer; give "
                "a number (kvaudit plan)"
            )
        if len(grid.contexts_of(suite)) < 2 and any(grid.contexts_of(suite)):
            raise SpecError(
                f"a probe asks every item at a short length too; suite {suite} has {grid.contexts_of(suite)[0]} tokens "
                "alone, give evaluate.context_tokens another one"
            )
