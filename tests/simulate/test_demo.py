"""The demo on a tiny model: the real programs, one of them killed on the way, and what they leave behind."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepgrad.errors import KeepgradError
from keepgrad.simulate.supervise import Part, Supervisor

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def program(code: str) -> Callable[[], list[str]]:
    return lambda: [sys.executable, "-c", code]


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to that in time")


def test_a_part_that_dies_is_started_again(tmp_path: Path) -> None:
    supervisor = Supervisor()
    part = Part("sleeper", program("import time; time.sleep(600)"), tmp_path / "log", keep=True)
    supervisor.start(part)
    try:
        assert part.process and supervisor.watch() == []
        first = part.process.pid
        part.process.kill()
        part.process.wait()
        assert supervisor.watch() == ["sleeper"]
        assert part.process.pid != first and supervisor.restarts == {"sleeper": 1}
    finally:
        supervisor.stop_all()
    assert part.process.poll() is not None


def test_a_part_that_does_not_stay_up_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    supervisor = Supervisor()
    code = "import sys; print('keepgrad: port 1 is taken', file=sys.stderr); sys.exit(2)"
    supervisor.start(Part("engine", program(code), tmp_path / "log", keep=True))
    with pytest.raises(KeepgradError, match="the engine does not stay up .*port 1 is taken"):
        until(lambda: supervisor.watch() and None)


def test_a_part_that_is_done_is_left_alone(tmp_path: Path) -> None:
    supervisor = Supervisor()
    part = Part("cycle", program("pass"), tmp_path / "log", keep=False)
    supervisor.start(part)
    until(lambda: supervisor.watch() or part.done)
    assert part.done and not supervisor.restarts


def test_a_part_that_does_not_listen_is_ended_by_force(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    part = Part("deaf", program(code), tmp_path / "log", keep=True)
    part.start()
    until(lambda: "deaf" in (tmp_path / "log").read_text())
    part.stop(seconds=0.3)
    assert part.process and part.process.poll() == -signal.SIGKILL


def test_memory_of_the_whole_family_is_measured(tmp_path: Path) -> None:
    supervisor = Supervisor()
    supervisor.measure()
    alone = supervisor.peak_bytes
    supervisor.start(Part("hoarder", program("x = b'x' * 300_000_000\nimport time; time.sleep(600)"), tmp_path / "log", keep=True))
    try:
        until(lambda: (supervisor.measure(), supervisor.peak_bytes > alone + 290_000_000)[1])
    finally:
        supervisor.stop_all()


def descendants(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def running(process: "subprocess.Popen[bytes]", command: str) -> psutil.Process | None:
    """The part of a demo that runs this command."""
    for child in descendants(process):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if words[2:4] == ["keepgrad", command]:
            return child
    return None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tiny_demo_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    arguments = ["demo", "--tiny", "--out", "run", "--cycles", "1", "--minutes", "4", "--developers", "8"]
    with (tmp_path / "out").open("wb") as out:
        demo = subprocess.Popen([sys.executable, "-m", "keepgrad", *arguments], cwd=tmp_path, env=environment(), stdout=out, stderr=out)
    try:
        gateway = until(lambda: demo.poll() is not None or (running(demo, "cycle") and running(demo, "serve")), 300)
        assert demo.poll() is None, (tmp_path / "out").read_text()
        gateway.send_signal(signal.SIGKILL)
        assert demo.wait(400) == 0, (tmp_path / "out").read_text()
    finally:
        demo.kill()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["conservation"]["balanced"] and report["conservation"]["generations"] >= 48
    assert report["run"]["restarts"] == {"gateway": 1}
    assert report["heldout"]["opportunities"] == 64 and report["projects"]["opportunities"] == 32
    assert report["cycles"][0]["seconds"]["collect"] > 0 and report["peak_memory_gib"] > 0.3
    assert (tmp_path / "run" / "developers.json").stat().st_mode & 0o077 == 0
    assert "<table>" in (tmp_path / "run" / "report.html").read_text()
    _audit_finds_a_deleted_row(tmp_path / "run")


def _audit_finds_a_deleted_row(run: Path) -> None:
    """The books of the run balance; with one row gone they do not, and say which."""
    command = [sys.executable, "-m", "keepgrad", "audit", "--config", str(run / "keepgrad.toml"), "--json"]
    balanced = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert balanced.returncode == 0 and json.loads(balanced.stdout)["problems"] == [], balanced.stdout + balanced.stderr
    database = sqlite3.connect(run / "data" / "ledger.sqlite")
    name = database.execute("SELECT id FROM generations ORDER BY seq LIMIT 1 OFFSET 20").fetchone()[0]
    with pytest.raises(sqlite3.DatabaseError, match="append-only"):
        database.execute("DELETE FROM generations WHERE id = ?", (name,))
    database.execute("DROP TRIGGER generations_no_delete")
    database.execute("DELETE FROM generations WHERE id = ?", (name,))
    database.commit()
    database.close()
    found = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert found.returncode == 1
    assert [problem["generation"] for problem in json.loads(found.stdout)["problems"]] == [name]


@pytest.mark.slow
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path) -> None:
    arguments = ["demo", "--tiny", "--out", "run", "--cycles", "1", "--minutes", "4", "--developers", "4"]
    demo = subprocess.Popen(
        [sys.executable, "-m", "keepgrad", *arguments],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: running(demo, "simulate"), 250)
        parts = descendants(demo)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 130
    finally:
        demo.kill()
    assert len(parts) >= 3 and not [part for part in parts if part.is_running()]
