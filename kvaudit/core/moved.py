"""Modules that moved, and features that were removed.

For one release, an import by the old path gives the new module, with a DeprecationWarning. An import, command or spec
key of a removed feature is refused with a message that says what to do instead.
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
    """A removed feature: its commands, spec keys, suites and imports, and ``instead``, what to use in its place."""

    instead: str
    commands: tuple[str, ...] = ()
    spec_keys: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


REMOVED = (
    Removed("Inspect plays its tasks itself: kvaudit.suites.inspect_task", imports=("suites.inspect_plan",)),
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
        "the verdict is the declared analysis alone; kvaudit plan RUN says what a next run would need",
        imports=("reports.analysis.sensitivity", "reports.sections.methods", "reports.sections.reach"),
    ),
    Removed(
        "kvaudit view RUN shows every answer that was lost, by template",
        imports=("reports.sections.concentration",),
    ),
    Removed(
        "kvaudit run asks these suites of any model, engine or endpoint, and kvaudit compare reads lm-eval's logs",
        commands=("tasks", "harness tasks"),
        imports=("audit.serving.harness.tasks",),
    ),
    Removed(
        "the bar of a run counts answers and estimates the rest by their speed (audit.runs.progress)",
        imports=("audit.runs.forecast",),
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


def _joined(package: str, module: str, *former: str) -> dict[str, str]:
    """Return {old path: new path} for modules (``former``) that became part of ``module`` in the same package."""
    return {f"{package}.{name}": f"{package}.{module}" for name in former}


# old path -> new path, both below kvaudit
MOVED = {
    **_joined("audit.cache", "tensors", "fusion", "gather", "upload"),
    **_joined("audit.judges", "rubric", "constitution", "rubric_endpoint", "rubric_local"),
    **_joined("audit.policies", "blind", "none", "random", "streaming"),
    **_joined("audit.policies", "eight_bits", "fp8", "int8"),
    **_joined("audit.policies", "rankings", "expected", "h2o", "keydiff", "knorm", "tova"),
    **_joined("audit.policies", "snapkv", "adakv", "pyramidkv"),
    **_joined("audit.replay", "rollout_checks", "recorded", "schedule_check"),
    **_joined("audit.scan", "scan", "declared", "report"),
    **_joined("audit.training.losses", "published", "grpo", "online_dpo", "ppo"),
    **_joined("core", "judge_answers", "questions", "remembered"),
    **_joined("core", "network", "download", "threads"),
    **_joined("core", "plugins", "named_text", "options", "registry"),
    **_joined("core.tool_forms", "json_forms", "deepseek", "harmony", "hermes", "llama_json", "mistral"),
    **_joined("core.tool_forms", "tagged_forms", "glm", "qwen_coder"),
    **_joined("core.tool_forms", "text", "pythonic", "reading"),
    **_joined("reports.page", "page", "grid", "screen"),
    **_joined("reports.page", "publish", "hub_results", "model_card", "servers"),
    **_joined("reports.page.formats", "ci", "junit", "sarif", "summary"),
    **_joined("reports.page.formats", "disclosure", "bom", "card"),
    **_joined("reports.page.formats", "json_files", "drift", "verdict"),
    **_joined("reports.page.view", "data", "flips", "shades", "texts"),
    **_joined("reports.sections", "contrasts", "amplification", "interaction", "sensitivity"),
    **_joined("reports.verdict", "controls", "canary", "error_rates"),
    "results": "api",
    "audit.policies.parse": "audit.policies.compose",
    "audit.runs.stages.floor": "audit.runs.stages.evaluate",
    "audit.training.rewards.grade": "audit.training.rewards.base",
    "reports.sections.floor": "reports.sections.engines",
    "reports.sections.people": "reports.sections.judges",
    "audit.runs.probe.calls": "audit.runs.endpoint_probe",
    "audit.runs.probe.plan": "audit.runs.endpoint_probe",
    "audit.runs.probe.probe": "audit.runs.endpoint_probe",
    "reports.page.figures": "reports.page.plots",
    "reports.page.figures.forest": "reports.page.plots",
    "reports.page.figures.heatmap": "reports.page.plots",
    "reports.page.figures.quadrant": "reports.page.plots",
    "reports.stats.few": "reports.verdict.contrast",
    "reports.sections.shared.lost_spans": "reports.sections.mechanism",
    "reports.sections.shared.events": "reports.page.facets",
    "reports.records.floor": "reports.records.load",
    "reports.stats.binomial": "reports.stats.judges",
    "reports.verdict.downgrades": "reports.verdict.decide",
    "reports.verdict.item_counts": "reports.verdict.sizes",
    "reports.verdict.waivers": "reports.verdict.verdict",
    "reports.verdict.reference_answers": "reports.verdict.contrast",
    "audit.runs.stages.answering": "audit.runs.stages.base",
    "audit.sampling.response_template": "audit.sampling.chat_tools",
    "reports.verdict.label_pairs": "reports.verdict.label_sheet",
    "reports.verdict.ratios": "reports.verdict.rules",
    "reports.stats.signed_rank": "reports.stats.slope",
    "reports.stats.churn": "reports.stats.power",
    "reports.sections.shared.facts": "reports.sections.shared.words",
    "reports.sections.shared.both_sides": "reports.sections.churn",
    "reports.records.readers.clusters": "reports.records.readers.base",
    "suites.catalogue": "suites.sources",
    "suites.published": "suites.base",
    "audit.training.token_logprobs": "audit.training.learner",
    "audit.training.files": "audit.training.checkpoint",
    "audit.training.arms": "audit.training.config",
    "audit.serving.tools": "audit.serving.wire",
    "audit.scan.shell_words": "audit.scan.shell",
    "audit.runs.found_so_far": "audit.runs.progress",
    "audit.rerun.finished": "audit.rerun.measure",
    "audit.rerun.explain": "audit.rerun.shade",
    "audit.commands.harness": "audit.commands.serve",
    "audit.commands.shading": "audit.commands.report",
    "audit.cache.code_ring": "audit.cache.stepped_store",
    "core.removed": "core.moved",
    "core.shading": "core.spans",
    "audit.again.answers": "audit.rerun.measure",
    "audit.again.diagnose": "audit.rerun.diagnose",
    "audit.again.distances": "audit.rerun.diagnose",
    "audit.again.explain": "audit.rerun.shade",
    "audit.again.finished": "audit.rerun.measure",
    "audit.again.measure": "audit.rerun.measure",
    "audit.again.mismatch": "audit.rerun.mismatch",
    "audit.again.shade": "audit.rerun.shade",
    "audit.again.verify": "audit.rerun.verify",
    "audit.cache.linear": "audit.cache.layers",
    "audit.cache.live": "audit.cache.store",
    "audit.cache.quantised.codes": "audit.cache.codes",
    "audit.cache.quantised.hints": "audit.cache.hints",
    "audit.cache.quantised.layout": "audit.cache.rows",
    "audit.cache.quantised.products": "audit.cache.codes",
    "audit.cache.quantised.store": "audit.cache.quantised_store",
    "audit.cache.schedule": "audit.cache.rows",
    "audit.commands.command_line": "audit.commands.base",
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
    "audit.replay.codes": "audit.replay.attention",
    "audit.replay.head": "audit.replay.learner_pass",
    "audit.replay.interchange_form": "audit.replay.interchange",
    "audit.runs.floor": "audit.runs.batches",
    "audit.runs.regrading": "audit.runs.judge",
    "audit.runs.rounds": "audit.runs.stages.rounds",
    "audit.sampling.degenerate": "audit.sampling.exchange",
    "audit.sampling.gguf_header": "audit.sampling.weights",
    "audit.sampling.packed": "audit.sampling.packing",
    "audit.scan.toml_text": "audit.scan.trees",
    "audit.training.advantages": "audit.training.losses.base",
    "audit.training.early_stop": "audit.training.validation",
    "audit.training.reads": "audit.training.optimiser",
    "audit.training.reward_trial": "audit.training.sft",
    "audit.training.trl.step": "audit.training.trl.output",
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
    "reports.page.gate_table": "reports.page.tables",
    "reports.page.limits": "reports.page.remarks",
    "reports.page.links": "reports.page.findings",
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
            return ModuleSpec(fullname, _Alias(f"kvaudit.{MOVED[name]}"), is_package=name in _FORMER_PACKAGES)
        if (refusal := removed_import(fullname)) is not None:
            raise ModuleNotFoundError(refusal, name=fullname)
        return ModuleSpec(fullname, _Alias(""), is_package=True) if name in _FORMER_PACKAGES else None


class _Alias(Loader):
    """A loader that imports a module from its new path and makes it known under the old path too.

    Without a new path it makes an empty package.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        if self._path:
            warnings.warn(f"{module.__name__} is now {self._path}", DeprecationWarning, stacklevel=2)
            today = sys.modules[module.__name__] = import_module(self._path)
            if hasattr(module, "__path__"):  # a former package: without a path its modules could not be imported
                today.__path__ = []


def install() -> None:
    """Install the import finder of former module paths after all others, so that other imports do not become slower."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
