"""Modules that moved, and features that were removed.

For one release, modules that a plug-in or a script may import are found by their old path too, with a
DeprecationWarning. An import, command or spec key of a removed feature is refused with a message that says what to do
instead.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


@dataclass(frozen=True)
class Removed:
    """A removed feature: the names of its commands, spec keys, suites and imports; ``instead`` says what to use now."""

    instead: str
    commands: tuple[str, ...] = ()
    spec_keys: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


REMOVED = (
    Removed("in a clone of the repository: python -m bench.calibration", commands=("calibrate",)),
    Removed("in a clone of the repository: python -m bench.pretraining", commands=("pretrain",)),
    Removed(
        "measure a guard as a system of its own: put an endpoint that has it in front of the model, and audit that",
        commands=("guard", "grade guard", "list guards"),
        spec_keys=("guard",),
        imports=("Guard", "audit.judges.guards", "audit.runs.guard", "reports.records.guards"),
    ),
    Removed(
        "list the policies to try in evaluate.policies of a spec: each gets a verdict of its own",
        commands=("remedy", "replay remedy"),
        spec_keys=("remedies",),
        imports=("audit.policies.remedy", "audit.runs.remedy", "reports.records.remedies", "reports.analysis.remedies"),
    ),
    Removed(
        "serve the model under its policies (kvaudit serve MODEL) and ask it, or use kvaudit.CompressedCache in Python",
        commands=("generate",),
    ),
    Removed(
        "kvaudit diagnose MODEL measures how far a setting moves the model's probabilities, in nats",
        commands=("displace", "replay displace"),
        imports=("audit.again.displace", "audit.again.teacher_forcing", "reports.analysis.displacement"),
    ),
    Removed(
        "kvaudit run asks these suites of any model, engine or endpoint, and kvaudit compare reads lm-eval's logs",
        commands=("tasks", "harness tasks"),
        imports=("audit.serving.harness.tasks",),
    ),
    Removed(
        "ask RULER's tasks through lm-eval (examples/ruler)",
        suites=("needle",),
        imports=("suites.needle",),
    ),
    Removed(
        "to train one unit on several GPUs, use kvaudit.trl.AuditedGRPOTrainer under accelerate launch",
        imports=("audit.runs.ranks", "audit.training.ranks", "audit.training.sharded"),
    ),
    Removed(
        "kvaudit explain RUN ITEM shows which tokens of a prompt a policy kept",
        commands=("show",),
    ),
)


def removed_command(words: Sequence[str]) -> str | None:
    """Return the error text for a removed command; None if ``words`` do not begin with one."""
    for name in (" ".join(words[:2]), *words[:1]):
        if (instead := _instead(name, "commands")) is not None:
            return f"{name} is no longer a command of kvaudit; {instead}"
    return None


def removed_spec_key(key: str) -> str | None:
    """Return the error text for a removed key of a spec; None if ``key`` was not removed."""
    instead = _instead(key, "spec_keys")
    return None if instead is None else f"{key} is no longer a key of a spec; {instead}"


def removed_suite(name: str) -> str | None:
    """Return the error text for a removed suite; None if ``name`` was not removed."""
    instead = _instead(name, "suites")
    return None if instead is None else f"{name} is no longer a suite of kvaudit; {instead}"


def removed_import(name: str) -> str | None:
    """Return the error text for a removed import such as ``kvaudit.Guard``; None if ``name`` was not removed."""
    package, _, path = name.partition(".")
    if package != "kvaudit":
        return None
    for end in range(path.count(".") + 1, 0, -1):
        if (instead := _instead(".".join(path.split(".")[:end]), "imports")) is not None:
            return f"{name} is no longer part of kvaudit; {instead}"
    return None


def _instead(name: str, kind: str) -> str | None:
    return next((removed.instead for removed in REMOVED if name in getattr(removed, kind)), None)


def _merged_into(package: str, module: str, *former: str) -> dict[str, str]:
    """Return {old path: new path} for modules (``former``) that became part of ``module`` in the same package."""
    return {f"{package}.{name}": f"{package}.{module}" for name in former}


# old path -> new path, both below kvaudit
MOVED = {
    **_merged_into("audit.judges", "rubric", "constitution", "rubric_endpoint", "rubric_local"),
    **_merged_into("audit.policies", "blind", "none", "random", "streaming"),
    **_merged_into("audit.policies", "eight_bits", "fp8", "int8"),
    **_merged_into("audit.policies", "rankings", "expected", "h2o", "keydiff", "knorm", "tova"),
    **_merged_into("audit.policies", "snapkv", "adakv", "pyramidkv"),
    **_merged_into("audit.training.losses", "published", "grpo", "online_dpo", "ppo"),
    **_merged_into("core", "judge_answers", "questions", "remembered"),
    **_merged_into("core", "network", "download", "threads"),
    **_merged_into("core", "plugins", "named_text", "options", "registry"),
    **_merged_into("core.tool_forms", "json_forms", "deepseek", "harmony", "hermes", "llama_json", "mistral"),
    **_merged_into("core.tool_forms", "tagged_forms", "glm", "qwen_coder"),
    **_merged_into("core.tool_forms", "text", "pythonic", "reading"),
    "results": "api",
    "audit.policies.parse": "audit.policies.compose",
    "audit.training.rewards.grade": "audit.training.rewards.base",
    "suites.catalogue": "suites.sources",
    "suites.published": "suites.base",
    "core.removed": "core.moved",
    "core.shading": "core.spans",
    "audit.engines.drawing": "audit.engines.rollouts",
    "audit.engines.exports.llama_cpp_cache": "audit.engines.exports.llama_cpp",
    "audit.engines.keeper": "audit.engines.supervisor",
    "audit.engines.life": "audit.engines.process",
    "audit.engines.served": "audit.engines.http_server",
    "audit.engines.talk": "audit.engines.conversation",
    "audit.engines.worked": "audit.engines.worker_client",
    "audit.judges.card": "audit.judges.labels",
    "audit.judges.grader": "audit.judges.base",
    "audit.policies.scales": "audit.policies.quantiser",
    "core.conditions": "core.policy_names",
    "core.estimands": "core.facets",
    "core.recipe": "core.provenance",
    "core.secrets": "core.text",
    "core.thoughts": "core.completions",
    "reports.analysis.cache_use": "reports.sections.shared.cache_use",
    "reports.analysis.examples": "reports.sections.shared.tables",
    "reports.analysis.floor": "reports.sections.shared.floor",
    "reports.analysis.mechanism": "reports.sections.mechanism",
    "reports.analysis.safe": "reports.sections.shared.safe",
    "reports.analysis.sides": "reports.sections.base",
    "reports.analysis.slopes": "reports.stats.slope",
    "reports.compare.direction": "reports.page.compare_pairing",
    "reports.compare.files": "reports.page.compare_files",
    "reports.compare.page": "reports.page.compare_page",
    "reports.compare.pairing": "reports.page.compare_pairing",
    "reports.drift.answers": "reports.verdict.contrast",
    "reports.drift.canary": "reports.verdict.controls",
    "reports.drift.comparison": "reports.verdict.comparison",
    "reports.drift.drift": "reports.verdict.drift",
    "reports.drift.results": "reports.verdict.contrast",
    "reports.drift.selectivity": "reports.verdict.selectivity",
    "reports.gate.cell": "reports.verdict.cell",
    "reports.gate.chance": "reports.verdict.chance",
    "reports.gate.controls": "reports.verdict.controls",
    "reports.gate.decide": "reports.verdict.decide",
    "reports.gate.decided": "reports.verdict.verdict",
    "reports.gate.enough": "reports.verdict.sizes",
    "reports.gate.error_rates": "reports.verdict.controls",
    "reports.gate.family": "reports.verdict.family",
    "reports.gate.pin": "reports.verdict.pin",
    "reports.gate.ratios": "reports.verdict.rules",
    "reports.gate.rules": "reports.verdict.rules",
    "reports.gate.seeds": "reports.verdict.decide",
    "reports.gate.sizes": "reports.verdict.sizes",
    "reports.gate.verdict": "reports.verdict.verdict",
    "reports.gate.waivers": "reports.verdict.verdict",
    "reports.labels.blind": "reports.verdict.human_labels",
    "reports.labels.pairs": "reports.verdict.label_sheet",
    "reports.labels.relabelled": "reports.verdict.human_labels",
    "reports.labels.sheet": "reports.verdict.label_sheet",
    "reports.layout.canvas": "reports.sections.shared.canvas",
    "reports.layout.contrasts": "reports.sections.base",
    "reports.layout.events": "reports.page.facets",
    "reports.layout.facts": "reports.sections.shared.words",
    "reports.layout.json_text": "reports.sections.shared.words",
    "reports.layout.rows": "reports.verdict.row",
    "reports.layout.tables": "reports.sections.shared.tables",
    "reports.layout.words": "reports.sections.shared.words",
    "suites.public_requests": "suites.requests",
    "suites.vocabulary": "suites.haystack",
}
_FORMER_PACKAGES = frozenset(
    name.rpartition(".")[0] for name in (*MOVED, *(name for removed in REMOVED for name in removed.imports))
)


class MovedModules(MetaPathFinder):
    """An import finder that finds moved modules by their old path, and refuses removed ones."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the contract of importlib
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the spec of a module at a former path of kvaudit, None for any other path.

        Raises ModuleNotFoundError, with what to do instead, for a removed module.
        """
        top, _, name = fullname.partition(".")
        if top != "kvaudit":
            return None
        if name in MOVED:
            return ModuleSpec(fullname, _Alias(f"kvaudit.{MOVED[name]}"))
        if (refusal := removed_import(fullname)) is not None:
            raise ModuleNotFoundError(refusal, name=fullname)
        return ModuleSpec(fullname, _Alias(""), is_package=True) if name in _FORMER_PACKAGES else None


class _Alias(Loader):
    """A loader that imports a module from its new path and makes it known under the old path too.

    If the new path is "", it makes an empty package.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        if self._path:
            warnings.warn(f"{module.__name__} is now {self._path}", DeprecationWarning, stacklevel=2)
            sys.modules[module.__name__] = import_module(self._path)


def install() -> None:
    """Install the finder of former module paths; it comes last, so that other imports do not become slower."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
