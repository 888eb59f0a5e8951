"""What a run is: one YAML file, frozen, checked, hashed. Nothing outside it changes what is measured.

A spec names policies, suites, arms and losses. The core knows no plug-in, so whoever does hands in what answers to
those names, as the context of validation. Without, a spec is read as it stands: the one that a run wrote is complete
and canonical, and its plug-ins need not be where its report is made. Every mistake is one line that names the file,
the line and what was wanted.
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

from kvaudit.core.policy_names import compressed_policies, engine_name
from kvaudit.core.endpoint import check_no_address
from kvaudit.core.errors import AuditError, SpecError, UnknownName
from kvaudit.core.facets import ALIKE, DEPLOYED, FORMER_CONTRASTS, GATED, SERVING
from kvaudit.core.facets import FACETS
from kvaudit.core.files import KeyPath, YamlFile, parse_yaml, read_text
from kvaudit.core.policy_names import DENSE_POLICY, match_policies
from kvaudit.core.removed import removed_spec_key
from kvaudit.core.text import HIDDEN
from kvaudit.core.spec_evaluate import EngineSpec, EvaluateSpec, ProbeSpec, check_probe_grid, fill_probe_grid
from kvaudit.core.spec_parts import (
    Alpha,
    ContextLength,
    PluginNames,
    Points,
    Policies,
    Ratio,
    SpecSection,
    Text,
    is_scalar,
    check_unique,
)
from kvaudit.core.spec_train import BASE_ARM, DENSE_ARM, TrainSpec
from kvaudit.core.text import short_repr

ENDPOINT_ARM = "endpoint"  # what a probe asks
UNKNOWN = "unknown"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MARGIN_PP = {"safety": 5.0, "capability": 5.0}  # what 59 templates can decide; few suites have the 99 of 3 points
_ALPHA, _PROFILE_ALPHA = 0.05, {"pr": 0.05, "release": 0.025}
_ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,99}$")]
# what YAML users call otherwise than pydantic does, by its type of mistake
_WANTED = {
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


def _named(value: Any) -> Any:
    """A contrast that a gate can decide, by its name or as the first specs wrote it."""
    name = FORMER_CONTRASTS.get(value, value) if isinstance(value, str) else value
    if name not in GATED:
        raise PydanticCustomError("contrast", f"{', '.join(GATED[:-1])} or {GATED[-1]}")
    return name


_Contrast = Annotated[str, BeforeValidator(_named)]


def _scalar(value: Any) -> Any:
    """Text, a number or a truth value, as templates compare them."""
    if not is_scalar(value):
        raise PydanticCustomError("plain", "text, a number, true or false")
    return value


class GateSpec(SpecSection):
    """The decision, declared before the run: the reference, the margins in percentage points, the deployed policies.

    ``gate_file`` names a file that declares instead; it is kept with the run when the run begins, as ``pin`` is.
    """

    later = (
        *(
            "profile",
            "arms",
            "estimand_margins",
            "ratios",
            "contexts",
            "deployable",
            "on_inconclusive",
            "not_measurable",
        ),
        *("worst_seed", "pin", "gate_file"),
    )

    reference: str | None = None
    arms: tuple[str, ...] = ()  # the candidates that decide; all of them where none is named
    profile: Literal["pr", "release"] | None = None
    alpha: Alpha | None = None  # the profile's, or .05
    margins: dict[str, Points] = Field(default_factory=dict)
    estimand_margins: dict[Literal["selectivity", "parity"], Points] = Field(default_factory=dict)
    ratios: dict[str, Ratio] = Field(default_factory=dict)  # how many times as often at most, instead of a margin
    primary: Policies = ()
    contexts: tuple[ContextLength, ...] = ()
    deployable: Policies = ()
    estimands: tuple[_Contrast, ...] = Field(default=(ALIKE, DEPLOYED), min_length=1)
    on_inconclusive: Literal["block", "warn"] | None = None
    not_measurable: Literal["block", "warn"] | None = None  # a reference that has nothing to lose; block
    worst_seed: bool = False  # no training seed may FAIL by itself
    pin: Text | None = None
    gate_file: Text | None = None


class DeclaredTraining(SpecSection):
    """How checkpoints were trained, in the words of whoever trained them. Nothing here can be verified."""

    rollouts: Text = UNKNOWN  # the cache policy of the rollouts: one of ours as text, or another mechanism
    learner: Text = UNKNOWN  # dense or shadow
    correction: Text = UNKNOWN
    distillation: Text = UNKNOWN
    loss: Text = UNKNOWN
    reward: Text = UNKNOWN
    constitution: Text = UNKNOWN
    trained_on: Text = UNKNOWN


class ExternalArm(SpecSection):
    """Checkpoints that were trained elsewhere: seed -> folder or hub id. A lone text is one checkpoint of seed 0.

    Checkpoints of equal seeds are compared as pairs. ``role`` reference makes the arm the gate's reference.
    """

    seeds: dict[Annotated[int, Field(ge=0, lt=2**31)], Text] = Field(min_length=1)
    role: Literal["reference", "candidate"] = "candidate"
    recipe: DeclaredTraining = DeclaredTraining()

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"seeds": {0: value}} if isinstance(value, str) else value


@dataclass(frozen=True)
class _LeftOpen:
    """The suites whose margin nobody declared: beside a spec and no part of it, so of two equal ones one may know."""

    suites: tuple[str, ...] | None = field(default=None, compare=False)


def _listed(value: Any) -> Any:
    """A lone text is a list of one."""
    return [value] if isinstance(value, str) else value


ChatValue = Annotated[Any, BeforeValidator(_scalar)]


class RunSpec(SpecSection):
    """A whole run. What the gate leaves open is filled in; the hash is that of the complete spec."""

    later = ("chat", "checkpoints", "probe", "engines", "judge")

    format: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    model: str = "embedded"
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    device: str = "auto"
    chat: dict[OptionName, ChatValue] = Field(default_factory=dict)  # options of the chat template, in training too
    train: TrainSpec | None = None
    checkpoints: dict[_ArmName, ExternalArm] = Field(default_factory=dict)
    evaluate: EvaluateSpec
    probe: ProbeSpec | None = None
    engines: dict[Text, EngineSpec] = Field(default_factory=dict)  # how those that serve, or draw rollouts, are run
    gate: GateSpec = GateSpec()
    judge: Annotated[tuple[Text, ...], BeforeValidator(_listed)] = ()  # who grades the stored transcripts once more
    data: str | None = None  # folder of public rows, instead of KVAUDIT_DATA
    _left_open: _LeftOpen = PrivateAttr(default=_LeftOpen())

    @property
    def arms(self) -> tuple[tuple[str, int], ...]:
        """Every (arm, seed) to evaluate: base is the model or each seed's warm start, endpoint what a probe asks."""
        if self.probe is not None:
            return ((ENDPOINT_ARM, 0),)
        trained = () if self.train is None else self.train.pairs
        external = tuple((arm, seed) for arm, part in self.checkpoints.items() for seed in part.seeds)
        start = tuple(self.starts) or ((BASE_ARM, 0),)
        return (start if self.evaluate.base or not trained + external else ()) + trained + external

    def served(self, arm: str) -> tuple[str, ...]:
        """The policies that the checkpoints of an arm are served under."""
        policies = self.evaluate.policies
        trained = () if self.train is None or not self.evaluate.own_policy_only else self.train.trained
        own = [t.policy for t in trained if t.name == arm and t.policy != DENSE_POLICY]
        return tuple(p for p in policies if p in (DENSE_POLICY, *match_policies(own, policies))) if own else policies

    @property
    def starts(self) -> tuple[tuple[str, int], ...]:
        """The warm starts as arm ``base``, one for every training seed; none where training begins from the model."""
        warm = self.train is not None and self.train.sft is not None
        return tuple((BASE_ARM, seed) for seed in self.train.seeds) if warm and self.train is not None else ()

    def engine(self, condition: str) -> EngineSpec:
        """How the engine of a condition is run."""
        return self.engines.get(engine_name(condition), EngineSpec())

    def external_source(self, arm: str, seed: int) -> str | None:
        """The folder or hub id of a checkpoint that was trained elsewhere, with ${VARIABLES} filled in; else None."""
        part = self.checkpoints.get(arm)
        return None if part is None else expand(f"checkpoints.{arm}", part.seeds[seed])

    @property
    def sha256(self) -> str:
        """Hash of the canonical JSON, without where data lies and how fast an endpoint is asked."""
        row = self.written()
        former = {name: code for code, name in FORMER_CONTRASTS.items() if name != SERVING}  # so that older runs keep their hash
        row["gate"]["estimands"] = [former.get(name, name) for name in row["gate"]["estimands"]]
        del row["data"]
        if self.probe is not None:
            row["probe"] = self.probe.measured()
        if self.engines:
            row["engines"] = {name: part.measured() for name, part in self.engines.items()}
        return hashlib.sha256(json.dumps(row, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def model_path(self) -> str:
        """The model with ${VARIABLES} filled in."""
        return expand("model", self.model)

    def sized(self, numbers: Mapping[str, int]) -> RunSpec:
        """The same run with the numbers of items that were asked; the hash is that of the run as asked.

        A suite of 0 items, which the pilot found to have nothing to lose, is left out with its margins.
        """
        absent = [name for name, number in numbers.items() if number == 0]
        evaluate = self.evaluate.sized(numbers)
        if not absent:
            return self.model_copy(update={"evaluate": evaluate})
        margins = {name: points for name, points in self.gate.margins.items() if not _is_of(name, absent)}
        gate = self.gate.model_copy(update={"margins": margins})
        return self.model_copy(update={"evaluate": evaluate, "gate": gate})

    def limited(self, items: int) -> RunSpec:
        """The same run with at most ``items`` items per suite: another spec, with another hash."""
        suites = {
            name: part.model_copy(update={"items": min(items, part.items) if isinstance(part.items, int) else items})
            for name, part in self.evaluate.suites.items()
        }
        pilot = self.evaluate.pilot
        if pilot and items < pilot:  # a pilot that is asked for by number has to fit
            pilot = None
        return self.model_copy(update={"evaluate": self.evaluate.model_copy(update={"suites": suites, "pilot": pilot})})

    @property
    def default_margins(self) -> tuple[str, ...] | None:
        """The suites whose margin is the default of their kind; None where the margins were not filled in here.

        A complete spec names every margin, so one that was written and read again knows of no default.
        """
        return self._left_open.suites

    @model_validator(mode="before")
    @classmethod
    def _probed(cls, value: Any, info: ValidationInfo) -> Any:
        """A plan of a probe with what it leaves open."""
        if not isinstance(value, Mapping) or "probe" not in value:
            return value
        probe = {} if value["probe"] is None else value["probe"]
        return {**value, "probe": probe, "evaluate": fill_probe_grid(value.get("evaluate"), info.context)}

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        gate, served, names = self.gate, self.evaluate.policies, info.context
        self._check_asked()
        self.evaluate.check_rounds(trains=self.train is not None or bool(self.checkpoints), gated=gate.margins)
        self._check_own()
        self._check_engines()
        arms = tuple(dict.fromkeys(arm for arm, _ in self.arms))
        _check_external(self.checkpoints, self.train)
        check_unique("judge", self.judge)
        if names is not None:
            for text in self.judge:
                names.check_judge(text)
        declared = [arm for arm, part in self.checkpoints.items() if part.role == "reference"]
        base = BASE_ARM if self.probe is None else ENDPOINT_ARM
        # the gate's word, else an arm's, else the dense arm, else what training begins from
        reference = gate.reference or next(iter(declared), DENSE_ARM if DENSE_ARM in arms else base)
        if reference not in arms:
            if gate.reference is None:
                raise SpecError(
                    "nothing to compare with: no arm is dense and the base is not evaluated; set evaluate.base: true, "
                    f"or gate.reference to one of {', '.join(sorted(arms))}"
                )
            raise UnknownName("gate.reference", reference, arms)
        if self.checkpoints and names is not None:
            _check_seeds(self.arms, reference)
        primary = _served("primary", gate.primary, served, names) or compressed_policies(served, self.evaluate.references)
        filled = {
            "reference": reference,
            "primary": primary,
            "deployable": _served("deployable", gate.deployable, served, names),
            "margins": _margins(self.evaluate, gate, names),
            "alpha": _alpha(gate),
        }
        _check_lengths(gate.contexts, self.evaluate)
        for arm in check_unique("gate.arms", gate.arms):
            if arm in (reference, BASE_ARM) or arm not in arms:
                raise UnknownName("arm in gate.arms", arm, (name for name in arms if name not in (reference, BASE_ARM)))
        limited = {**gate.margins, **gate.ratios}
        taken_apart = {name.rpartition(".")[0] for name in limited if name not in self.evaluate.suites}
        undeclared = tuple(suite for suite in self.evaluate.suites if suite not in {*limited, *taken_apart})
        if self.evaluate.rounds is not None:
            _check_rounds_gate(gate, primary)
            undeclared = ()
        self._left_open = _LeftOpen(None if names is None else undeclared)
        object.__setattr__(self, "gate", gate.model_copy(update=filled))  # frozen, but still in the making
        return self

    def _check_own(self) -> None:
        """Raise SpecError where checkpoints are to be served under their own policies, and there are no such."""
        if not self.evaluate.own_policy_only:
            return
        if self.train is None:
            raise SpecError(
                "evaluate.own_policy_only is of checkpoints that the run trains; give train, or leave it out"
            )
        policies = self.evaluate.policies
        if engines := [*self.evaluate.references]:
            raise SpecError(
                f"evaluate.own_policy_only would serve no trained checkpoint by an engine ({engines[0][:100]}), since "
                "none is trained under one; leave it out, or give the engines a run of their own"
            )
        for trained in self.train.trained:
            (policy,) = match_policies([trained.policy], policies)
            if policy not in policies:
                raise UnknownName("policy of training in evaluate.policies", policy, policies)

    def _check_engines(self) -> None:
        """Raise UnknownName for an engine that nothing is served by, and whose options would be read by nobody."""
        served = {engine_name(text) for pair in self.evaluate.references.items() for text in pair}
        if self.train is not None and self.train.rollouts is not None:
            served.add(engine_name(self.train.rollouts))
        for name in self.engines:
            if name not in served:
                raise UnknownName("engine in engines", name, served)

    def _check_asked(self) -> None:
        """Raise SpecError for what checkpoints, or an endpoint, cannot be asked."""
        if self.probe is None:
            self.evaluate.check_draws()
            arms = {f"checkpoints.{arm}": part.seeds.values() for arm, part in self.checkpoints.items()}
            for key, texts in {"model": [self.model], **arms}.items():
                for text in texts:
                    check_no_address(key, text, "a folder, a hub id, a .gguf file or embedded")
            return
        check_probe_grid(self.evaluate)
        for section, there in (("train", self.train), ("checkpoints", self.checkpoints)):
            if there:
                raise SpecError(f"{section}: an endpoint has none that we could load; leave it out beside probe")
        if "model" not in self.model_fields_set:
            raise SpecError("model is missing: the name by which the endpoint knows its model")


def _check_external(arms: Mapping[str, ExternalArm], train: TrainSpec | None) -> None:
    """Raise SpecError for arms that stand for two things."""
    taken = {BASE_ARM, *(() if train is None else (arm.name for arm in train.trained))}
    for arm in arms:
        if arm in taken:
            raise SpecError(f"checkpoints.{arm} is the name of an arm that the run has already; choose another")
    references = [arm for arm, part in arms.items() if part.role == "reference"]
    if len(references) > 1:
        raise SpecError(f"checkpoints names {len(references)} references ({', '.join(references)}), wanted one at most")


def _check_seeds(pairs: Iterable[tuple[str, int]], reference: str) -> None:
    """Raise SpecError for arms that could not be compared seed by seed, which a run would find out at its end."""
    seeds: dict[str, set[int]] = {}
    for arm, seed in pairs:
        seeds.setdefault(arm, set()).add(seed)
    own = seeds.get(reference, set())
    wanted: set[int] | None = None
    for arm, found in seeds.items():
        if arm in (BASE_ARM, reference):
            continue
        wanted = wanted or found
        # one seed that no arm has serves all of them
        serves = reference == BASE_ARM or found <= own or (len(own) == 1 and not own & found)
        if found != wanted or not serves:
            other = sorted(wanted if found != wanted else own)
            raise SpecError(
                f"checkpoints: arm {arm} has seeds {sorted(found)}, another arm or the reference {other}; arms are "
                "compared seed by seed: give all the same seeds (a reference of one seed of its own serves all)"
            )


def expand(key: str, text: str) -> str:
    """Fill in ${VARIABLES} from the environment; raises SpecError for one that is not set."""
    for name in _VARIABLE.findall(text):
        if not os.environ.get(name):
            raise SpecError(f"{key} is {text!r}, but the environment variable {name} is not set")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], text)


def _served(key: str, asked: Iterable[str], served: tuple[str, ...], names: PluginNames | None) -> tuple[str, ...]:
    """The policies that ``gate.<key>`` names, each one that is served.

    Canonical texts are compared as they are. Without names the texts may be spelled differently in the two places.
    """
    found = tuple(asked) if names is not None else tuple(match_policies(asked, served))
    for policy in found:
        if policy not in served:
            raise UnknownName(f"policy in gate.{key}", policy, served)
    return found


def _check_lengths(gated: tuple[int, ...], grid: EvaluateSpec) -> None:
    """Raise for a gated length at which nothing is asked, and for a suite that is asked at no gated length."""
    for context in gated:
        if context not in grid.contexts:
            raise UnknownName("length in gate.contexts", str(context), map(str, grid.contexts))
    for suite in grid.suites:
        own = grid.contexts_of(suite)
        if gated and not set(gated) & set(own):
            raise SpecError(
                f"gate.contexts has no length at which suite {suite} is asked ({', '.join(map(str, own))}), so nothing "
                "would decide it; name one of them, or leave gate.contexts out"
            )


def _check_rounds_gate(gate: GateSpec, primary: Sequence[str]) -> None:
    """Raise SpecError for what cannot be decided at a look."""
    if not gate.margins:
        raise SpecError("evaluate.rounds goes on until facets are decided, and gate.margins names none: SUITE.FACET")
    if gate.ratios:
        raise SpecError("gate.ratios cannot be decided in rounds; give points in gate.margins, or leave rounds out")
    if others := sorted({*gate.estimands} - {ALIKE, DEPLOYED, SERVING}):
        raise SpecError(f"gate.estimands asks {others[0]}, which cannot be decided in rounds; leave it or rounds out")
    if len(primary) > 1:
        raise SpecError(
            f"evaluate.rounds decides one setting, and {len(primary)} are gated; name one in gate.primary, or give "
            "each a run of its own"
        )


def _is_of(metric: str, suites: Collection[str]) -> bool:
    """Whether a metric is the score or a facet of one of these suites."""
    return metric in suites or metric.rpartition(".")[0] in suites


def _margins(evaluate: EvaluateSpec, gate: GateSpec, names: PluginNames | None) -> dict[str, float]:
    """The margin of every suite that has no ratio, and of every SUITE.FACET that has one.

    A suite of which facets alone are limited is decided by these, and its score by nothing; in rounds no score is.
    Without names only the margins that are declared.
    """
    own, declared = list(evaluate.suites), gate.margins
    for key, name in [*(("margins", name) for name in declared), *(("ratios", name) for name in gate.ratios)]:
        suite, _, facet = name.rpartition(".")
        if suite not in own and name not in own:
            raise UnknownName(f"suite in gate.{key}", name, own)
        if name not in own and facet not in FACETS:
            raise UnknownName(f"facet in gate.{key}", name, (f"{suite}.{known}" for known in FACETS))
    if both := sorted({*declared} & {*gate.ratios}):
        raise SpecError(f"gate.margins and gate.ratios both name {both[0]}; give one of the two")
    if names is None or evaluate.rounds is not None:
        return declared
    facets = {name: points for name, points in declared.items() if name not in own}
    taken_apart = {name.rpartition(".")[0] for name in (*declared, *gate.ratios) if name not in own}
    suited = {
        suite: declared.get(suite, _MARGIN_PP[names.kind(suite)])
        for suite in own
        if suite not in gate.ratios and (suite in declared or suite not in taken_apart)
    }
    return {**suited, **facets}


def _alpha(gate: GateSpec) -> float:
    """The level of the profile; raises SpecError where the section gives another one beside it."""
    profile = _ALPHA if gate.profile is None else _PROFILE_ALPHA[gate.profile]
    if gate.profile is not None and gate.alpha not in (None, profile):
        raise SpecError(f"gate.alpha is {gate.alpha:g}, profile {gate.profile} has {profile:g}; give one of the two")
    return profile if gate.alpha is None else gate.alpha


# --- reading and writing it ------------------------------------------------------------------------------------------


def load_spec(path: Path, names: PluginNames | None = None) -> RunSpec:
    """The spec in ``path``; raises DataError when it cannot be read and SpecError when it is wrong.

    ``names`` check what plug-ins answer to, and fill in what follows from them; without, the spec is read as it stands.
    """
    check_no_address("the spec", str(path), "a YAML file")
    return parse_spec(read_text(path, "spec"), str(path), names)


def parse_spec(text: str, source: str, names: PluginNames | None = None) -> RunSpec:
    """The spec written in ``text``; ``source`` names it in errors, ``names`` are as for ``load_spec``."""
    file = parse_yaml(text, source, "spec")
    return _validated(file.table, source, file.lines, names)


def with_gate(spec: RunSpec, file: YamlFile, names: PluginNames | None = None) -> RunSpec:
    """The spec with what a gate file says in place of its gate section; margins are replaced suite by suite.

    Raises SpecError as ``parse_spec`` does, with the lines of the gate file.
    """
    row = spec.written()
    row["gate"] = _overlaid(row["gate"], file.table)
    found = _validated(row, file.name, {("gate", *place): line for place, line in file.lines.items()}, names)
    if spec.default_margins is not None:
        declared = {**(file.table.get("margins") or {}), **(file.table.get("ratios") or {})}
        found._left_open = _LeftOpen(tuple(suite for suite in spec.default_margins if suite not in declared))
    return found


def _overlaid(section: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(section)
    if "profile" in table or "alpha" in table:  # a level stands in one place
        for key in ("profile", "alpha", "on_inconclusive"):
            kept.pop(key, None)
    merged = {**kept, **{key: value for key, value in table.items() if key != "format"}}
    for key, instead in (("margins", "ratios"), ("ratios", "margins"), ("estimand_margins", "")):
        old, new, other = kept.get(key, {}), table.get(key, {}), table.get(instead, {})
        if isinstance(old, Mapping) and isinstance(new, Mapping) and isinstance(other, Mapping):
            # what the file gives the other kind of limit has this kind no more
            merged[key] = {**{name: value for name, value in old.items() if name not in other}, **new}
    return merged


def _validated(table: Mapping[str, Any], source: str, lines: Mapping[KeyPath, int], names: PluginNames | None) -> RunSpec:
    try:
        return RunSpec.model_validate(table, context=names)
    except ValidationError as error:
        place, message = _first(error)
        raise SpecError(f"{_where(source, place, lines)}: {message}") from None
    except AuditError as error:
        raise SpecError(f"{source}: {error}") from error


def dump_spec(spec: RunSpec) -> str:
    """The complete spec as YAML, every default written out; reads back to an equal spec."""
    return yaml.safe_dump(spec.written(), sort_keys=False, allow_unicode=True, width=120)


def _first(error: ValidationError) -> tuple[KeyPath, str]:
    """Place and message of the first mistake; an unknown key goes first, it often explains the others."""
    mistakes = sorted(error.errors(include_url=False), key=lambda mistake: mistake["type"] != "extra_forbidden")
    place = tuple(part for part in mistakes[0]["loc"] if part != "[key]")  # pydantic's mark of a bad key
    return place, _message(mistakes[0], place)


def _message(mistake: ErrorDetails, place: KeyPath) -> str:
    *parents, last = place or ("spec",)
    inside = ".".join(str(part) for part in parents)
    if mistake["type"] == "extra_forbidden":
        if not parents and (refusal := removed_spec_key(str(last))) is not None:
            return refusal
        unknown = str(UnknownName("key", str(last), _known_keys(parents)))
        return unknown.replace(f"{str(last)!r}.", f"{str(last)!r} in {inside}.", 1) if inside else unknown
    name = f"{inside}.{last}" if inside else str(last)
    if mistake["type"] == "missing":
        return f"{name} is missing"
    problem = _WANTED.get(mistake["type"], mistake["msg"].removeprefix("Input should be "))
    got = HIDDEN if last == "key" else short_repr(mistake["input"])  # it may be the key itself
    return f"{name} is {got}, wanted {problem}"


def _known_keys(parents: Sequence[str | int]) -> list[str]:
    model: Any = RunSpec
    for part in parents:
        if part in model.model_fields:  # otherwise a name of the user's own, as under evaluate.suites
            held = model.model_fields[str(part)].annotation
            # inside an annotation such as ``TrainSpec | None`` or ``dict[str, SuiteSpec]``
            if get_origin(held) in (Union, types.UnionType, dict):
                held = next(one for one in get_args(held) if isinstance(one, type) and issubclass(one, SpecSection))
            model = held
    return list(model.model_fields)


def _where(source: str, place: KeyPath, lines: Mapping[KeyPath, int]) -> str:
    # of the value itself, else of what holds it
    for end in range(len(place), 0, -1):
        if place[:end] in lines:
            return f"{source} line {lines[place[:end]]}"
    return source
