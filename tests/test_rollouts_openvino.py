"""Training on rollouts that OpenVINO draws: what it stored, to the bit; the pass that replays it; weights each step."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_world import World, world
from training_world import config, rows, sha256, silent

from kvaudit.audit.cache.engine_store import BLOCK, ByChannel, ByToken
from kvaudit.audit.engines import ENGINES, parse_condition
from kvaudit.audit.engines.base import Drawer, DrawnRollout, EngineContext, EngineFailed, turn_seed
from kvaudit.audit.engines.inside.worker import arrays_sha256
from kvaudit.audit.engines.rollouts import ExchangeFolder, WorkerDrawer, model_weights
from kvaudit.audit.training import grpo
from kvaudit.audit.training.adapters import load_trained_adapter
from kvaudit.audit.training.engine_rollouts import EngineUse, engine_rollout
from kvaudit.audit.training.learner import read_tokens
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.records import Role
from kvaudit.core.spec_evaluate import EngineSpec

pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")

U8, U4, F32 = (f"openvino:KV_CACHE_PRECISION={word}" for word in ("u8", "u4", "f32"))
GIB = 0.01  # of a cache for a few rows


@pytest.fixture(scope="module")
def here() -> World:
    return world()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("openvino")
        patch.setenv("KVAUDIT_CACHE", str(place))
        yield place


def start_drawer(here: World, condition: str, folder: Path) -> Drawer:
    found = parse_condition(f"{condition},cache_size={GIB}")
    context = EngineContext(here.model, EngineSpec(), folder / "log", 1)
    return ENGINES.get("openvino").drawer(dict(found.settings), context)


def draw_rollouts(here: World, condition: str, folder: Path, heat: float = 0.0) -> list[DrawnRollout]:
    drawer = start_drawer(here, condition, folder)
    try:
        return drawer.draw([one._replace(temperature=heat) for one in here.asked], keep=9)
    finally:
        drawer.stop()


def _converted(here: World) -> Path:
    from kvaudit.audit.engines.exports.openvino import OPENVINO_METHOD, export_openvino
    from kvaudit.audit.engines.weights import convert_checkpoint

    network = here.model.model
    return convert_checkpoint("openvino", here.model, OPENVINO_METHOD, lambda path: export_openvino(network, path)).path


# --- what the engine says and stores ----------------------------------------------------------------------------------


def test_uncompressed_rollouts_equal_those_of_our_own_cache(here: World, tmp_path: Path) -> None:
    found = draw_rollouts(here, F32, tmp_path)
    assert [one.ids for one in found] == [own.ids for own in here.own]
    for one, own in zip(found, here.own, strict=True):
        assert one.logprobs == pytest.approx(own.logprobs, abs=1e-4)  # float32, another order of sums


def test_drawn_tokens_are_those_that_the_engine_serves(here: World, tmp_path: Path) -> None:
    with here.start(U8, tmp_path) as session:
        served = session.answer(here.asked)
    found = draw_rollouts(here, U8, tmp_path)
    assert [one.ids for one in found] == [one.ids for one in served]
    assert [sum(one.logprobs) for one in found] == pytest.approx([one.logprob for one in served], abs=1e-3)


def test_draws_follow_the_seed_and_the_temperature(here: World, tmp_path: Path) -> None:
    hot, again, cool = (draw_rollouts(here, F32, tmp_path, heat) for heat in (1.5, 1.5, 0.5))
    assert [one.ids for one in hot] == [one.ids for one in again] != [one.ids for one in cool]


class Stored(NamedTuple):
    """What lies in the engine's cache for one row [tokens, D], of one layer and head."""

    keys: np.ndarray
    values: np.ndarray


def _numbers(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a byte each, or two in a byte, the first in its upper half."""
    if bits == 8:
        return codes.astype(np.float32)
    return np.stack([codes >> 4, codes & 15], -1).reshape(*codes.shape[:-1], -1).astype(np.float32)


def _read(store: np.ndarray, blocks: list[int], bits: int, heads: int, size: int, *, keys: bool) -> np.ndarray:
    """Entries [tokens, D] of the first head in blocks, scale and zero before the codes of a block, or of a token."""
    found = []
    for block in blocks:
        own = store[block].reshape(heads, -1)[0]
        parts = own if keys else own.reshape(BLOCK, -1)
        width = 4 * size if keys else 4
        scale, zero = (parts[..., n * width : (n + 1) * width].copy().view(np.float32) for n in (0, 1))
        codes = parts[..., 2 * width :]
        found.append((_numbers(codes.reshape(BLOCK, -1), bits) - zero) * scale)
    return np.concatenate(found)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_cache_holds_what_the_store_says_to_the_last_bit(here: World, bits: int) -> None:
    from kvaudit.audit.engines.inside import openvino_rollouts_inside as inside

    settings = {"KV_CACHE_PRECISION": f"u{bits}", "INFERENCE_PRECISION_HINT": "f32", "cache_size": GIB}
    told = {"settings": settings, "folder": str(_converted(here)), "device": "CPU", "threads": 1, "at_once": 8}
    served: Any = inside.start(told)[1].__self__
    asked = [{**one._asdict(), "messages": None, "temperature": 1.0, "keep": "yes"} for one in here.asked]
    drawing = [inside._Row(row) for row in asked]
    served._draw(drawing)
    text = here.model.model.config
    heads, size = text.num_key_value_heads, text.head_dim
    for row in drawing:
        seen, prompt = len(row.kept), len(row.request["ids"])
        wrote = [torch.from_numpy(np.stack([one[which] for one in row.kept]))[:, 1, :size] for which in (0, 1)]
        keys, values = (
            _read(served._stores[2 + which], row.blocks, bits, heads, size, keys=not which)[:seen] for which in (0, 1)
        )
        assert np.array_equal(values, ByToken(bits).read_back(wrote[1]).numpy())
        blocks = torch.nn.functional.pad(wrote[0], (0, 0, 0, -seen % BLOCK)).reshape(1, 1, -1, BLOCK, size)
        at = torch.arange(blocks.shape[2] * BLOCK).reshape(1, -1, BLOCK)
        later = ByChannel(bits).read_in_order(blocks, at < prompt, at < seen).later
        assert np.array_equal(keys, later.reshape(-1, size)[:seen].numpy())


@pytest.mark.parametrize(
    "setting",
    [
        "KEY_CACHE_PRECISION=u8,VALUE_CACHE_PRECISION=u4",
        "KEY_CACHE_PRECISION=u4,VALUE_CACHE_PRECISION=u8",
        "KV_CACHE_PRECISION=u4,VALUE_CACHE_GROUP_SIZE=16",
        "KV_CACHE_PRECISION=f16",
    ],
)
def test_every_store_that_is_known_replays(here: World, tmp_path: Path, setting: str) -> None:
    found = draw_rollouts(here, f"openvino:{setting}", tmp_path, 1.0)
    store = ENGINES.get("openvino").store(dict(parse_condition(f"openvino:{setting}").settings))
    pairs = zip(here.asked, found, strict=True)
    rollouts = [engine_rollout(here.model.model.config, asked.ids, one, store) for asked, one in pairs]
    said = torch.cat([one.sampler_logprobs[one.sampled] for one in rollouts])
    with torch.no_grad():
        replayed = read_tokens(here.model.model, rollouts, 1, "shadow", 1.0).logprobs - said
        dense = read_tokens(here.model.model, rollouts, 1, "dense", 1.0).logprobs - said
    assert float(replayed.abs().max()) < 2e-5
    assert float(replayed.norm() / dense.norm()) < 0.1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("KV_CACHE_PRECISON=u4", "^engine openvino refuses: ValueError: device CPU has no property KV_CACHE_PRECISON$"),
        ("KV_CACHE_PRECISION=u4,KEY_CACHE_QUANT_MODE=BY_HEAD", "Expected AUTO/BY_CHANNEL/BY_TOKEN"),
    ],
)
def test_a_bad_property_is_refused_for_drawing_and_for_serving(
    here: World, tmp_path: Path, setting: str, words: str
) -> None:
    for start in (start_drawer, lambda *given: given[0].start(given[1], given[2])):
        with pytest.raises(EngineFailed, match=words):
            start(here, f"openvino:{setting}", tmp_path)


def test_a_property_that_the_device_does_not_list_can_be_set(here: World, tmp_path: Path) -> None:
    by_token = f"{U4},KEY_CACHE_QUANT_MODE=BY_TOKEN"
    with here.start(by_token, tmp_path) as session:
        served = session.answer(here.asked)
    found = draw_rollouts(here, by_token, tmp_path)
    assert [one.ids for one in found] == [one.ids for one in served]
    assert [sum(one.logprobs) for one in found] == pytest.approx([one.logprob for one in served], abs=1e-3)


# --- training ---------------------------------------------------------------------------------------------------------


def settings(**options: Any) -> Any:
    plain: dict[str, Any] = {"policy": "none", "rollouts": f"{U4},cache_size=0.05", "suites": ["refusal", "math"]}
    plain |= {
        "context_tokens": 100,
        "steps": 2,
        "learning_rate": 1e-4,
        "ledger_every": 1,
        "save_every": 1,
        "temperature": 1.5,
    }
    return config(**(plain | options))


@pytest.fixture(scope="module")
def arms(here: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("arms")
    names = ("dense", "naive", "tis", "smd")
    steps = {"smd": 2}  # one more, whose rollouts are drawn with weights that were pushed
    return {arm: grpo.train(settings(arm=arm, steps=steps.get(arm, 1)), here.model, out / arm, silent) for arm in names}


def test_the_replay_explains_the_gap_and_the_dense_pass_does_not(arms: dict[str, Path]) -> None:
    for arm in ("naive", "tis", "smd"):
        for row in rows(arms[arm]):
            assert row["engine/dense_rms"] > 1e-3
            assert row["engine/replay_rms"] < 2e-5
            assert row["engine/explained"] > 0.99


def test_only_smd_learns_from_what_was_sampled(arms: dict[str, Path]) -> None:
    gaps = {arm: max(row["mismatch/max_abs_gap"] for row in rows(folder)) for arm, folder in arms.items()}
    assert gaps["smd"] < 1e-4 > gaps["dense"]
    assert gaps["naive"] > 1e-3 < gaps["tis"]


def test_every_arm_is_asked_the_same_and_ends_elsewhere(arms: dict[str, Path]) -> None:
    assert len({sha256(folder / "model.safetensors") for folder in arms.values()}) == len(arms)
    assert len({row["prompt_tokens_mean"] for folder in arms.values() for row in rows(folder)[:1]}) == 1


def _without(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("seconds_")}


def is_same_run(one: Path, other: Path) -> bool:
    same_rows = list(map(_without, rows(one))) == list(map(_without, rows(other)))
    return same_rows and sha256(one / "model.safetensors") == sha256(other / "model.safetensors")


def test_an_engine_on_stale_weights_stops_the_step_and_the_run_goes_on(
    here: World, arms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = WorkerDrawer.push

    def lost(self: WorkerDrawer, weights: Any) -> None:
        """A push that the engine never hears of, from the second step on."""
        if self._pushed and self.pushes:
            self._pushed = arrays_sha256({name: tensor.detach().numpy() for name, tensor in weights.items()})
        else:
            push(self, weights)
        self.pushes = True

    monkeypatch.setattr(WorkerDrawer, "pushes", False, raising=False)
    monkeypatch.setattr(WorkerDrawer, "push", lost)
    with pytest.raises(
        RunError, match=r"^engine openvino drew with weights '\w{12}', the learner has \w{12}: "
    ) as error:
        grpo.train(settings(arm="smd"), here.model, tmp_path / "smd", silent)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert is_same_run(grpo.train(settings(arm="smd"), here.model, tmp_path / "smd", silent), arms["smd"])


def test_log_probs_of_an_engine_that_differ_from_the_replay_stop_the_step(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = WorkerDrawer.draw

    def otherwise(self: WorkerDrawer, asked: Any, *, keep: int) -> list[DrawnRollout]:
        assert keep == 1, "one rollout tells"
        found = draw(self, asked, keep=keep)
        return [one._replace(logprobs=tuple(value - 0.01 for value in one.logprobs)) for one in found]

    monkeypatch.setattr(WorkerDrawer, "draw", otherwise)
    with pytest.raises(
        RunError, match=r"by 0\.01 nats a token, at most 0\.005 is allowed: the engine samples from stale"
    ):
        grpo.train(settings(arm="tis", ledger_every=0), here.model, tmp_path / "tis", silent)


def test_an_engine_that_dies_is_started_again(
    here: World, arms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, deaths = WorkerDrawer.draw, list[int]()

    def dying(self: WorkerDrawer, asked: Any, *, keep: int) -> list[DrawnRollout]:
        if len(deaths) < 2:
            deaths.append(1)
            self._session._process.stop()
        return draw(self, asked, keep=keep)

    monkeypatch.setattr(WorkerDrawer, "draw", dying)
    assert is_same_run(grpo.train(settings(arm="smd"), here.model, tmp_path / "smd", silent), arms["smd"])


KILLED = """
import os, signal, sys
from pathlib import Path
from kvaudit.audit.engines.rollouts import ExchangeFolder
folder = ExchangeFolder(Path(sys.argv[1]))
(folder.path / "weights.npz").write_bytes(b"of the killed")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_removes_the_folder_of_a_killed_run_and_not_that_of_a_living_one(
    here: World, tmp_path: Path
) -> None:
    living = ExchangeFolder(place := tmp_path / "run" / "logs" / "engines")
    (living.path / "weights.npz").write_bytes(b"of another")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(place)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = set(place.glob("kvaudit-rollouts-*")) - {living.path}
    assert (left / "weights.npz").exists()
    plain = settings(arm="naive", steps=1, ledger_every=0)
    grpo.train(plain, here.model, tmp_path / "naive", silent, run_folder=tmp_path / "run")
    assert set(place.glob("kvaudit-rollouts-*")) == {living.path}
    assert (living.path / "weights.npz").read_bytes() == b"of another"
    living.remove()
    assert not living.path.exists()


def test_an_engine_that_dies_again_and_again_is_one_line(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise EngineFailed("engine openvino is gone: it ended")

    monkeypatch.setattr(WorkerDrawer, "draw", gone)
    with pytest.raises(RunError, match=r"^engine openvino is gone: it ended; saved work is kept: start the run again$"):
        grpo.train(settings(arm="tis"), here.model, tmp_path / "tis", silent)


def test_an_adapter_is_merged_into_the_weights_that_the_engine_draws_with(here: World, tmp_path: Path) -> None:
    lora = settings(arm="smd", adapter={"rank": 4}, learning_rate=1e-2)
    first = rows(grpo.train(lora, here.model, tmp_path / "smd", silent))
    learnt = load_trained_adapter(here.model, lora.adapter, tmp_path / "smd")
    once = settings(arm="smd", adapter={"rank": 4}, learning_rate=1e-2, steps=1)
    # an arm that begins from an adapter that has learnt: the engine is started on the weights beside it
    further = rows(grpo.train(once, learnt, tmp_path / "further", silent))
    for row in (*first, *further):
        assert row["engine/replay_rms"] < 2e-5
        assert row["engine/dense_rms"] > 1e-3
    assert _distance_from(here, learnt, tmp_path) > 1e-2, "of the weights beside it alone"


def _distance_from(here: World, learnt: Any, folder: Path) -> float:
    """How far an engine with the weights of ``here`` is from what was learnt, root mean square in nats a token."""
    found = draw_rollouts(here, F32, folder, 1.0)
    pairs = zip(here.asked, found, strict=True)
    rollouts = [engine_rollout(here.model.model.config, asked.ids, one) for asked, one in pairs]
    said = torch.cat([one.sampler_logprobs[one.sampled] for one in rollouts])
    with torch.no_grad():
        return float((read_tokens(learnt.model, rollouts, 1, "dense", 1.0).logprobs - said).square().mean().sqrt())


def test_conversations_go_on_turn_after_turn_and_the_dense_pass_finds_every_drawn_token_again(
    here: World, tmp_path: Path
) -> None:
    agents: dict[str, Any] = {"suites": ["agent", "refusal"], "rollouts": f"{F32},cache_size=0.05", "steps": 1}
    told = settings(arm="naive", context_tokens=300, **agents)
    run = grpo.TrainingRun(told, here.model, tmp_path)
    try:
        row, sampled = run.step(0)
    finally:
        run.sampler.close()
    # uncompressed and in float32: nothing but rounding lies between the two, if places and tokens are right
    assert row["engine/dense_rms"] < 2e-5
    talks = [one for one in sampled.graded_rows if one.item.suite == "agent"]
    turns = [_count_drawn_runs(one.rollout.sampled.tolist()) for one in talks]
    assert max(turns) > 1
    for one, parts in zip(talks, turns, strict=True):
        answers = [message for message in one.transcript if message.role is Role.ASSISTANT]
        assert parts == len(answers) - sum(m.role is Role.ASSISTANT for m in one.item.messages)
        assert one.rollout.sampled[one.rollout.answer_start]
        assert not one.rollout.sampled[one.rollout.answer_start - 1]
        assert int(one.rollout.sampled.sum()) == one.new_tokens


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["smd", "tis"])
def test_every_turn_is_replayed_as_the_engine_read_it(here: World, tmp_path: Path, arm: str) -> None:
    agents: dict[str, Any] = {"suites": ["agent", "refusal"], "rollouts": f"{U4},cache_size=0.05", "steps": 2}
    told = settings(arm=arm, context_tokens=300, **agents)
    found = rows(grpo.train(told, here.model, tmp_path, silent))
    assert [row["engine/replay_rms"] < 2e-5 for row in found] == [True, True]
    assert min(row["engine/dense_rms"] for row in found) > 1e-3


def test_an_earlier_turn_was_drawn_from_other_codes_than_a_later_one_reads(here: World, tmp_path: Path) -> None:
    told = settings(arm="smd", context_tokens=300, suites=["agent"], prompts_per_step=1, steps=1)
    run = grpo.TrainingRun(told, here.model, tmp_path)
    try:
        row, sampled = run.step(0)
    finally:
        run.sampler.close()
    assert row["engine/replay_rms"] < 2e-5, "every turn is replayed as the engine read it"
    assert row["engine/dense_rms"] > 1e-3
    talk = max((one.rollout for one in sampled.graded_rows), key=lambda rollout: len(rollout.turns))
    assert len(talk.turns) > 1
    assert sum(int(turn.sampled.sum()) for turn in talk.turns) == int(talk.sampled.sum())
    early, late = talk.turns[0], talk.turns[-1]
    assert torch.equal(late.ids[: len(early.ids)], early.ids)
    assert early.written is not None
    assert late.written is not None
    both = [turn.written[0][:, :, : early.prompt_length] for turn in (early, late) if turn.written]
    assert not torch.equal(*both), "beyond the first layer what is read in other codes is written otherwise"


def _count_drawn_runs(sampled: list[bool]) -> int:
    """How many runs of drawn tokens there are."""
    return sum(own and not before for before, own in pairwise([False, *sampled]))


def test_no_two_turns_are_drawn_by_the_same_numbers() -> None:
    seeds = [turn_seed(5, turn) for turn in range(4)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4


def test_weights_that_cannot_be_written_are_an_error_with_its_reason(tmp_path: Path) -> None:
    class Full(WorkerDrawer):
        def __init__(self) -> None:
            self._engine, self._exchange = "llama.cpp", ExchangeFolder(tmp_path)

        def _write(self, weights: Any) -> tuple[Path, str]:
            raise OSError("9 requested and 0 written")  # as numpy says it of a full disk

    full = Full()
    with pytest.raises(RunError, match=r"cannot be written into .* \(9 requested and 0 written\)"):
        full.push({})
    full._exchange.remove()


def test_an_engine_with_other_weights_than_the_learner_is_refused(here: World, tmp_path: Path) -> None:
    other = copy.deepcopy(here.model)
    with torch.no_grad():
        next(iter(model_weights(other.model).values())).mul_(1.5)
    use = EngineUse(EngineSpec(weights=str(_converted(here))))
    with pytest.raises(RunError, match=r"^engine openvino refuses: .* of the learner's \d+ weights match no constant"):
        grpo.train(settings(arm="tis"), other, tmp_path / "tis", silent, engine=use)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"rollouts": f"{U8},KEY_CACHE_GROUP_SIZE=16"},
            "is not known .no ledger, no quantiser.; use naive, tis or mis",
        ),
        (
            {"rollouts": f"{U8},max_num_batched_tokens=64"},
            "max_num_batched_tokens belongs to GenAI",
        ),
        ({"rollouts": "transformers:"}, "engine transformers cannot draw rollouts for training; use one of: llama.cpp"),
        (
            {"rollouts": "endpoint:base_url=http://localhost:8000/v1,model=m"},
            r"engine endpoint cannot draw rollouts for training \(servers have no common way to load new weights, so",
        ),
        (
            {"rollouts": "llama.cpp:type_k=q8_0", "minibatches": 2},
            "llama.cpp returns only what its queries read, .* later updates .2 per step. cannot be replayed",
        ),
        (
            {"rollouts": "llama.cpp:type_k=q8_0", "beta": 0.04},
            "llama.cpp returns only what its queries read.* so the reference model of 'beta' cannot be replayed",
        ),
    ],
)
def test_rollouts_that_smd_cannot_use_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        settings(arm="smd", **options)


def test_arm_tis_takes_settings_that_no_replay_knows() -> None:
    assert settings(arm="tis", rollouts=f"{U8},KEY_CACHE_GROUP_SIZE=16").store is None
