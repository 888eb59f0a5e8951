"""Check a spec against its model, data and engines before a run folder is made for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import NamedTuple

from transformers.utils.logging import disable_progress_bar

from kvaudit.audit.engines import ENGINES, Condition
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.engine_slot import FIRST_TOKENS, OnFirstAnswer, try_out_engines, try_rollout_engine
from kvaudit.audit.runs.evaluate import (
    Batches,
    Evaluator,
    cache_policies,
    make_items,
    prompt_token_count,
    served_policies,
    suite_as_asked,
)
from kvaudit.audit.sampling.checkpoints import check_comparable, holds_same_weights, load_model_or_adapter
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, locate
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training.adapters import check_adapter
from kvaudit.audit.training.engine_rollouts import check_rollout_engine
from kvaudit.audit.training.footprint import check_memory
from kvaudit.audit.training.rewards.base import parse_reward
from kvaudit.audit.training.sft import check_reward_on_gold, gold_rollout
from kvaudit.core.errors import SpecError
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.provenance import ROWS, Digests, check_inputs
from kvaudit.core.records import Item
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import TrainSpec
from kvaudit.suites.base import SUITES
from kvaudit.suites.sources import collect_file_hashes


class Prepared(NamedTuple):
    """The base model, the items made with its tokenizer, and the sha256 of every file of public rows."""

    model: LoadedModel
    batches: Batches
    rows: Digests


def prepare_run(
    spec: RunSpec,
    *,
    trains: bool = True,
    on_first_answer: OnFirstAnswer | None = None,
    began_with: Digests | None = None,
) -> Prepared:
    """Load the base model and make the items; raise an error for anything that is wrong with the spec.

    ``trains`` is False if nothing is left to train, so that only the memory for an evaluation is required.
    ``on_first_answer`` is called with the beginning of an answer under every serving configuration. If a run is
    resumed, ``began_with`` has the sha256 of each file of public rows with which it began.
    """
    if trains:
        check_ranks(spec)
    disable_progress_bar()
    model = load_model_or_adapter(spec.model_path, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    check_contexts(spec, model)
    for arm, checkpoints in spec.checkpoints.items():
        for seed in checkpoints.seeds:
            check_comparable(str(spec.external_source(arm, seed)), model)
        check_seeds_differ(arm, {seed: str(spec.external_source(arm, seed)) for seed in checkpoints.seeds})
    batches: Batches = {}
    with collect_file_hashes() as rows, _explain_changed_rows(began_with or {}, rows):
        check_training(spec, model)
        if spec.train is not None and trains:
            check_memory(spec.train, model)
            check_rollout_engine(spec.train, model, spec.engine(spec.train.rollouts or ""))
            check_reward(spec.train, model)
        Evaluator(model, spec, batches).prepare()
    check_engines(spec, batches)
    if spec.train is not None and trains:
        try_rollout_engine(spec, spec.train, model)
    item = next((item for suite_batches in batches.values() for batch in suite_batches for item in batch), None)
    if item is not None:
        if on_first_answer is not None:  # before an engine converts weights, which may take minutes
            _show_first_answers(model, spec, item, on_first_answer)
        check_windows(spec, try_out_engines(_conditions(spec), model, spec, item, on_first_answer))
    return Prepared(model, batches, rows)


def check_ranks(spec: RunSpec) -> None:
    """Raise SpecError for a spec that asks for several processes per training, which earlier versions had."""
    if spec.train is not None and spec.train.ranks > 1:
        raise SpecError(
            f"train.ranks is {spec.train.ranks}, but one process trains each unit now; leave it out (a run that has "
            "begun with it is started over with another --out), or train in TRL with "
            "kvaudit.trl.AuditedGRPOTrainer under accelerate launch"
        )


@contextmanager
def _explain_changed_rows(began_with: Digests, rows: Digests) -> Iterator[None]:
    """If files of public rows have changed, turn a SpecError of the body into a RunError that names these files."""
    try:
        yield
    except SpecError:  # such as too few rows, of which the spec is innocent if there were enough before
        in_both = rows.keys() & began_with.keys()
        check_inputs(
            f"{ROWS} under KVAUDIT_DATA",
            {name: began_with[name] for name in in_both},
            {name: rows[name] for name in in_both},
        )
        raise


def _conditions(spec: RunSpec) -> list[Condition]:
    return [policy for policy in served_policies(spec) if isinstance(policy, Condition)]


def _show_first_answers(model: LoadedModel, spec: RunSpec, item: Item, on_answer: OnFirstAnswer) -> None:
    """Pass the beginning of an answer under each policy of kvaudit's own cache to ``on_answer``.

    If engines serve all units, pass an uncompressed answer.
    """
    for policy in cache_policies(spec) or [parse_policy(DENSE_POLICY)]:
        suite = suite_as_asked(spec, item.suite)
        (row,) = play(Sampler(model, policy), [(suite, item)], Decoding(FIRST_TOKENS, temperature=0.0), [0])
        on_answer(policy.canonical, item, row.transcript[len(item.messages)].content)


def check_seeds_differ(arm: str, sources: Mapping[int, str]) -> None:
    """Raise SpecError if two seeds of an arm have the same weights: one training run is no evidence about a recipe."""
    folders = {seed: locate(source) for seed, source in sources.items()}
    alike = {
        seed
        for pair in combinations(folders, 2)
        if holds_same_weights(*map(folders.__getitem__, pair))
        for seed in pair
    }
    if alike:
        raise SpecError(
            f"checkpoints.{arm}: seeds {', '.join(map(str, sorted(alike)))} have the same weights, wanted those of "
            "another training run for each seed; name the folder of each run, or give the one run as a single seed "
            "(a reference as seed 0 serves all seeds of the others)"
        )


def check_contexts(spec: RunSpec, model: LoadedModel) -> None:
    """Raise SpecError if a context length of the spec and an answer together exceed the model's positions."""
    grid = spec.evaluate
    lengths = [("evaluate", suite, context) for suite in grid.suites for context in grid.contexts_of(suite)]
    if spec.train is not None:
        trained = [suite for suite in _training_suites(spec.train) if SUITES.get(suite).lengths != "none"]
        lengths += [("train", suite, spec.train.context_tokens) for suite in trained]
    for section, name, context in lengths:
        suite = SUITES.get(name)() if section == "train" else suite_as_asked(spec, name)
        positions = context + suite.max_new_tokens
        if positions > model.max_positions:
            raise SpecError(
                f"{section}.context_tokens {context} and an answer of suite {name} need {positions} positions, "
                f"model {model.name!r} has {model.max_positions}; lower context_tokens"
            )


def check_windows(spec: RunSpec, windows: Mapping[str, int]) -> None:
    """Raise SpecError if an engine's context window is shorter than the spec's longest prompt and answer.

    ``windows`` holds the windows in tokens, by engine with its settings (condition).
    """
    suites = [suite_as_asked(spec, name) for name in spec.evaluate.suites]
    tokens = max(max(spec.evaluate.contexts_of(suite.name)) + suite.max_new_tokens for suite in suites)
    for condition, window in windows.items():
        if window < tokens:
            others = ", ".join(f"{other} {size}" for other, size in windows.items() if other != condition)
            raise SpecError(
                f"{condition} has a context window of {window} tokens{f' ({others})' if others else ''}, and a prompt "
                f"with its answer takes {tokens}; serve all with a window as long, or lower context_tokens"
            )


def _training_suites(section: TrainSpec) -> tuple[str, ...]:
    """Return the suites used in training, including those of the validation."""
    return tuple(dict.fromkeys((*section.suites, *section.validation_suites)))


def check_training(spec: RunSpec, model: LoadedModel) -> None:
    """Make the first items of every suite used in training, so that errors of training show before the run begins.

    Also raises an error for an adapter that does not fit the model, and for right answers that its chat template
    rejects.
    """
    if spec.train is not None:
        check_adapter(model.model, spec.train.adapter)
        for name in _training_suites(spec.train):
            context, suite, seed = spec.train.context_tokens, SUITES.get(name)(), spec.train.seeds[0]
            number = suite.item_count("train", spec.train.prompts_per_step, seed)
            for item in make_items("train", suite, "train", number, seed, context, model.chat.count_tokens):
                prompt_token_count(model, item)
                if spec.train.sft is not None and name in spec.train.suites:
                    gold_rollout(model, suite, item)


def check_reward(section: TrainSpec, model: LoadedModel) -> None:
    """Score one correct answer per suite, so that an error of the reward shows before the run begins.

    Such errors are a missing file, module or key, or an invalid number. An endpoint receives one request per suite.
    """
    reward = parse_reward(section.reward, section.suites)
    reward.check()
    if not reward.uses_grade_only:
        suites = [SUITES.get(name)() for name in reward.reward_suites]
        request = (1, section.seeds[0], section.context_tokens, model.chat.count_tokens)
        check_reward_on_gold(
            reward, [(suite, make_items("train", suite, "train", *request)[0]) for suite in suites], model
        )


def check_engines(spec: RunSpec, batches: Batches) -> None:
    """Raise SpecError for an engine that is not installed, or a suite in ``batches`` that engines cannot answer."""
    conditions = _conditions(spec)
    for condition in conditions:
        ENGINES.get(condition.engine).check(dict(condition.settings), spec.engine(condition.canonical))
    for (name, _), suite_batches in batches.items() if conditions else ():
        suite = suite_as_asked(spec, name)
        if any(suite.options(item) for batch in suite_batches for item in batch):
            raise SpecError(
                f"suite {name} scores given answers by their likelihood, which engine {conditions[0].engine} is not "
                "used for: one pass over them never reads the compressed cache; leave the suite out, or serve it in "
                "another run under kvaudit's own policies"
            )
