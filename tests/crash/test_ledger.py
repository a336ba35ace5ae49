"""A process that writes the ledger is killed (SIGKILL) at random: what it acknowledged is there exactly once, the rest whole or not (P4).

Each process repeats the last thing its predecessor may or may not have done, as a client that got no answer would.
"""

import multiprocessing
import random
import sqlite3
import time
from collections import Counter
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from keepgrad.ledger import Ledger, segments
from tests.ledgers import event, generation, key_of, score, tokens, traffic, version

KILLS = 15
BATCH = 6
SPAN = BATCH * 10_000
"""Numbers of one process; step k of process r has the BATCH numbers from r * SPAN + k * BATCH."""


def numbers(process: int, step: int) -> list[int]:
    """What a step of a process writes."""
    first = process * SPAN + step * BATCH
    return list(range(first, first + BATCH))


def act(ledger: Ledger, process: int, step: int) -> None:
    """One step: generations, their events, what a cycle writes about them, and every third time a segment."""
    mine = numbers(process, step)
    ledger.add_generations([(generation(n), tokens(n)) for n in mine])
    ledger.add_events([(event(n, n), key_of(n)) for n in mine])
    name = f"{process}-{step}"
    ledger.put_scores(f"w-{name}", [score(n) for n in mine])
    ledger.publish(version(f"v-{name}", "v-base"), [f"g-{n:06d}" for n in mine])
    ledger.put_traffic(traffic(f"v-{name}"))
    if step % 3 == 0:
        ledger.seal(1)


def write_on(root: str, process: int, repeat: tuple[int, int] | None, pipe: Connection) -> None:
    """Repeat what the process before was at, then step after step; each is acknowledged once it has returned."""
    ledger = Ledger.open(Path(root))
    if repeat:
        act(ledger, *repeat)
        pipe.send(repeat)
    for step in range(SPAN // BATCH):
        act(ledger, process, step)
        pipe.send((process, step))


def run_and_kill(root: Path, process: int, repeat: tuple[int, int] | None, after_s: float) -> list[tuple[int, int]]:
    """Let a process write until some time after its first acknowledgement, kill it, and return the steps it acknowledged."""
    # A clean process, forked from a server that has done the slow imports (pyarrow takes pandas if it is there) and has no ledger open.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pandas", "pyarrow.parquet", "pytest", "sqlalchemy.dialects.sqlite.pysqlite"])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=write_on, args=(str(root), process, repeat, theirs))
    child.start()
    theirs.close()
    assert ours.poll(60), "the writer does not come up"
    time.sleep(after_s)
    child.kill()
    child.join(30)
    assert child.exitcode == -9
    acknowledged: list[tuple[int, int]] = []
    try:
        while True:
            acknowledged.append(ours.recv())
    except EOFError:
        return acknowledged


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    first = Ledger.open(tmp_path)
    first.put_version(version("v-base"))
    first.close()
    chance, repeat = random.Random(11), None
    acknowledged: list[tuple[int, int]] = []
    for process in range(1, KILLS + 1):
        told = run_and_kill(tmp_path, process, repeat, chance.uniform(0, 0.5))
        acknowledged += told
        last = max((step for who, step in told if who == process), default=-1)
        repeat = (process, last + 1)
    assert len(acknowledged) > 2 * KILLS, "too slow to have been interrupted at work"
    check(tmp_path, acknowledged)


def check(root: Path, acknowledged: list[tuple[int, int]]) -> None:
    """The ledger against what was acknowledged, and every row of it against what its number says."""
    ledger = Ledger.open(root)
    rows = ledger.generations()
    assert [seq for seq, _ in rows] == list(range(1, len(rows) + 1))
    there = [one.seed for _, one in rows]
    assert max(Counter(there).values()) == 1
    assert [one for _, one in rows] == [generation(n) for n in there]
    ids = [one.id for _, one in rows]
    assert ledger.tokens(ids) == {f"g-{n:06d}": tokens(n) for n in there}
    told = ledger.events(ids)
    number_of = {one.id: one.seed for _, one in rows}
    assert told == {name: [event(number_of[name], number_of[name])] for name in told}
    versions = {one.id for one in ledger.versions()}
    for process, step in acknowledged:
        mine, name = numbers(process, step), f"{process}-{step}"
        assert set(mine) <= set(there) and all(f"g-{n:06d}" in told for n in mine)
        assert ledger.scores(f"w-{name}") == [score(n) for n in mine]
        assert f"v-{name}" in versions
    # A step that was not acknowledged: each of its transactions is whole or not there.
    assert all(count == BATCH for count in Counter(n // BATCH for n in there).values())
    assert all(ledger.trained(name) == {f"g-{n:06d}" for n in numbers(*map(int, name[2:].split("-")))} for name in versions - {"v-base"})
    history = [one.incumbent for one in ledger.traffic_history()]
    assert {f"v-{process}-{step}" for process, step in acknowledged} <= set(history)
    check_segments(ledger, root, set(ids))
    ledger.close()


def check_segments(ledger: Ledger, root: Path, ids: set[str]) -> None:
    """Every array is in the spool or in one segment; every segment has its file and every file its segment."""
    assert ledger.verify_segments() == []
    with closing(sqlite3.connect(root / "ledger.sqlite")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        named = {Path(path).name for (path,) in database.execute("SELECT path FROM segments")}
        spooled = {name for (name,) in database.execute("SELECT generation FROM spool")}
        sealed = {name for (name,) in database.execute("SELECT generation FROM segment_rows")}
    assert named == {file.name for file in (root / "segments").iterdir()} - {segments.LOCK}
    assert len(named) > KILLS // 2 and spooled | sealed == ids and not spooled & sealed
