"""One training step on a real tiny model: it moves towards reward, resumes to the bit, and refuses what it must."""

from pathlib import Path

import msgspec
import pytest
import torch

from keepgrad.errors import EngineError, TrainError
from keepgrad.policy.engine import Engine
from keepgrad.records import Draft, Sample
from keepgrad.train import batch
from keepgrad.train.worker import Worker
from tests.policy.test_engine import SPEC, make, samples


def _sampled(folder: Path, **train: object) -> tuple[Worker, str, list[Sample], Path]:
    config, store, base = make(folder, **train)
    engine = Engine(config, store)
    engine.start()
    made = samples(engine, base.id, 12)
    engine.stop()
    return Worker(config, store), base.id, made, config.root / "scratch"


@pytest.mark.parametrize(
    "settings",
    [{}, {"adapt_from": "all"}, {"adapt_from": "all", "mode": "full", "lr": 0.003}, {"adapt_from": "all", "layers": 0}, {"kl_weight": 0.1}],
    ids=["last", "all", "full", "every-layer", "kl"],
)
def test_first_minibatch_is_on_policy_and_the_step_moves(tmp_path: Path, settings: dict[str, object]) -> None:
    """Sampler and trainer agree on every token: in float32 the ratio of the first minibatch is 1 to 1e-4; settled lines come after."""
    worker, base, made, scratch = _sampled(tmp_path, minibatch=12, settled_minibatch=4, **settings)
    version, health = worker.run(base, made, "w-1", SPEC, 3, scratch)
    assert health["steps"] == 1 + 3 and health["ratio_mean"] == pytest.approx(1.0, abs=1e-4) and health["ratio_sd"] < 1e-3
    again, second = worker.run(version.id, made, "w-2", SPEC, 3, scratch / "second")
    assert again.parent == version.id and again.id != version.id
    assert second["settled_logp"] > health["settled_logp"], "the developer's own line must have become likelier"
    assert second["ratio_sd"] > 1e-3


@pytest.mark.parametrize("at", [2, 4], ids=["among-drafts", "among-settled-lines"])
def test_same_input_same_version_and_resumed_is_the_same(tmp_path: Path, at: int) -> None:
    worker, base, made, scratch = _sampled(tmp_path, settled_minibatch=6)
    whole, health = worker.run(base, made, "w-1", SPEC, 5, scratch / "a")

    class Killed(Exception):
        pass

    def die(done: int, total: int) -> None:
        assert total == 3 + 2
        if done == at:
            raise Killed

    with pytest.raises(Killed):
        worker.run(base, made, "w-1", SPEC, 5, scratch / "b", progress=die)
    resumed, resumed_health = Worker(worker._config, worker._store).run(base, made, "w-1", SPEC, 5, scratch / "b")
    assert resumed.id == whole.id
    assert {k: v for k, v in resumed_health.items() if k != "seconds"} == {k: v for k, v in health.items() if k != "seconds"}


def test_a_candidate_drafts_anew_under_a_version_that_does_not_stay(tmp_path: Path) -> None:
    worker, base, made, scratch = _sampled(tmp_path, coverage=0.5)
    made = [*made, *(msgspec.structs.replace(one, generation=f"{one.generation}-{turn}") for turn in range(3) for one in made)]
    asked: list[str] = []

    def redraft(version: str) -> dict[str, Draft]:
        asked.append(version)
        worker._store.verify(version)
        return {
            one.generation: Draft(version, [3], [-0.1], [1], [[0.0] * len(one.features[0])], "show", 0.0, 1.0, 1, "x", "stop")
            for one in made
        }

    plain, _ = worker.run(base, made, "w-1", SPEC, 0, scratch / "a")
    moved, _ = worker.run(base, made, "w-1", SPEC, 0, scratch / "b", redraft=redraft)
    assert asked == [plain.id] and moved.id != plain.id
    assert [version.id for version in worker._store.list()] == [base, moved.id]

    def gone(version: str) -> dict[str, Draft]:
        raise EngineError("the engine is away")

    with pytest.raises(EngineError):
        worker.run(base, made, "w-2", SPEC, 0, scratch / "c", redraft=gone)
    assert [version.id for version in worker._store.list()] == [base, moved.id], "nothing is left of a candidate that did not come to be"


def test_reward_moves_probability(tmp_path: Path) -> None:
    worker, base, made, scratch = _sampled(tmp_path, settled_weight=0.0, minibatch=12, lr=0.01)
    for turn in range(4):
        version, _ = worker.run(base, made, f"w-{turn}", SPEC, turn, scratch / str(turn))
        base = version.id
    model = worker._trainable(base, 0)
    gains = []
    for at, sample in enumerate(made):
        (rows,) = batch.rows(made, [at], False, 12)
        with torch.no_grad():
            logp, _ = worker._logps(model, rows)
        gains.append((sample.reward, float((logp - rows.behaviour)[rows.learned].sum())))
    good = [gain for reward, gain in gains if reward > 0]
    bad = [gain for reward, gain in gains if reward < 0]
    assert sum(good) / len(good) > sum(bad) / len(bad)


def test_packed_and_cached_logps_agree(tmp_path: Path) -> None:
    """Two ways to the same numbers: packing whole sequences, and the base's KV with adapters that act nowhere."""
    worker, base, made, _ = _sampled(tmp_path)
    model = worker._trainable(base, 0)  # a fresh adapter is the identity
    for rows in (*batch.rows(made, range(len(made)), False, 12), *batch.rows(made, range(len(made)), True, 12)):
        with torch.no_grad():
            cached, packed = worker._from_last(model, rows), worker._packed(model, rows)
        assert torch.allclose(cached, packed, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    worker, base, made, scratch = _sampled(tmp_path)
    with pytest.raises(TrainError, match="no sample"):
        worker.run(base, [], "w-1", SPEC, 0, scratch / "0")
    short = msgspec.structs.replace(made[0], logprobs=made[0].logprobs[:-1] if len(made[0].logprobs) > 1 else [])
    with pytest.raises(TrainError, match=f"generation {made[0].generation}"):
        worker.run(base, [short, *made[1:]], "w-1", SPEC, 0, scratch / "1")
    broken = msgspec.structs.replace(made[0], advantages=[float("nan")] * len(made[0].advantages))
    with pytest.raises(TrainError, match="loss of minibatch"):
        worker.run(base, [broken, *made[1:]], "w-1", SPEC, 0, scratch / "2")
    assert worker._store.list()[-1].id == base, "nothing was published and the parent is as it was"
