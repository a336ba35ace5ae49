"""The cycle is killed (SIGKILL) at random instants in each of its seven steps: it goes on, each step is done once, no sample twice (P4).

Engine and gateway keep serving meanwhile, eight users keep asking. A short step is hit within milliseconds of its beginning, a long one
anywhere in it.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from keepgrad import cycle
from keepgrad.audit import audit
from keepgrad.cycle import STEPS
from keepgrad.policy import model
from keepgrad.reward import spec
from tests import loop

KILLS_PER_STEP = 4
_PATIENCE_S = 600.0
_LONGEST_S = {"collect": 0.3, "score": 0.02, "audit": 0.02, "train": 1.0, "gate": 0.4, "canary": 0.5, "settle": 0.005}
"""About how long each step takes here; the kill comes at a random time within it."""
_AFTER = dict(itertools.pairwise(STEPS))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_cycle_goes_on_and_does_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each process is forked from one that has imported what a cycle needs, so that kills hit steps and not imports.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["keepgrad.cycle", "keepgrad.train.worker"])
    with loop.place(tmp_path, model.make_tiny(tmp_path / "model")) as place:
        kills = storm(place, forks)
        assert min(kills[step] for step in STEPS) >= KILLS_PER_STEP, kills
        rows = cycle.resume(place.site.config) + cycle.run(place.site.config, 1)
        assert rows[-1]["decision"] in ("promoted", "rejected")
        assert place.clients.refused == []
        check(place)
    print(f"{kills.total()} kills: {dict(kills)}")


def storm(place: loop.Place, forks: ForkServerContext) -> Counter[str]:
    """Kill cycles until every step has been hit often enough; how often each was, and under "" how often none was."""
    chance, kills = random.Random(11), Counter[str]()
    deadline = time.monotonic() + _PATIENCE_S
    with sqlite3.connect(place.site.config.root / "ledger.sqlite", timeout=30, isolation_level=None) as books:
        while (wanted := [step for step in STEPS if kills[step] < KILLS_PER_STEP]) and time.monotonic() < deadline:
            begun, child = _latest(books)[0], forks.Process(target=cycle.run, args=(place.site.config,))
            child.start()
            os.setpriority(os.PRIO_PROCESS, child.pid or 0, 10)  # whoever watches has to be quicker
            try:
                while child.is_alive() and time.monotonic() < deadline:
                    number, step, finished = _latest(books)
                    if number > begun and not finished and step in wanted:
                        time.sleep(chance.uniform(0, _LONGEST_S[step]))
                        break
                    # A short step is over before a sleeper wakes.
                    time.sleep(0 if finished and _AFTER.get(step) in wanted else 0.005)
            finally:
                child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
            _, step, finished = _latest(books)
            kills["" if finished else step] += 1
    return kills


def _latest(books: sqlite3.Connection) -> tuple[int, str, bool]:
    """The last row about a step: its number, the step, and whether the step ended with it. Read raw: a step may last only milliseconds."""
    row = books.execute("SELECT seq, stage, payload FROM stages ORDER BY seq DESC LIMIT 1").fetchone()
    if row is None:
        return 0, "", True
    # Waiting for outcomes is the second half of collecting.
    return row[0], "collect" if row[1] == "mature" else row[1], not json.loads(row[2])["started"]


def check(place: loop.Place) -> None:
    """The ledger after the storm."""
    ledger, store = place.site.ledger, place.site.store
    finished = [(row["cycle"], row["stage"]) for row in ledger.stages() if row["finished"]]
    assert max(Counter(finished).values()) == 1
    cycles = list(dict.fromkeys(name for name, _ in finished))
    assert cycles == [f"c-{number:06d}" for number in range(1, len(cycles) + 1)]
    assert {name for name, stage in finished if stage == "settle"} == set(cycles)
    windows = ledger.windows()
    assert [window.first_seq for window in windows[1:]] == [window.last_seq + 1 for window in windows[:-1]]
    report = audit(ledger, spec.load(place.site.config.reward.spec), 1, windows[-1].last_seq)
    assert report.balanced and report.problems == []
    assert len({version.window for version in ledger.versions()}) == len(ledger.versions())
    for version in ledger.versions():
        store.verify(version.id)
        line = ledger.lineage(version.id)
        learned = Counter(generation for each in line for generation in ledger.trained(each))
        assert not learned or max(learned.values()) == 1
    promoted = [record.incumbent for record in ledger.traffic_history()]
    passed = {verdict.candidate for verdict in ledger.verdicts() if verdict.stage == "canary" and verdict.decision == "pass"}
    assert set(promoted) <= passed | {place.site.base}
    canaries = Counter(record.canary for record in ledger.traffic_history() if record.canary)
    assert not canaries or max(canaries.values()) == 1
    assert ledger.traffic().canary == ""  # type: ignore[union-attr]
