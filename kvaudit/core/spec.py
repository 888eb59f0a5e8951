"""The spec of a run: one YAML file, frozen, checked and hashed, which alone decides what is measured.

A spec names policies, suites, arms and losses. These names are checked by ``PluginNames``, if it is passed as
pydantic's validation context. Without it they are not checked, for specs that a run wrote: these are complete, and a
report must not need the run's plug-ins. Every error is one line with file, line and the expected value.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvaudit.core.endpoint import check_no_address
from kvaudit.core.errors import AuditError, SpecError, UnknownName
from kvaudit.core.facets import ALIKE, DEPLOYED, FACETS, FORMER_CONTRASTS, GATED, SERVING, WELL_FORMED, suite_of
from kvaudit.core.files import KeyPath, YamlFile, parse_yaml, read_text
from kvaudit.core.moved import removed_spec_key
from kvaudit.core.policy_names import DENSE_POLICY, compressed_policies, engine_name, match_policies
from kvaudit.core.spec_evaluate import EngineSpec, EvaluateSpec, ProbeSpec, check_probe_grid, fill_probe_grid
from kvaudit.core.spec_parts import (
    Alpha,
    ContextLength,
    OmitDefault,
    PluginNames,
    Points,
    Policies,
    Ratio,
    SpecSection,
    Text,
    check_unique,
    is_scalar,
)
from kvaudit.core.spec_train import BASE_ARM, DENSE_ARM, TrainSpec
from kvaudit.core.text import HIDDEN, short_repr

EMBEDDED = "embedded"  # the model that ships
ENDPOINT_ARM = "endpoint"  # the arm of a probe
UNKNOWN = "unknown"
_MOST_ERRORS = 20  # that are printed after the first
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MARGIN_PP = {
    "safety": 5.0,
    "capability": 5.0,
}  # 59 templates can decide 5 points; 3 points need 99, which few suites have
_ALPHA, _PROFILE_ALPHA = 0.05, {"pr": 0.05, "release": 0.025}
_ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,99}$")]
# pydantic's types of errors in the words of YAML users
_EXPECTED = {
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "too_short": "at least one entry",
    "string_pattern_mismatch": "up to 100 letters, digits, '.', '_' or '-', the first a letter or digit",
}


def _contrast(value: Any) -> Any:
    """Return the name of a contrast (kind of comparison); E1 to E4, the names in old specs, are replaced.

    Raises an error of pydantic for a contrast that a gate cannot decide.
    """
    name = FORMER_CONTRASTS.get(value, value) if isinstance(value, str) else value
    if name not in GATED:
        raise PydanticCustomError("contrast", f"{', '.join(GATED[:-1])} or {GATED[-1]}")
    return name


_Contrast = Annotated[str, BeforeValidator(_contrast)]


def _scalar(value: Any) -> Any:
    if not is_scalar(value):
        raise PydanticCustomError("plain", "text, a number, true or false")
    return value


class GateSpec(SpecSection):
    """The gate, declared before the run: the reference, the margins in percentage points, the gated policies.

    ``gate_file`` names a file whose entries replace those of this section; ``pin`` names a file with the hashes that
    the reference must have. Both are copied into the run at its start.
    """

    reference: str | None = None
    arms: OmitDefault[tuple[str, ...]] = ()  # the candidates that decide; (): all
    profile: OmitDefault[Literal["pr", "release"] | None] = None
    alpha: Alpha | None = None  # None: the profile's, or .05
    margins: dict[str, Points] = Field(default_factory=dict)
    estimand_margins: OmitDefault[dict[Literal["selectivity", "parity"], Points]] = Field(default_factory=dict)
    # at most so many times as often, instead of a margin
    ratios: OmitDefault[dict[str, Ratio]] = Field(default_factory=dict)
    primary: Policies = ()
    contexts: OmitDefault[tuple[ContextLength, ...]] = ()
    deployable: OmitDefault[Policies] = ()
    estimands: tuple[_Contrast, ...] = Field(default=(ALIKE, DEPLOYED), min_length=1)
    on_inconclusive: OmitDefault[Literal["block", "warn"] | None] = None
    not_measurable: OmitDefault[Literal["block", "warn"] | None] = None  # a reference with nothing to lose; None: block
    worst_seed: OmitDefault[bool] = False  # FAIL if a single training seed fails
    pin: OmitDefault[Text | None] = None
    gate_file: OmitDefault[Text | None] = None


class DeclaredTraining(SpecSection):
    """The training of external checkpoints as declared by the user, which cannot be verified."""

    rollouts: Text = UNKNOWN  # the cache policy of the rollouts: one of ours, or another mechanism in words
    learner: Text = UNKNOWN  # dense or shadow
    correction: Text = UNKNOWN
    distillation: Text = UNKNOWN
    loss: Text = UNKNOWN
    reward: Text = UNKNOWN
    constitution: Text = UNKNOWN
    trained_on: Text = UNKNOWN


class ExternalArm(SpecSection):
    """An arm of checkpoints trained elsewhere: ``seeds`` maps a seed to a folder or hub id.

    In a spec, a plain text means one checkpoint, of seed 0. Checkpoints of equal seeds are compared in pairs. ``role:
    reference`` makes the arm the gate's reference.
    """

    seeds: dict[Annotated[int, Field(ge=0, lt=2**31)], Text] = Field(min_length=1)
    role: Literal["reference", "candidate"] = "candidate"
    recipe: DeclaredTraining = DeclaredTraining()

    @model_validator(mode="before")
    @classmethod
    def _expand_text(cls, value: Any) -> Any:
        return {"seeds": {0: value}} if isinstance(value, str) else value


@dataclass(frozen=True)
class _DefaultMargins:
    """The ``metrics`` whose margin is a default; None if that is unknown. They do not count when specs are compared."""

    metrics: tuple[str, ...] | None = field(default=None, compare=False)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


ChatValue = Annotated[Any, BeforeValidator(_scalar)]


class RunSpec(SpecSection):
    """The spec of a whole run, with defaults of the gate filled in; ``sha256`` is the hash of this complete spec."""

    format: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    model: str = EMBEDDED
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    device: str = "auto"
    # options of the chat template, also in training
    chat: OmitDefault[dict[OptionName, ChatValue]] = Field(default_factory=dict)
    train: TrainSpec | None = None
    checkpoints: OmitDefault[dict[_ArmName, ExternalArm]] = Field(default_factory=dict)
    evaluate: EvaluateSpec
    probe: OmitDefault[ProbeSpec | None] = None
    engines: OmitDefault[dict[Text, EngineSpec]] = Field(default_factory=dict)  # of the conditions and of rollouts
    gate: GateSpec = GateSpec()
    # judges that grade the stored transcripts again
    judge: OmitDefault[Annotated[tuple[Text, ...], BeforeValidator(_as_list)]] = ()
    data: str | None = None  # folder of public rows, instead of KVAUDIT_DATA
    _default_margins: _DefaultMargins = PrivateAttr(default=_DefaultMargins())

    @property
    def arms(self) -> tuple[tuple[str, int], ...]:
        """Every (arm, seed) to evaluate, in order.

        The arm ``base`` is the model before training, or each seed's warm start; the arm of a probe is ``endpoint``.
        """
        if self.probe is not None:
            return ((ENDPOINT_ARM, 0),)
        trained = () if self.train is None else self.train.pairs
        external = tuple((arm, seed) for arm, checkpoints in self.checkpoints.items() for seed in checkpoints.seeds)
        start = tuple(self.starts) or ((BASE_ARM, 0),)
        return (start if self.evaluate.base or not trained + external else ()) + trained + external

    def served(self, arm: str) -> tuple[str, ...]:
        """Return the policies under which an arm's checkpoints are served.

        These are all policies of the evaluation. With own_policy_only, an arm that was trained under a compressed
        policy is served under that policy and ``none`` only.
        """
        policies = self.evaluate.policies
        trained = () if self.train is None or not self.evaluate.own_policy_only else self.train.trained
        trained_under = [t.policy for t in trained if t.name == arm and t.policy != DENSE_POLICY]
        if not trained_under:
            return policies
        return tuple(p for p in policies if p in (DENSE_POLICY, *match_policies(trained_under, policies)))

    @property
    def starts(self) -> tuple[tuple[str, int], ...]:
        """The warm starts (supervised training before the arms) as (``base``, seed), one per seed; empty if none."""
        warm = self.train is not None and self.train.sft is not None
        return tuple((BASE_ARM, seed) for seed in self.train.seeds) if warm and self.train is not None else ()

    def engine(self, condition: str) -> EngineSpec:
        """Return the options, from ``engines``, for the engine of ``condition`` (an engine with its settings)."""
        return self.engines.get(engine_name(condition), EngineSpec())

    def external_source(self, arm: str, seed: int) -> str | None:
        """Return the folder or hub id of an external checkpoint, with ${VARIABLES} filled in; None for other arms."""
        checkpoints = self.checkpoints.get(arm)
        return None if checkpoints is None else expand(f"checkpoints.{arm}", checkpoints.seeds[seed])

    @property
    def sha256(self) -> str:
        """The sha256 of the complete spec as JSON, without the data folder and options that do not affect answers."""
        row = self.written()
        # the old names of contrasts, so that older runs keep their hash
        codes = {name: code for code, name in FORMER_CONTRASTS.items() if name != SERVING}
        row["gate"]["estimands"] = [codes.get(name, name) for name in row["gate"]["estimands"]]
        del row["data"]
        if self.probe is not None:
            row["probe"] = self.probe.answer_options()
        if self.engines:
            row["engines"] = {name: engine.answer_options() for name, engine in self.engines.items()}
        return hashlib.sha256(json.dumps(row, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def model_path(self) -> str:
        """The folder or hub id of the model, with ${VARIABLES} filled in."""
        return expand("model", self.model)

    def sized(self, numbers: Mapping[str, int]) -> RunSpec:
        """Return the spec with ``numbers`` of items, by suite, in place of ``auto`` and ``all``; its hash differs.

        A suite whose number is 0 (in the pilot the reference had nothing to lose) is removed, with its margins.
        """
        absent = [name for name, number in numbers.items() if number == 0]
        evaluate = self.evaluate.sized(numbers)
        if not absent:
            return self.model_copy(update={"evaluate": evaluate})
        margins = {name: points for name, points in self.gate.margins.items() if suite_of(name) not in absent}
        gate = self.gate.model_copy(update={"margins": margins})
        return self.model_copy(update={"evaluate": evaluate, "gate": gate})

    def limited(self, items: int) -> RunSpec:
        """Return the spec with at most ``items`` items per suite; its hash differs."""
        suites = {
            name: suite.model_copy(update={"items": min(items, suite.items) if isinstance(suite.items, int) else items})
            for name, suite in self.evaluate.suites.items()
        }
        pilot = self.evaluate.pilot
        if pilot and items < pilot:  # a suite must have at least the items of an explicit pilot
            pilot = None
        return self.model_copy(update={"evaluate": self.evaluate.model_copy(update={"suites": suites, "pilot": pilot})})

    @property
    def default_margins(self) -> tuple[str, ...] | None:
        """The metrics (suites or facets) whose margin is a default; None if unknown, as in a spec written by a run."""
        return self._default_margins.metrics

    @model_validator(mode="before")
    @classmethod
    def _fill_probe(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping) or "probe" not in value:
            return value
        probe = {} if value["probe"] is None else value["probe"]
        return {**value, "probe": probe, "evaluate": fill_probe_grid(value.get("evaluate"), info.context)}

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        gate, served, names = self.gate, self.evaluate.policies, info.context
        self._check_probe()
        self.evaluate.check_rounds(trains=self.train is not None or bool(self.checkpoints), gated=gate.margins)
        self._check_own_policy_only()
        self._check_engines()
        arms = tuple(dict.fromkeys(arm for arm, _ in self.arms))
        _check_external(self.checkpoints, self.train)
        check_unique("judge", self.judge)
        if names is not None:
            for text in self.judge:
                names.check_judge(text)
        reference = self._reference(arms)
        if self.checkpoints and names is not None:
            _check_seeds(self.arms, reference)
        primary = _match_served("primary", gate.primary, served, names) or compressed_policies(
            served, self.evaluate.references
        )
        margins = _margins(self.evaluate, gate, names)
        filled = {
            "reference": reference,
            "primary": primary,
            "deployable": _match_served("deployable", gate.deployable, served, names),
            "margins": margins,
            "alpha": _alpha(gate),
        }
        _check_lengths(gate.contexts, self.evaluate)
        for arm in check_unique("gate.arms", gate.arms):
            if arm in (reference, BASE_ARM) or arm not in arms:
                raise UnknownName("arm in gate.arms", arm, (name for name in arms if name not in (reference, BASE_ARM)))
        if self.evaluate.rounds is not None:
            _check_rounds_gate(gate, primary)
        defaults = tuple(metric for metric in margins if metric not in gate.margins)
        self._default_margins = _DefaultMargins(None if names is None else defaults)
        object.__setattr__(self, "gate", gate.model_copy(update=filled))  # frozen, but still being validated
        return self

    def _check_own_policy_only(self) -> None:
        """Raise SpecError or UnknownName if own_policy_only is set but an arm cannot be served under its own policy."""
        if not self.evaluate.own_policy_only:
            return
        if self.train is None:
            raise SpecError(
                "evaluate.own_policy_only needs checkpoints that the run trains; give train, or leave it out"
            )
        policies = self.evaluate.policies
        if engines := [*self.evaluate.references]:
            raise SpecError(
                f"evaluate.own_policy_only cannot serve a trained checkpoint by an engine ({engines[0][:100]}), since "
                "none is trained under one; leave it out, or make another run for the engines"
            )
        for trained in self.train.trained:
            (policy,) = match_policies([trained.policy], policies)
            if policy not in policies:
                raise UnknownName("policy of training in evaluate.policies", policy, policies)

    def _check_engines(self) -> None:
        """Raise UnknownName if ``engines`` has options for an engine that the run does not use."""
        used = {engine_name(text) for pair in self.evaluate.references.items() for text in pair}
        if self.train is not None and self.train.rollouts is not None:
            used.add(engine_name(self.train.rollouts))
        for name in self.engines:
            if name not in used:
                raise UnknownName("engine in engines", name, used)

    def _reference(self, arms: Collection[str]) -> str:
        """Return the name of the reference arm; raise SpecError or UnknownName if the run has no such arm.

        It is ``gate.reference``, else an external arm with role ``reference``, else ``dense`` if the run trains it,
        else ``base`` (of a probe: ``endpoint``).
        """
        declared = [arm for arm, checkpoints in self.checkpoints.items() if checkpoints.role == "reference"]
        base = BASE_ARM if self.probe is None else ENDPOINT_ARM
        reference = self.gate.reference or next(iter(declared), DENSE_ARM if DENSE_ARM in arms else base)
        if reference in arms:
            return reference
        if self.gate.reference is None:
            raise SpecError(
                "nothing to compare with: no arm is dense and the base is not evaluated; set evaluate.base: true, "
                f"or gate.reference to one of {', '.join(sorted(arms))}"
            )
        raise UnknownName("gate.reference", reference, arms)

    def _check_probe(self) -> None:
        """Raise SpecError if a probe has options that need checkpoints, or another run has an address as its model."""
        if self.probe is None:
            self.evaluate.check_draws()
            sources = {f"checkpoints.{arm}": external.seeds.values() for arm, external in self.checkpoints.items()}
            for key, texts in {"model": [self.model], **sources}.items():
                for text in texts:
                    check_no_address(key, text, "a folder, a hub id, a .gguf file or embedded")
            return
        check_probe_grid(self.evaluate)
        for key, section in (("train", self.train), ("checkpoints", self.checkpoints)):
            if section:
                raise SpecError(f"{key} cannot be used with probe: an endpoint has no checkpoints to load")
        if "model" not in self.model_fields_set:
            raise SpecError("model is missing: the name by which the endpoint knows its model")


def _check_external(arms: Mapping[str, ExternalArm], train: TrainSpec | None) -> None:
    """Raise SpecError if an arm trained elsewhere has the name of another arm, or if several are references."""
    names = {BASE_ARM, *(() if train is None else (arm.name for arm in train.trained))}
    for arm in arms:
        if arm in names:
            raise SpecError(f"checkpoints.{arm} is the name of an arm that the run has already; choose another")
    references = [arm for arm, checkpoints in arms.items() if checkpoints.role == "reference"]
    if len(references) > 1:
        raise SpecError(f"checkpoints names {len(references)} references ({', '.join(references)}), wanted one at most")


def _check_seeds(pairs: Iterable[tuple[str, int]], reference: str) -> None:
    """Raise SpecError if the arms have different seeds, so that they cannot be compared seed by seed."""
    seeds_by_arm: dict[str, set[int]] = {}
    for arm, seed in pairs:
        seeds_by_arm.setdefault(arm, set()).add(seed)
    reference_seeds = seeds_by_arm.get(reference, set())
    first: set[int] | None = None
    for arm, seeds in seeds_by_arm.items():
        if arm in (BASE_ARM, reference):
            continue
        first = first or seeds
        # a reference with one seed that no arm has is compared with all seeds
        is_shared = reference == BASE_ARM or (len(reference_seeds) == 1 and not reference_seeds & seeds)
        if seeds != first or not (is_shared or seeds <= reference_seeds):
            other_seeds = sorted(first if seeds != first else reference_seeds)
            raise SpecError(
                f"checkpoints: arm {arm} has seeds {sorted(seeds)}, another arm or the reference {other_seeds}; arms "
                "are compared seed by seed: give all the same seeds (or the reference one seed that no other arm has)"
            )


def expand(key: str, text: str) -> str:
    """Fill in ${VARIABLES} from the environment; raises SpecError for a variable that is not set."""
    for name in _VARIABLE.findall(text):
        if not os.environ.get(name):
            raise SpecError(f"{key} is {text!r}, but the environment variable {name} is not set")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], text)


def _match_served(
    key: str, texts: Iterable[str], served: tuple[str, ...], names: PluginNames | None
) -> tuple[str, ...]:
    """Return the served policies that ``texts``, the entry ``gate.<key>``, names; raise UnknownName for another one."""
    # without names the texts are not canonical yet
    policies = tuple(texts) if names is not None else tuple(match_policies(texts, served))
    for policy in policies:
        if policy not in served:
            raise UnknownName(f"policy in gate.{key}", policy, served)
    return policies


def _check_lengths(gated: tuple[int, ...], grid: EvaluateSpec) -> None:
    """Raise SpecError or UnknownName if no suite is asked at a gated length, or a suite is asked at none of these."""
    for context in gated:
        if context not in grid.contexts:
            raise UnknownName("length in gate.contexts", str(context), map(str, grid.contexts))
    for suite in grid.suites:
        lengths = grid.contexts_of(suite)
        if gated and not set(gated) & set(lengths):
            raise SpecError(
                f"gate.contexts has no length at which suite {suite} is asked ({', '.join(map(str, lengths))}), so "
                "nothing would decide it; name one of them, or leave gate.contexts out"
            )


def _check_rounds_gate(gate: GateSpec, primary: Sequence[str]) -> None:
    """Raise SpecError for a gate that a run in rounds (batches of rows with a test after each) cannot decide."""
    if not gate.margins:
        raise SpecError("evaluate.rounds stops when facets are decided; name them in gate.margins as SUITE.FACET")
    if gate.ratios:
        raise SpecError("gate.ratios cannot be decided in rounds; give points in gate.margins, or leave rounds out")
    if unsupported := sorted({*gate.estimands} - {ALIKE, DEPLOYED, SERVING}):
        raise SpecError(
            f"gate.estimands asks {unsupported[0]}, which cannot be decided in rounds; leave it or rounds out"
        )
    if len(primary) > 1:
        raise SpecError(
            f"evaluate.rounds can decide one setting, and {len(primary)} are gated; name one in gate.primary, or make "
            "a run for each"
        )


def _margins(evaluate: EvaluateSpec, gate: GateSpec, names: PluginNames | None) -> dict[str, float]:
    """Return the declared margins, and default margins for each suite for which the gate declares nothing.

    A suite's default margins limit the facets of its ``default_gate`` and ``well_formed``; if it has no such facets,
    they limit its score. Such a gate limits harm and usefulness both: by harm alone, a model that talks nonsense would
    pass. There are no default margins without ``names``, nor in a run that is tested in rounds.
    """
    suites, declared = list(evaluate.suites), gate.margins
    for key, name in [*(("margins", name) for name in declared), *(("ratios", name) for name in gate.ratios)]:
        suite, _, facet = name.rpartition(".")
        if suite not in suites and name not in suites:
            raise UnknownName(f"suite in gate.{key}", name, suites)
        if name not in suites and facet not in FACETS:
            raise UnknownName(f"facet in gate.{key}", name, (f"{suite}.{facet}" for facet in FACETS))
    if both := sorted({*declared} & {*gate.ratios}):
        raise SpecError(f"gate.margins and gate.ratios both name {both[0]}; give one of the two")
    if names is None or evaluate.rounds is not None:
        return declared
    limited = {suite_of(name) for name in (*declared, *gate.ratios)}
    margins = dict[str, float]()
    for suite in suites:
        if suite in declared:
            margins[suite] = declared[suite]
        elif suite not in limited:
            facets = names.default_gate(suite)
            metrics = [f"{suite}.{facet}" for facet in (*facets, WELL_FORMED)] if facets else [suite]
            margins |= dict.fromkeys(metrics, _MARGIN_PP[names.kind(suite)])
    return {**margins, **{name: points for name, points in declared.items() if name not in suites}}


def _alpha(gate: GateSpec) -> float:
    """Return the significance level from the gate or its profile; raise SpecError if both are given and differ."""
    profile = _ALPHA if gate.profile is None else _PROFILE_ALPHA[gate.profile]
    if gate.profile is not None and gate.alpha not in (None, profile):
        raise SpecError(f"gate.alpha is {gate.alpha:g}, profile {gate.profile} has {profile:g}; give one of the two")
    return profile if gate.alpha is None else gate.alpha


# --- reading and writing it ------------------------------------------------------------------------------------------


def load_spec(path: Path, names: PluginNames | None = None) -> RunSpec:
    """Read a spec from a file; raise DataError if it cannot be read and SpecError if it is wrong.

    ``names`` are functions that check the names of plug-ins and provide defaults; without them names are not checked.
    """
    check_no_address("the spec", str(path), "a YAML file")
    return parse_spec(read_text(path, "spec"), str(path), names)


def parse_spec(text: str, source: str, names: PluginNames | None = None) -> RunSpec:
    """Parse a spec from ``text``; errors call the file ``source``, and ``names`` is as in ``load_spec``."""
    file = parse_yaml(text, source, "spec")
    return _validate(file.table, source, file.lines, names)


def with_gate(
    spec: RunSpec, file: YamlFile, names: PluginNames | None = None, *, defaults: Collection[str] = ()
) -> RunSpec:
    """Return the spec with the entries of a gate file merged into its gate section; margins are merged by name.

    ``defaults`` are the metrics (suites or facets) whose margin in the spec is a default. If the file gives a limit to
    any metric of a suite, all default margins of that suite are dropped. Raises SpecError as ``parse_spec`` does, with
    the lines of the gate file.
    """
    row = spec.written()
    replaced = {*defaults}.difference(defaults_kept(defaults, file.table))
    section = row["gate"]
    section["margins"] = {name: points for name, points in section["margins"].items() if name not in replaced}
    row["gate"] = _merge_gate(section, file.table)
    return _validate(row, file.name, {("gate", *path): line for path, line in file.lines.items()}, names)


def defaults_kept(defaults: Collection[str], table: Mapping[str, Any]) -> list[str]:
    """Return those of ``defaults`` (metrics with a default margin) whose suite has no margin or ratio in a gate file.

    ``table`` is the content of the gate file.
    """
    sections = [table.get(key) for key in ("margins", "ratios")]
    # anything but a mapping is refused later
    limited = {suite_of(str(name)) for section in sections if isinstance(section, Mapping) for name in section}
    return [metric for metric in defaults if suite_of(metric) not in limited]


def _merge_gate(section: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    section_entries = dict(section)
    if "profile" in table or "alpha" in table:  # these depend on each other
        for key in ("profile", "alpha", "on_inconclusive"):
            section_entries.pop(key, None)
    merged = {**section_entries, **{key: value for key, value in table.items() if key != "format"}}
    for key, other_key in (("margins", "ratios"), ("ratios", "margins"), ("estimand_margins", "")):
        old, new, replaced = section_entries.get(key, {}), table.get(key, {}), table.get(other_key, {})
        if isinstance(old, Mapping) and isinstance(new, Mapping) and isinstance(replaced, Mapping):
            # a limit of the other kind in the file replaces the one of this kind
            merged[key] = {**{name: value for name, value in old.items() if name not in replaced}, **new}
    return merged


def _validate(
    table: Mapping[str, Any], source: str, lines: Mapping[KeyPath, int], names: PluginNames | None
) -> RunSpec:
    try:
        return RunSpec.model_validate(table, context=names)
    except ValidationError as error:
        first, *more_errors = _errors(error, source, lines)
        raise SpecError(first, lines=more_errors[:_MOST_ERRORS]) from None
    except AuditError as error:
        raise SpecError(f"{source}: {error}") from error


def dump_spec(spec: RunSpec) -> str:
    """Return the complete spec, with every default, as YAML, which parses to an equal spec."""
    return yaml.safe_dump(spec.written(), sort_keys=False, allow_unicode=True, width=120)


def _errors(error: ValidationError, source: str, lines: Mapping[KeyPath, int]) -> list[str]:
    """Return the errors of validation, a line each: unknown keys first, since one often explains a missing key.

    A key that is missing in a section with an unknown key is therefore not reported.
    """
    errors = sorted(error.errors(include_url=False), key=lambda details: details["type"] != "extra_forbidden")
    sections = {details["loc"][:-1] for details in errors if details["type"] == "extra_forbidden"}
    errors = [details for details in errors if details["type"] != "missing" or details["loc"][:-1] not in sections]
    # "[key]" is pydantic's mark of a bad key
    paths = [tuple(key for key in details["loc"] if key != "[key]") for details in errors]
    messages = [_message(details, path) for details, path in zip(errors, paths, strict=True)]
    texts = [f"{_location(source, path, lines)}: {text}" for path, text in zip(paths, messages, strict=True)]
    return list(dict.fromkeys(texts))


def _message(details: ErrorDetails, path: KeyPath) -> str:
    *parents, last = path or ("spec",)
    section = ".".join(str(key) for key in parents)
    if details["type"] == "extra_forbidden":
        if not parents and (message := removed_spec_key(str(last))) is not None:
            return message
        unknown = str(UnknownName("key", str(last), _section_keys(parents)))
        return unknown.replace(f"{str(last)!r}.", f"{str(last)!r} in {section}.", 1) if section else unknown
    name = f"{section}.{last}" if section else str(last)
    if details["type"] == "missing":
        return f"{name} is missing"
    expected = _EXPECTED.get(details["type"], details["msg"].removeprefix("Input should be "))
    value = HIDDEN if last == "key" else short_repr(details["input"])  # it may be the key itself
    return f"{name} is {value}, wanted {expected}"


def _section_keys(path: Sequence[str | int]) -> list[str]:
    section: Any = RunSpec
    for key in path:
        if key in section.model_fields:  # otherwise a name that the user chose, as under evaluate.suites
            kind = section.model_fields[str(key)].annotation
            # inside an annotation such as ``TrainSpec | None`` or ``dict[str, SuiteSpec]``
            if get_origin(kind) in (Union, types.UnionType, dict):
                kind = next(arg for arg in get_args(kind) if isinstance(arg, type) and issubclass(arg, SpecSection))
            section = kind
    return list(section.model_fields)


def _location(source: str, path: KeyPath, lines: Mapping[KeyPath, int]) -> str:
    # the line of the value itself, else of the innermost table around it
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return f"{source} line {lines[path[:end]]}"
    return source
