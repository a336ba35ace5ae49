"""What a person sees while a run goes on: one live block on a terminal, plain lines anywhere else."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keepgrad.ledger import Ledger
from keepgrad.outcomes.episode import outcome
from keepgrad.report.facts import TAKEN

_RECENT = 256
"""Generations that "lately" means."""
_READ_S = 2.0
_STAGES = ("collect", "score", "audit", "train", "gate", "canary", "settle")


class Progress:
    """Live progress of a run of at most `cycles` cycles that should be over by `deadline_s` (monotonic clock)."""

    def __init__(self, console: Console, cycles: int, window: int, deadline_s: float, after_s: float) -> None:
        self._console, self._cycles, self._window, self._deadline_s, self._after_s = console, cycles, window, deadline_s, after_s
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._began_s = time.monotonic()
        self._doing = "starting"
        self._read_s = 0.0
        self._now: dict[str, Any] = {}
        self._told: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Something worth a line of its own."""
        self._console.print(f"{_clock(time.monotonic() - self._began_s)}  {text}", highlight=False, markup=False, soft_wrap=True)

    def doing(self, text: str) -> None:
        """What goes on outside of cycles."""
        self._doing = text
        if not self._live:
            self.say(text)
        self._draw()

    def follow(self, ledger: Ledger) -> None:
        """Look at the ledger, not too often, and show where the loop is."""
        if time.monotonic() - self._read_s >= _READ_S:
            self._read_s = time.monotonic()
            self._now = look(ledger)
            for cycle in self._now["finished"]:
                self._once((cycle["cycle"], "settled"), f"{cycle['cycle']}  {cycle['decision']}: {cycle['reason'] or 'all within bounds'}")
            if not self._live and self._now["cycle"]:
                self._once((self._now["cycle"], self._now["stage"]), _line(self._now))
        self._doing = ""
        self._draw()

    @property
    def finished(self) -> int:
        """Cycles that have settled, as last seen."""
        return len(self._now.get("finished", []))

    def _once(self, name: tuple[str, str], text: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self.say(text)

    def _draw(self) -> None:
        if not self._live:
            return
        if self._doing or not self._now:
            self._live.update(Text(f"{_clock(time.monotonic() - self._began_s)}  {self._doing}"))
            return
        now, done = self._now, self.finished
        grid = Table.grid(padding=(0, 2))
        grid.add_row("cycle", f"{min(done + 1, self._cycles)} of at most {self._cycles}")
        marks = [f"[reverse]{stage}[/]" if stage == now["stage"] else stage for stage in _STAGES]
        grid.add_row("stage", "  ".join(marks))
        grid.add_row("samples", f"{now['since']} since the last window" + (f" of {self._window}" if now["stage"] == "collect" else ""))
        grid.add_row(
            "lately", f"{_percent(now['shown'])} shown, {_percent(now['accepted'])} of those accepted, {_percent(now['silent'])} silent"
        )
        grid.add_row("serving", now["incumbent"] + (f", canary {now['canary']}" if now["canary"] else ""))
        grid.add_row("time left", f"about {_clock(self._left_s(done))}, evaluation included")
        self._live.update(Group(Text(_clock(time.monotonic() - self._began_s)), grid))

    def _left_s(self, done: int) -> float:
        to_deadline = max(0.0, self._deadline_s - time.monotonic())
        if not done:
            return to_deadline
        each = float(self._now["cycles_s"]) / done
        return min(to_deadline, each * max(self._cycles - done - 0.5, 0.0) + self._after_s)


def look(ledger: Ledger) -> dict[str, Any]:
    """The running cycle and its stage, finished cycles, and how the last generations went."""
    stages = ledger.stages()
    finished = [
        {"cycle": row["cycle"], "decision": row["counts"].get("decision", ""), "reason": row["counts"].get("reason", "")}
        for row in stages
        if row["stage"] == "settle" and row["finished"]
    ]
    running = stages[-1]["cycle"] if stages and not any(cycle["cycle"] == stages[-1]["cycle"] for cycle in finished) else ""
    last = ledger.last_seq()
    windows = ledger.windows()
    generations = [generation for _, generation in ledger.generations(max(1, last - _RECENT + 1), last)] if last else []
    events, clocks = ledger.events([generation.id for generation in generations]), ledger.user_clocks()
    shown = [generation for generation in generations if generation.verdict == "show"]
    ends = [outcome(g, events.get(g.id, []), clocks.get(g.user, g.client_ms)).end for g in shown]
    known = [end for end in ends if end and end != "not_drawn"]
    traffic = ledger.traffic()
    return {
        "cycle": running,
        "stage": stages[-1]["stage"] if running else "idle",
        "finished": finished,
        "cycles_s": sum(row["seconds"] for row in stages if row["finished"]),
        "generations": last,
        "since": last - max((window.last_seq for window in windows), default=0),
        "shown": len(shown) / len(generations) if generations else None,
        "silent": 1 - len(shown) / len(generations) if generations else None,
        "accepted": sum(end in TAKEN for end in known) / len(known) if known else None,
        "incumbent": traffic.incumbent if traffic else "",
        "canary": traffic.canary if traffic else "",
    }


def _line(now: dict[str, Any]) -> str:
    return (
        f"{now['cycle']}  {now['stage']:8} {now['generations']} generations; lately {_percent(now['shown'])} shown, "
        f"{_percent(now['accepted'])} of those accepted"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes:02d}:{rest:02d}"
