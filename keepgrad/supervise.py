"""Programs of keepgrad run side by side: started, watched, started again when they die, stopped in order; none is left behind.

Each part is a process group of its own, so that an interrupt from the terminal reaches the supervisor alone, which then stops the parts in
the order that loses nothing.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
import psutil

from keepgrad.errors import KeepgradError

_QUICK_S = 20.0
"""A part that dies sooner than this after its start has not recovered."""
_QUICK_DEATHS = 3
_REST_S = 60.0
"""How long a part that may be missing rests after it has died too often."""
_READY_S = 300.0
_STOP_S = 20.0
_GIB = 2**30


class Part:
    """One program. `command` is asked at each start. `keep`: whenever it ends it is started again; else an end with code 0 means done.

    `vital`: without it the others are of no use, so if it does not stay up everything ends; else it is tried again now and then.
    """

    def __init__(self, name: str, command: Callable[[], Sequence[str]], log: Path, keep: bool, vital: bool = True) -> None:
        self.name, self.command, self.log, self.keep, self.vital = name, command, log, keep, vital
        self.process: subprocess.Popen[bytes] | None = None
        self.done = False
        self._started_s = 0.0
        self._quick = 0
        self._rests_until_s = 0.0

    def start(self) -> None:
        """Start it, its output appended to its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                list(self.command()),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )
        self._started_s = time.monotonic()

    def watch(self) -> bool:
        """Start it again if it died; whether it did. Raises KeepgradError once it has died for good."""
        if self.process is None or self.done:
            return False
        code = self.process.poll()
        if code is None:
            return False
        if code == 0 and not self.keep:
            self.done = True
            return False
        now_s = time.monotonic()
        if now_s < self._rests_until_s:
            return False
        if self._rests_until_s:
            self._rests_until_s, self._quick = 0.0, 0
        else:
            self._quick = self._quick + 1 if now_s - self._started_s < _QUICK_S else 1
        if self._quick >= _QUICK_DEATHS:
            if self.vital:
                raise KeepgradError(f"the {self.name} does not stay up ({_last_words(self.log, code)}): see {self.log}")
            self._rests_until_s = now_s + _REST_S
            return False
        self.start()
        return True

    def stop(self, seconds: float = _STOP_S) -> None:
        """Ask it to end, wait, and end it by force if it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Supervisor:
    """The parts of a run, in the order in which they are started; stopped the other way round."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.peak_bytes = 0
        self.restarts: Counter[str] = Counter()

    def start(self, part: Part) -> None:
        """Start a part and watch it from now on."""
        self.parts[part.name] = part
        part.start()

    def watch(self) -> list[str]:
        """Look after all parts once; the names of those that had to be started again. Raises KeepgradError if one has died for good."""
        self.measure()
        again = [part.name for part in list(self.parts.values()) if part.watch()]
        self.restarts.update(again)
        return again

    def stop(self, name: str) -> None:
        """Stop one part and watch it no more."""
        self.parts.pop(name).stop()

    def stop_all(self) -> None:
        """Stop what still runs."""
        for name in reversed(list(self.parts)):
            self.stop(name)

    def measure(self) -> None:
        """Note the resident memory of this process and all its descendants, if it is more than ever before.

        Pages that processes share are counted once for each, so this errs on the high side.
        """
        me = psutil.Process()
        total = 0
        for process in (me, *me.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.Error:  # it ended meanwhile
                continue
        self.peak_bytes = max(self.peak_bytes, total)

    @property
    def peak_gib(self) -> float:
        """Most memory seen, in GiB."""
        return round(self.peak_bytes / _GIB, 3)


def program(name: str, arguments: Callable[[], Sequence[str]], settings: Path | None, logs: Path, keep: bool, vital: bool = True) -> Part:
    """A command of keepgrad as a part, with the configuration file `settings` if there is one."""

    def command() -> list[str]:
        return [sys.executable, "-m", "keepgrad", *arguments(), *(["--config", str(settings)] if settings else [])]

    return Part(name, command, logs / f"{name}.log", keep, vital)


def wait_ready(supervisor: Supervisor, name: str, address: str) -> None:
    """Until the part answers. Raises KeepgradError if it dies or takes too long."""
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        supervisor.watch()
        try:
            if httpx.get(address, timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise KeepgradError(f"the {name} did not answer within {_READY_S:.0f} s of its start: see {supervisor.parts[name].log}")


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does: the parts are stopped in order, nothing is left running."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment() -> dict[str, str]:
    """Our own, with what makes logs readable while they are written and tokenizers quiet about forks."""
    ours = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "2",  # glibc gives each thread an arena of its own, and never gives it back
    }
    return {**os.environ, **ours}


def _last_words(log: Path, code: int) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    said = lines[-1].removeprefix("keepgrad: ")[:300] if lines else "it said nothing"
    return f"exit code {code}: {said}"
