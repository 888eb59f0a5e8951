"""The sections of a spec about serving: the evaluation grid (what is asked under which policies), probe and engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.policy_names import DENSE_POLICY, ENGINE
from kvaudit.core.spec_parts import (
    PUBLISHED,
    BatchTokens,
    ContextLength,
    Count,
    Group,
    Number,
    OmitDefault,
    PluginNames,
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
AUTO_ITEMS = "auto"  # as many items as the margins need, by the pilot
ALL_ITEMS = "all"  # every template with each of its twins once
FLOOR_ITEMS = 64
FIRST_LOOK = 100  # rows: the fewest that can show a margin of 5 points if nothing changes
PILOT_ITEMS = 32  # items at each length by default
LEAST_PILOT, MOST_PILOT, _MOST_ITEMS = 24, 48, 1_000_000


def _as_list(value: Any) -> Any:
    return value if value is None or isinstance(value, list | tuple) else [value]


_T = TypeVar("_T")
_OneOrMore = Annotated[tuple[_T, ...], Field(min_length=1), BeforeValidator(_as_list)]


def _items(value: Any) -> Any:
    if value in (AUTO_ITEMS, ALL_ITEMS) or (type(value) is int and 1 <= value <= _MOST_ITEMS):
        return value
    raise PydanticCustomError("items", f"a whole number from 1 to 1,000,000, {AUTO_ITEMS} or {ALL_ITEMS}")


def _pilot(value: Any) -> Any:
    if value is None or (type(value) is int and (value == 0 or LEAST_PILOT <= value <= MOST_PILOT)):
        return value
    raise PydanticCustomError("pilot", f"0 for none, or a whole number from {LEAST_PILOT} to {MOST_PILOT}")


def _without_reference(policy: Any) -> tuple[Any, Any]:
    """Split a policy of a spec: return the policy without its key ``reference``, and that key's value or None.

    The value of ``reference`` is the uncompressed setting to compare with. Only a policy that is a mapping with the key
    ``engine`` may have it; any other policy is returned unchanged, with None.
    """
    if not isinstance(policy, Mapping) or ENGINE not in policy:
        return policy, None
    return {key: field for key, field in policy.items() if key != "reference"}, policy.get("reference")


class SuiteSpec(SpecSection):
    """The options of one suite: its number of items, and values that replace those of the suite or the grid.

    ``items`` is a number, ``auto`` or ``all``; for the last two, the run's provenance has the actual number once it is
    known. ``max_new_tokens`` and ``placement`` replace the suite's own values, ``samples`` and ``context_tokens`` those
    of the grid. Public rows are asked as published (length 0), unless the suite is named SUITE@CONTEXT. In a spec the
    key ``context`` lists names of contexts, each of which makes such a suite.
    """

    items: Annotated[int | str, BeforeValidator(_items)] = AUTO_ITEMS
    max_new_tokens: OmitDefault[Count | None] = None
    samples: OmitDefault[Group | None] = None
    context_tokens: OmitDefault[_OneOrMore[ContextLength] | None] = None
    placement: OmitDefault[_OneOrMore[Text] | None] = None


class Thinking(SpecSection):
    """The option for answers that begin with a thought; ``budget`` is the number of extra tokens for the thought."""

    budget: Steps = 0


def _thinking(value: Any) -> Any:
    if value == STRIP:
        return {"budget": 0}
    if value is not None and not isinstance(value, Mapping | Thinking):
        raise PydanticCustomError("thinking", f"{STRIP}, or {{budget: TOKENS}}")
    return value


def _by_context(name: str, section: Any, names: PluginNames | None) -> dict[str, Any]:
    """Return {suite: section}, with a suite NAME@CONTEXT for each context that the section's key ``context`` lists.

    A context is a text around each row, such as small talk. For ``published``, which means no context, the suite is
    NAME alone. Suites that have no length lose the key ``context_tokens`` if another suite has one.
    """
    if not isinstance(section, Mapping) or "context" not in section:
        return {name: {} if section is None else section}
    if ":" in name:
        raise SpecError(
            f"evaluate.suites.{name}.context: a task of another harness cannot be put into a context; leave it out"
        )
    contexts, rest = _as_list(section["context"]), {key: value for key, value in section.items() if key != "context"}
    if not contexts or not all(isinstance(context, str) for context in contexts):
        raise SpecError(
            f"evaluate.suites.{name}.context is {short_repr(section['context'])}, wanted {PUBLISHED} or names of "
            "contexts (kvaudit list contexts)"
        )
    check_unique(f"evaluate.suites.{name}.context", tuple(contexts))
    without_length = {key: value for key, value in rest.items() if key != "context_tokens"}
    suites = [name if context == PUBLISHED else f"{name}@{context}" for context in contexts]
    published = {suite for suite in suites if names is not None and names.lengths(suite) == "none"}
    if len(published) == len(suites):  # a length is wrong for all of them; ``_fill_lengths`` raises the error
        return dict.fromkeys(suites, rest)
    return {suite: without_length if suite in published else rest for suite in suites}


class Rounds(SpecSection):
    """The options of rounds, which ask rows in batches until every gated facet is decided or the time is up.

    A look is a test after a round. The gate decides by bounds that hold at all looks together
    (``kvaudit.reports.stats.betting``). ``minutes`` is the time limit for serving, which includes the pilot's rows but
    not the loading of models. ``first`` is the number of rows of a suite at the first look after the pilot's.
    """

    minutes: Annotated[Number, Field(gt=0, le=10_000)] = 10.0
    first: Annotated[int, Field(strict=True, ge=32, le=1_000_000)] = FIRST_LOOK


class EvaluateSpec(SpecSection):
    """The evaluation grid: every checkpoint under every policy, on every suite, at every context length.

    ``context_tokens`` are the lengths for suites whose items are made to a length; public rows asked as published have
    length 0. With ``own_policy_only`` a checkpoint is served only under ``none`` and the policy that it was trained
    under.
    """

    policies: tuple[str, ...] = Field(min_length=1)
    suites: dict[str, SuiteSpec] = Field(min_length=1)
    context_tokens: Annotated[
        tuple[ContextLength, ...], BeforeValidator(lambda value: () if value == PUBLISHED else value)
    ] = ()
    base: bool = False  # evaluate the untrained model too, as arm "base"
    samples: Group = 1
    temperature: TemperatureOrGreedy = 0.0
    top_p: Share = 1.0
    seed: Seed = 1000
    batch_tokens: BatchTokens = 16384
    think: OmitDefault[Annotated[Thinking | None, BeforeValidator(_thinking)]] = None
    own_policy_only: OmitDefault[bool] = False
    # an engine's condition -> its uncompressed reference in the same engine; filled in by ``PluginNames``
    references: OmitDefault[dict[str, str]] = Field(default_factory=dict)
    # items of a suite and length that an engine answers twice more, once in another order; 0 for none
    floor: OmitDefault[Annotated[int, Field(strict=True, ge=0, le=1_000_000)]] = FLOOR_ITEMS
    # items that the reference answers first; 0 for none
    pilot: OmitDefault[Annotated[int | None, BeforeValidator(_pilot)]] = None
    rounds: OmitDefault[Rounds | None] = None

    @property
    def pilot_size(self) -> int:
        """The number of items of each suite and length that the reference answers in the pilot, before the grid."""
        return PILOT_ITEMS if self.pilot is None else self.pilot

    def sized(self, numbers: Mapping[str, int]) -> EvaluateSpec:
        """Return the section with ``numbers`` of items, by suite, for ``auto`` and ``all``; a suite of 0 is dropped."""
        suites = {}
        for name, suite in self.suites.items():
            is_open = name in numbers and not isinstance(suite.items, int)
            suites[name] = suite.model_copy(update={"items": numbers[name]}) if is_open else suite
        return self.model_copy(update={"suites": {name: suite for name, suite in suites.items() if suite.items != 0}})

    def contexts_of(self, suite: str) -> tuple[int, ...]:
        """Return the context lengths of a suite: its own or, if it has none, the grid's."""
        return self.suites[suite].context_tokens or self.context_tokens

    def samples_of(self, suite: str) -> int:
        """Return the number of answers that are sampled to each item of a suite."""
        return self.suites[suite].samples or self.samples

    def written(self) -> dict[str, Any]:
        """Return the section as plain values; ``think`` is written as ``strip`` if thoughts have no extra tokens."""
        row = super().written()
        thinking = row.pop("think", None)
        if thinking is not None:
            row["think"] = thinking if thinking["budget"] else STRIP
        return row

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context lengths of all suites, in tokens, each once."""
        return tuple(dict.fromkeys(length for suite in self.suites for length in self.contexts_of(suite)))

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, value: Any, info: ValidationInfo) -> Any:
        """Write policies in their canonical form, and append the uncompressed reference of each engine setting."""
        if not isinstance(value, Mapping) or not isinstance(value.get("policies"), list):
            return value
        policies = [_without_reference(policy) for policy in value["policies"]]
        texts = [canonical_policy(policy, info.context) for policy, _ in policies]
        if info.context is None:
            return {**value, "policies": texts}
        complete = value.get("references")  # in a spec that a run wrote
        complete = complete if isinstance(complete, Mapping) else {}
        declared = {
            text: info.context.reference(text, reference)
            for text, (_, inline_reference) in zip(texts, policies, strict=True)
            if (reference := inline_reference or complete.get(text)) is not None
        }
        # a reference that the spec declares need not have a reference itself
        conditions = [text for text in texts if not any(other != text == ref for other, ref in declared.items())]
        pairs = [(text, declared.get(text) or info.context.reference(text, None)) for text in conditions]
        used = {reference for text, reference in pairs if reference != text}
        # an engine's uncompressed condition that no other uses is its own reference, or it would pass for our policy
        references = {text: ref for text, ref in pairs if ref is not None and (ref != text or text not in used)}
        added = [reference for reference in dict.fromkeys(references.values()) if reference not in texts]
        return {**value, "policies": [*texts, *added], "references": references}

    @field_validator("suites", mode="before")
    @classmethod
    def _as_mapping(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return {name: {} for name in check_unique("evaluate.suites", tuple(value))}
        if not isinstance(value, dict):
            return value
        tables = [_by_context(str(name), section, info.context) for name, section in value.items()]
        check_unique("evaluate.suites", tuple(name for table in tables for name in table))
        return {name: section for table in tables for name, section in table.items()}

    @model_validator(mode="after")
    def _check_suites(self, info: ValidationInfo) -> Self:
        check_unique("evaluate.context_tokens", self.context_tokens)
        for suite, section in self.suites.items():
            check_unique(f"evaluate.suites.{suite}.context_tokens", section.context_tokens or ())
            check_unique(f"evaluate.suites.{suite}.placement", section.placement or ())
            self._check_pilot(suite, section)
            if info.context is not None:
                info.context.kind(suite)
                placements = info.context.placements(suite)
                for placement in section.placement or ():
                    if placement not in placements:
                        raise UnknownName(f"placement of suite {suite}", placement, placements)
                self._fill_lengths(suite, info.context)
        lengths = info.context and {info.context.lengths(suite) for suite in self.suites}
        if lengths == {"none"} and self.context_tokens:
            raise SpecError(
                f"evaluate.context_tokens is {', '.join(map(str, self.context_tokens))}, but every suite asks its rows "
                f"as published; leave it out, or put rows into a context (context: [{PUBLISHED}, book])"
            )
        engines = {*self.references, *self.references.values()}
        if DENSE_POLICY not in check_unique("evaluate.policies", self.policies) and not set(self.policies) <= engines:
            raise SpecError("evaluate.policies lacks 'none'; drift is measured against the uncompressed reference")
        return self

    def _fill_lengths(self, suite: str, names: PluginNames) -> None:
        """Set a suite's length to 0 if it asks rows as published; raise SpecError for a missing or wrong length.

        ``names`` has the function that says whether the suite's items are made to a length.
        """
        section, lengths, key = self.suites[suite], names.lengths(suite), f"evaluate.suites.{suite}.context_tokens"
        bare = names.bare(suite)
        if bare not in self.suites:
            raise SpecError(
                f"evaluate.suites holds {suite} without {bare}: the effect of a context is measured against the rows "
                f"as published; add {bare}: {{}}, or context: [{PUBLISHED}, ...]"
            )
        if lengths == "given":
            if 0 in self.contexts_of(suite) or not self.contexts_of(suite):
                raise SpecError(f"{key} is missing: the suite's items are made to a length; give one in tokens")
        elif lengths == "none" and any(section.context_tokens or ()):
            raise SpecError(
                f"{key} is {', '.join(map(str, section.context_tokens or ()))}, but its rows are asked as published; "
                "put them into a context to have a length (context: book, see kvaudit list contexts)"
            )
        elif section.context_tokens is None and (lengths == "none" or not self.context_tokens):
            section = section.model_copy(update={"context_tokens": (0,)})
            # frozen, but still being validated
            object.__setattr__(self, "suites", {**self.suites, suite: section})

    def _check_pilot(self, suite: str, section: SuiteSpec) -> None:
        if self.pilot == 0 and section.items == AUTO_ITEMS:
            raise SpecError(
                f"evaluate.suites.{suite}.items is {AUTO_ITEMS}, which takes its size from the pilot, and "
                f"evaluate.pilot is 0; give a number, {ALL_ITEMS}, or leave pilot out"
            )
        if isinstance(section.items, int) and section.items < (self.pilot or 0):
            raise SpecError(
                f"evaluate.pilot is {self.pilot}, suite {suite} has {section.items} items; leave pilot out, or give "
                "more items"
            )

    def check_rounds(self, *, trains: bool, gated: Collection[str]) -> None:
        """Raise SpecError if the grid cannot be served in rounds; ``gated`` are the metrics with a margin.

        Rounds need a pilot, one checkpoint (``trains`` is False), and margins on facets. Each suite must ask all its
        rows, at one length and with one sample.
        """
        if self.rounds is None:
            return
        if trains:
            raise SpecError("evaluate.rounds serves one checkpoint; it cannot be used with train or checkpoints")
        for name, section in self.suites.items():
            if section.items != ALL_ITEMS or section.samples not in (None, 1) or self.samples != 1:
                raise SpecError(f"evaluate.rounds asks each row once; give suite {name} items: {ALL_ITEMS}, samples: 1")
            if len(self.contexts_of(name)) > 1:
                raise SpecError(f"evaluate.rounds asks suite {name} at one length; give one in context_tokens")
        if scores := [name for name in gated if name in self.suites]:
            raise SpecError(
                f"gate.margins names the score of {scores[0]}, and rounds are decided by facets: {scores[0]}.FACET"
            )
        if self.pilot == 0:
            raise SpecError("evaluate.rounds needs the pilot; leave evaluate.pilot out")

    def check_draws(self) -> None:
        """Raise SpecError for several samples of an item at temperature 0: the samples would all be equal."""
        overrides = {f"evaluate.suites.{suite}.samples": section.samples or 1 for suite, section in self.suites.items()}
        for key, samples in {"evaluate.samples": self.samples, **overrides}.items():
            if self.temperature == 0 and samples > 1:
                raise SpecError(
                    f"{key} is {samples} at temperature 0: greedy answers are all the same; "
                    "set samples: 1 or a temperature above 0"
                )


_Price = Annotated[Number, Field(ge=0, le=1e6)]


class Prices(SpecSection):
    """The prices of a million tokens, in any currency."""

    input: _Price
    output: _Price


class ProbeSpec(SpecSection):
    """The options of a probe, which audits a server's model instead of a checkpoint; the spec's ``model`` names it.

    ``tokenizer`` (a folder or hub id) counts lengths; without one they are estimated. ``key`` names the environment
    variable that holds the API key. ``at_once`` is the number of requests in flight. ``tries`` is the largest number of
    tries for one request, and ``per_minute`` the largest number of all tries in a minute. ``timeout`` is the longest
    time for a whole reply, in seconds. If ``seeded``, requests carry a seed. ``limit`` is the token limit's name there.
    ``tool_role`` is the role in which a tool's result is sent: few endpoints accept ``tool`` without a tool call in
    their own format.
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

    def answer_options(self) -> dict[str, Any]:
        """Return the options that answers depend on; other options may change while a probe runs."""
        return self.model_dump(mode="json", include={"tokenizer", "seeded", "tool_role"})


class EngineSpec(SpecSection):
    """The options for running an engine, besides the engine's own settings.

    ``python`` is the interpreter of the environment where the engine is installed, None for kvaudit's own. ``weights``
    is a file or folder in the engine's format, to serve instead of a conversion of the checkpoint. ``at_once`` is the
    number of requests in flight. ``start`` and ``answer`` are the longest times for the engine's start and for a batch
    of answers, in seconds.
    """

    python: Text | None = None
    weights: Text | None = None
    at_once: Annotated[int, Field(strict=True, ge=1, le=1024)] = 16
    start: Annotated[Number, Field(ge=1, le=36_000)] = 600.0
    answer: Annotated[Number, Field(ge=1, le=36_000)] = 900.0

    def answer_options(self) -> dict[str, Any]:
        """Return the options of the engine that answers depend on; other options may change while a run goes on."""
        return self.model_dump(mode="json", include={"weights", "at_once"})


# the default grid of a probe: over 300 items of over 99 templates at each length, all twice
PROBE_DEFAULTS: Mapping[str, Any] = {
    "policies": ("none",),  # an endpoint's cache policy cannot be set
    "suites": {"refusal": {"items": 144}, "agent": {"items": 144}, "pressure": {"items": 48}},
    "context_tokens": (1024, 16_384, 32_768),
    "samples": 2,
}


def fill_probe_grid(grid: Any, names: PluginNames | None = None) -> Any:
    """Return the evaluate section of a probe (a run that asks a vendor's endpoint), with its defaults filled in.

    No default context lengths are filled in if every suite asks its rows as published, since these have no set length.
    ``names`` has the function that says so; without it the lengths are filled in.
    """
    if not isinstance(grid, Mapping):
        return PROBE_DEFAULTS if grid is None else grid
    filled = {**PROBE_DEFAULTS, **grid}
    suites = filled["suites"] if isinstance(filled["suites"], Mapping | list) else ()
    are_published = names is not None and suites and all(names.lengths(str(name)) == "none" for name in suites)
    return {**filled, "context_tokens": ()} if are_published and "context_tokens" not in grid else filled


def check_probe_grid(grid: EvaluateSpec) -> None:
    """Raise SpecError for an evaluate section that a probe cannot ask of an endpoint.

    The section must not set policies and must give numbers of items. A suite with lengths needs at least two, because
    the answers at a long one are compared with those at a short one.
    """
    if grid.policies != PROBE_DEFAULTS["policies"]:
        raise SpecError("evaluate.policies cannot be used with probe: an endpoint's cache policy cannot be set")
    for suite, section in grid.suites.items():
        if not isinstance(section.items, int):
            raise SpecError(
                f"evaluate.suites.{suite}.items is {section.items}: a probe has no pilot and pays for every answer; "
                "give a number (kvaudit plan)"
            )
        if len(grid.contexts_of(suite)) < 2 and any(grid.contexts_of(suite)):
            raise SpecError(
                f"a probe needs a short length for comparison; suite {suite} has only {grid.contexts_of(suite)[0]} "
                "tokens, give evaluate.context_tokens a second length"
            )
