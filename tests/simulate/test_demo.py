"""The demo on a tiny model: the real programs, one of them killed on the way, and what they leave behind."""

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_supervise import descendants, environment, running, until


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
