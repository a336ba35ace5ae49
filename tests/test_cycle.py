"""The cycle in this process, over real engine and gateway processes: promotion, the ways to end without one, and what each leaves."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepgrad import cycle
from keepgrad.config import Config, dump
from keepgrad.errors import ConfigError, KeepgradError, LedgerError
from keepgrad.ledger import Ledger
from keepgrad.policy import model
from keepgrad.records import Traffic
from keepgrad.release import suite
from tests import loop


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[loop.Place]:
    folder = tmp_path_factory.mktemp("loop")
    with loop.place(folder, model.make_tiny(folder / "model")) as made:
        yield made


def changed(config: Config, part: str, **fields: Any) -> Config:
    """The configuration with some fields of one part replaced."""
    return msgspec.structs.replace(config, **{part: msgspec.structs.replace(getattr(config, part), **fields)})


def test_a_cycle_promotes_a_candidate_that_is_no_worse(place: loop.Place) -> None:
    ledger, before = place.site.ledger, place.site.ledger.traffic()
    heard: list[Any] = []
    rows = cycle.run(place.site.config, 1, heard.append)
    assert heard == rows
    assert rows[0]["decision"] == "promoted", rows[0]["reason"]
    assert list(rows[0]["seconds"]) == list(cycle.STEPS)
    candidate, now = rows[0]["version"], ledger.traffic()
    assert before and now
    assert (now.incumbent, now.previous, now.canary, now.force) == (candidate, before.incumbent, "", False)
    assert ledger.lineage(candidate) == [candidate, place.site.base]
    window = ledger.windows()[0]
    rewarded = {found.generation for found in ledger.scores(window.id) if found.place == "rewarded"}
    assert ledger.trained(candidate) == rewarded
    assert [verdict.stage for verdict in ledger.verdicts()][0] == "gate"
    assert not (place.site.config.root / "scratch" / rows[0]["cycle"]).exists()
    status = cycle.status(place.site.config)
    assert (status["cycle"], status["stage"], status["running"]) == ("", "idle", False)
    assert status["cycles"] == rows


def test_a_gate_that_fails_leaves_everything_as_it_was_and_its_samples_are_used_again(place: loop.Place) -> None:
    ledger, before = place.site.ledger, place.site.ledger.traffic()
    file = place.site.config.root / cycle.SUITE
    good = file.read_bytes()
    suite.save([msgspec.structs.replace(one, truth="nobody says this") for one in suite.load(file)], file)
    try:
        rejected = cycle.run(place.site.config, 1)[0]
    finally:
        file.write_bytes(good)
    assert rejected["decision"] == "rejected"
    assert "nothing accepted" in rejected["reason"]
    assert "canary" not in rejected["seconds"]
    assert ledger.traffic() == before
    next_one = cycle.run(place.site.config, 1)[0]
    assert ledger.versions()[-1].parent == before.incumbent if before else False
    assert ledger.trained(rejected["version"]) <= ledger.trained(next_one["version"])


def test_traffic_set_by_hand_during_the_canary_stays(place: loop.Place) -> None:
    ledger = place.site.ledger
    # A canary that never has enough opportunities, so that there is time to end it by hand.
    config = changed(place.site.config, "release", canary_min=10_000, canary_max=20_000)
    rows: list[Any] = []
    runner = threading.Thread(target=lambda: rows.extend(cycle.run(config, 1)))
    runner.start()
    loop.wait_until(lambda: (traffic := ledger.traffic()) and traffic.canary)
    now = ledger.traffic()
    assert now
    by_hand = msgspec.structs.replace(
        now, canary="", canary_share=0.0, force=True, reason="the operator does not like it", at_ms=int(time.time() * 1000)
    )
    ledger.put_traffic(by_hand)
    runner.join(60)
    assert rows[0]["decision"] == "rejected"
    assert "set by hand" in rows[0]["reason"] and "does not like it" in rows[0]["reason"]
    assert ledger.traffic() == by_hand


@pytest.mark.parametrize(
    ("part", "fields", "stage", "sentence"),
    [
        ("cycle", {"window": 10**6, "collect_s": 0.5}, "collect", r"of 1000000 generations of v-\w+ came"),
        ("cycle", {"train_s": 0.01}, "train", "raise cycle.train_s"),
        ("cycle", {"gate_s": 0.0}, "gate", "raise cycle.gate_s"),
        ("cycle", {"canary_s": 0.0}, "canary", "raise cycle.canary_s"),
        ("release", {"gate_contexts": 4, "gate_min_contexts": 8}, "gate", "4 contexts and needs 8"),
        ("server", {"engine_port": 1}, "gate", "waiting for the engine"),
    ],
)
def test_what_a_step_cannot_do_ends_the_cycle_with_one_sentence(
    place: loop.Place, part: str, fields: dict[str, Any], stage: str, sentence: str
) -> None:
    before = place.site.ledger.traffic()
    config = changed(place.site.config, part, **fields)
    if part == "server":
        config = changed(changed(config, "cycle", gate_s=1.0), "train", redrafts=0)
    row = cycle.run(config, 1)[0]
    assert row["decision"] in ("rejected", "stopped")
    assert list(row["seconds"])[-2:] == [stage, "settle"]
    assert re.search(sentence, row["reason"]), row["reason"]
    assert "\n" not in row["reason"]
    after = place.site.ledger.traffic()
    assert before and after and (after.incumbent, after.canary) == (before.incumbent, "")


def test_an_interrupted_process_ends_at_once_and_resumes(place: loop.Place, tmp_path: Path) -> None:
    config = changed(place.site.config, "cycle", window=10**6)
    (tmp_path / "keepgrad.toml").write_text(dump(config))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "keepgrad", "cycle", "run", "--config", str(tmp_path / "keepgrad.toml")], env=environment
    )
    loop.wait_until(lambda: place.site.ledger.current_stage() == "collect")
    with pytest.raises(ConfigError, match="another process runs cycles"):
        cycle.run(place.site.config, 1)
    assert cycle.status(place.site.config)["running"] is True
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130  # a machine with other work may need seconds for what is instant otherwise
    row = cycle.resume(place.site.config)[0]
    assert row["decision"] in ("promoted", "rejected")
    assert cycle.resume(place.site.config) == []


def test_books_that_do_not_balance_stop_the_cycle(place: loop.Place) -> None:
    ledger = place.site.ledger
    first = max(window.last_seq for window in ledger.windows()) + 1
    loop.wait_until(lambda: ledger.last_seq() > first + 5)
    with sqlite3.connect(place.site.config.root / "ledger.sqlite", timeout=30) as raw:
        raw.execute("DROP TRIGGER generations_no_delete")
        raw.execute("DELETE FROM generations WHERE seq = ?", (first + 2,))
    row = cycle.run(place.site.config, 1)[0]
    assert row["decision"] == "stopped"
    assert "do not balance" in row["reason"]
    assert list(row["seconds"]) == ["collect", "score", "audit", "settle"]
    assert ledger.versions()[-1].window != row["counts"]["collect"]["window"]


def test_without_traffic_there_is_nothing_to_run(tmp_path: Path) -> None:
    config = changed(Config(), "server", data=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="keepgrad init"):
        cycle.run(config, 1)
    assert cycle.status(config)["cycles"] == []


def test_a_ledger_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    config = changed(changed(Config(), "server", data=str(tmp_path / "data")), "cycle", collect_s=0.0)
    traffic = Traffic("v-a", "v-a", "", 0.0, "", 0.0, False, "test", 1)
    ledger = Ledger.open(config.root)
    ledger.put_traffic(traffic)
    ledger.close()
    assert cycle.run(config, 1)[0]["decision"] == "stopped"
    for file in config.root.glob("ledger.sqlite*"):
        file.unlink()
    ledger = Ledger.open(config.root)
    ledger.put_traffic(traffic)
    ledger.close()
    with pytest.raises(LedgerError, match="dbos.sqlite"):
        cycle.run(config, 1)


def test_a_budget_counts_seconds() -> None:
    stop = threading.Event()
    budget = cycle.Budget("gate", 0.0, stop)
    time.sleep(0.01)
    with pytest.raises(KeepgradError, match="gate was not done within its budget of 0 s"):
        budget.check()
    stop.set()
    with pytest.raises(cycle.Interrupted):
        cycle.Budget("gate", 10.0, stop).check()
