"""The cycle is killed (SIGKILL) at random instants in each of its seven steps: it goes on, each step is done once, no sample twice (P4).

Engine and gateway keep serving meanwhile, eight users keep asking. A short step is hit within milliseconds of its beginning, a long one
anywhere in it.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from keepgrad import cycle
from keepgrad.audit import audit
from keepgrad.cycle import STEPS
from keepgrad.policy import model
from keepgrad.reward import spec
from tests import loop

KILLS_PER_STEP = 4
_LONGEST_S = {"collect": 0.6, "score": 0.05, "audit": 0.02, "train": 4.0, "gate": 0.5, "canary": 1.0, "settle": 0.03}
"""About how long each step takes here; the kill comes at a random time within it."""


@pytest.mark.slow
def test_a_killed_cycle_goes_on_and_does_each_step_once(tmp_path: Path) -> None:
    with loop.place(tmp_path, model.make_tiny(tmp_path / "model")) as place:
        kills = storm(place, tmp_path / "cycle.log")
        assert min(kills[step] for step in STEPS) >= KILLS_PER_STEP, kills
        rows = cycle.resume(place.site.config) + cycle.run(place.site.config, 1)
        assert rows[-1]["decision"] in ("promoted", "rejected")
        assert place.clients.refused == []
        check(place)
    print(f"{kills.total()} kills: {dict(kills)}")


def storm(place: loop.Place, log: Path) -> Counter[str]:
    """Kill cycles until every step has been hit often enough; how often each was."""
    chance, kills = random.Random(11), Counter[str]()
    deadline = time.monotonic() + 600
    while (wanted := [step for step in STEPS if kills[step] < KILLS_PER_STEP]) and time.monotonic() < deadline:
        child = start(place, log)
        hit = _kill_in(place, child, wanted, chance)
        assert child.returncode == -signal.SIGKILL, log.read_text()
        kills[hit] += 1
    return kills


def _kill_in(place: loop.Place, child: subprocess.Popen[bytes], wanted: list[str], chance: random.Random) -> str:
    """Kill the process in the first wanted step that it comes to; the step that it was in when it died, empty if in none."""
    begun = len(place.site.ledger.stages())
    while child.poll() is None:
        rows = place.site.ledger.stages()
        step = rows[-1]["stage"] if len(rows) > begun and not rows[-1]["finished"] else ""
        if step in wanted:
            time.sleep(chance.uniform(0, _LONGEST_S[step]))
            child.kill()
        else:
            time.sleep(0.001)
    child.wait()
    current = place.site.ledger.current_stage()
    return "" if current == "idle" else current


def start(place: loop.Place, log: Path) -> subprocess.Popen[bytes]:
    """`keepgrad cycle run` as a process of its own, one thread, so that killing it is the only thing that stops it."""
    config, root = place.site.config.root.parent / "keepgrad.toml", str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "keepgrad", "cycle", "run", "--config", str(config)], stdout=stream, stderr=stream, env=environment
        )


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
    report = audit(ledger, spec.load("tab"), 1, windows[-1].last_seq)
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
