"""Programs side by side, dying and being looked after, and `keepgrad up` as a team would run it, on a tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from keepgrad import config as configuration
from keepgrad import supervise
from keepgrad.config import Config, Engine, Model, Server
from keepgrad.errors import KeepgradError
from keepgrad.policy import model
from keepgrad.supervise import Part, Supervisor
from tests.gateway.harness import free_port

ROOT = Path(__file__).parents[1]


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


def test_a_part_that_may_be_missing_rests_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_REST_S", 0.5)
    supervisor, runs = Supervisor(), tmp_path / "runs"
    code = f"open({str(runs)!r}, 'a').write('x'); raise SystemExit(1)"
    supervisor.start(Part("cycle", program(code), tmp_path / "log", keep=True, vital=False))
    began = time.monotonic()
    until(lambda: supervisor.watch() and None or (len(runs.read_text()) if runs.exists() else 0) >= 5)
    assert time.monotonic() - began > 0.5, "three at once, then a rest"
    supervisor.stop_all()


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


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The configuration file of a small installation that does not exist yet."""
    tiny = model.make_tiny(tmp_path / "tiny")
    config = Config(
        model=Model(path=str(tiny), dtype="float32", max_tokens=8, context_tokens=48),
        server=Server(data=str(tmp_path / "data"), port=free_port(), engine_port=free_port()),
        engine=Engine(threads=1),
    )
    (tmp_path / "keepgrad.toml").write_text(configuration.dump(config))
    return tmp_path / "keepgrad.toml"


@pytest.fixture
def family(settings: Path) -> Iterator["subprocess.Popen[str]"]:
    """`keepgrad init`, then `keepgrad up`."""
    command = [sys.executable, "-m", "keepgrad"]
    subprocess.run([*command, "init", "--config", str(settings)], env=environment(), check=True, capture_output=True)
    process = subprocess.Popen(
        [*command, "up", "--config", str(settings)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.timeout(300)
def test_up_serves_survives_the_death_of_any_part_and_leaves_nothing_behind(settings: Path, family: "subprocess.Popen[str]") -> None:
    config = configuration.load(settings)
    assert family.stdout is not None
    assert "starting" in family.stdout.readline()
    assert f"answers at http://127.0.0.1:{config.server.port}" in family.stdout.readline()
    created = [sys.executable, "-m", "keepgrad", "key", "create", "--user", "ann", "--config", str(settings), "--json"]
    key = json.loads(subprocess.run(created, env=environment(), check=True, capture_output=True).stdout)
    headers = {"authorization": f"Bearer {key['secret']}"}

    def served() -> bool:
        body = {"prefix": "def add(a, b):\n    return ", "conversation": f"c-{time.monotonic()}", "at_ms": 1_764_400_000_000}
        try:
            url = f"http://127.0.0.1:{config.server.port}/v1/keepgrad/tab"
            return httpx.post(url, json=body, headers=headers, timeout=30, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    assert served()
    until(lambda: running(family, "cycle"))  # type: ignore[arg-type]
    parts = descendants(family)  # type: ignore[arg-type]
    for command in ("cycle", "serve", "engine"):
        victim = running(family, command)  # type: ignore[arg-type]
        assert victim is not None
        victim.kill()
        assert "was started again" in family.stdout.readline()
        until(served, 60)
    parts += descendants(family)  # type: ignore[arg-type]
    family.terminate()
    assert family.wait(60) == 0
    assert not [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE]


def test_up_without_a_data_folder_says_what_to_do(settings: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepgrad", "up", "--config", str(settings)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2 and "keepgrad init" in done.stderr and len(done.stderr.strip().splitlines()) == 1
