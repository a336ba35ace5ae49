"""The ledger: what is written is there once and for ever (P4), whoever opens the file; token arrays come back exactly or not (P2)."""

import itertools
import multiprocessing
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from keepgrad import durable
from keepgrad.errors import ConflictError, LedgerError
from keepgrad.ledger import SCHEMA_VERSION, Ledger, schema, segments
from keepgrad.records import Key, Revocation, Window
from tests.ledgers import CLOCK, event, fill, generation, key, key_of, score, tokens, traffic, verdict, version

TABLES = list(schema.metadata.tables)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path)
    yield opened
    opened.close()


def raw(root: Path) -> Any:
    """The database file without keepgrad."""
    return closing(sqlite3.connect(root / "ledger.sqlite", isolation_level=None, timeout=30))


def segment_files(root: Path) -> list[Path]:
    """The Parquet files, oldest first."""
    return sorted((root / "segments").glob("*.parquet"))


def store(ledger: Ledger, *numbers: int) -> None:
    """The generations with these numbers, in one call."""
    ledger.add_generations([(generation(n), tokens(n)) for n in numbers])


# ---- what goes in comes out


def everything(ledger: Ledger) -> dict[str, Any]:
    """All that the ledger tells."""
    ids = [one.id for _, one in ledger.generations()]
    return {
        "generations": ledger.generations(), "last_seq": ledger.last_seq(), "tokens": ledger.tokens(ids), "events": ledger.events(ids),
        "clocks": ledger.user_clocks(), "keys_of": ledger.generation_keys(ids), "with_tokens": ledger.token_generations(),
        "event_generations": ledger.event_generations(), "versions": ledger.versions(), "lineage": ledger.lineage("v-1"),
        "trained": ledger.trained("v-1"), "in_lineage": ledger.trained_in_lineage("v-1"), "traffic": ledger.traffic(),
        "history": ledger.traffic_history(), "windows": ledger.windows(), "scores": ledger.scores("w-1"), "verdicts": ledger.verdicts(),
        "stages": ledger.stages(), "stage": ledger.current_stage(), "keys": ledger.keys(), "counters": ledger.counters(),
    }  # fmt: skip


def test_everything_comes_back_as_it_went_in_also_after_reopening(tmp_path: Path) -> None:
    first = Ledger.open(tmp_path)
    fill(first)
    told = everything(first)
    first.close()
    second = Ledger.open(tmp_path)
    assert everything(second) == told
    second.close()
    assert told["generations"] == [(n + 1, generation(n)) for n in range(6)]
    assert told["tokens"] == {f"g-{n:06d}": tokens(n) for n in range(6)}
    assert told["events"] == {f"g-{n:06d}": [event(n, n)] for n in range(6)}
    assert told["clocks"] == {"u-0": CLOCK + 1004, "u-1": CLOCK + 1005, "u-2": CLOCK + 1002, "u-3": CLOCK + 1003}
    assert told["keys_of"]["g-000005"] == "k-1"
    assert told["lineage"] == ["v-1", "v-base"]
    assert told["trained"] == told["in_lineage"] == {"g-000000", "g-000001"}
    assert (told["traffic"], told["history"]) == (traffic("v-1"), [traffic("v-base"), traffic("v-1")])
    assert told["windows"] == [Window("w-1", 1, 6, CLOCK)]
    assert told["scores"] == [score(n) for n in range(6)]
    assert told["verdicts"] == [verdict("x-1")]
    begin, end = told["stages"]
    assert (begin["stage"], begin["finished"], end["finished"], end["seconds"], end["counts"]) == (
        "collect",
        False,
        True,
        1.5,
        {"generations": 6},
    )
    assert told["stage"] == "idle" and told["counters"] == {"forbidden_event": 2}


def test_an_empty_ledger_answers(ledger: Ledger) -> None:
    assert ledger.generations() == [] and ledger.last_seq() == 0 and ledger.traffic() is None and ledger.current_stage() == "idle"
    assert ledger.generation("g") is None and ledger.last_of_conversation("c", "acme") is None
    assert ledger.tokens(["g"]) == {} and ledger.events(["g"]) == {} and ledger.user_clocks() == {} and ledger.counters() == {}
    assert ledger.seal() == 0 and ledger.verify_segments() == [] and ledger.lineage("v-1") == ["v-1"]
    ledger.add_generations([])
    assert ledger.add_events([]) == []


def test_ranges_include_both_ends(ledger: Ledger) -> None:
    store(ledger, *range(5))
    assert [seq for seq, _ in ledger.generations(2, 4)] == [2, 3, 4]
    assert [seq for seq, _ in ledger.generations(4)] == [4, 5]


def test_a_conversation_belongs_to_its_organisation(ledger: Ledger) -> None:
    store(ledger, 0, 1, 2)
    ledger.add_generations([(generation(3, org="rival", conversation="c-0"), tokens(3))])
    assert ledger.last_of_conversation("c-0", "acme") == generation(2)
    assert ledger.last_of_conversation("c-0", "rival") == generation(3, org="rival", conversation="c-0")


def test_a_stage_is_current_until_it_ends(ledger: Ledger) -> None:
    ledger.start_stage("c-1", "train")
    assert ledger.current_stage() == "train"
    ledger.put_stage("c-1", "train", 3.0, {})
    assert ledger.current_stage() == "idle"


# ---- ids make retries harmless, and catch two things under one name


def test_the_same_again_changes_nothing(tmp_path: Path, ledger: Ledger) -> None:
    fill(ledger)
    with raw(tmp_path) as database:
        before = {name: database.execute(f"SELECT count(*) FROM {name}").fetchone() for name in TABLES}
        store(ledger, *range(6), 5, 0)
        assert ledger.add_events([(event(n, n), key_of(n)) for n in range(6)]) == ["duplicate"] * 6
        ledger.put_version(version("v-base"))
        ledger.publish(version("v-1", "v-base"), ["g-000001", "g-000000"])
        ledger.put_traffic(traffic("v-1"))
        ledger.put_window(Window("w-1", 1, 6, CLOCK))
        ledger.put_scores("w-1", [score(n) for n in range(6)])
        ledger.put_verdict(verdict("x-1"))
        ledger.put_key(key("k-0"))
        assert {name: database.execute(f"SELECT count(*) FROM {name}").fetchone() for name in TABLES} == before


@pytest.mark.parametrize(
    "write",
    [
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(0, text="other"), tokens(0))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(0), tokens(0, logprobs=[-0.5] * 4))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(5), tokens(5, prompt_ids=[1]))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(9), tokens(9, features=[]))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(9, seed=1), tokens(9))]),
        lambda ledger: ledger.add_events([(event(9, 1), "k-1"), (event(0, 0, kind="accepted"), "k-0")]),
        lambda ledger: ledger.add_events([(event(9, 1), "k-1"), (event(9, 2), "k-2")]),
        lambda ledger: ledger.put_version(version("v-base", seed=1)),
        lambda ledger: ledger.publish(version("v-1", "v-base", seed=1), ["g-000000", "g-000001"]),
        lambda ledger: ledger.publish(version("v-1", "v-base"), ["g-000000"]),
        lambda ledger: ledger.put_window(Window("w-1", 1, 7, CLOCK)),
        lambda ledger: ledger.put_scores("w-1", [score(9), score(0, reward=1.0)]),
        lambda ledger: ledger.put_verdict(verdict("x-1", decision="fail")),
        lambda ledger: ledger.put_key(key("k-0", consent="none")),
    ],
)
def test_other_content_under_an_id_is_a_conflict_and_nothing_of_the_call_is_kept(ledger: Ledger, write: Callable[[Ledger], None]) -> None:
    fill(ledger)
    before = everything(ledger)
    with pytest.raises(ConflictError, match="already"):
        write(ledger)
    assert everything(ledger) == before


def test_a_record_from_before_a_field_was_added_is_the_same_record(tmp_path: Path, ledger: Ledger) -> None:
    payload = b'{"id":"e-000001","generation":"g-000001","kind":"shown","at_ms":%d}' % (CLOCK + 1001)
    with raw(tmp_path) as database:
        database.execute(
            "INSERT INTO events (id, generation, key, at_ms, payload) VALUES ('e-000001', 'g-000001', 'k-1', 1, ?)", (payload,)
        )
    assert ledger.add_events([(event(1, 1), "k-1")]) == ["duplicate"]


@pytest.mark.parametrize(
    "write",
    [
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(8, latency_ms=float("nan")), tokens(8))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(8, verdict_logprob=float("-inf")), tokens(8))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(8), tokens(8, logprobs=[float("nan")]))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(8), tokens(8, features=[[float("inf")]]))]),
        lambda ledger: ledger.add_generations([(generation(9), tokens(9)), (generation(8), tokens(7))]),
        lambda ledger: ledger.add_events([(event(9, 9), "k-1"), (event(8, 8, at_ms=2**63), "k-0")]),
        lambda ledger: ledger.add_events([(event(9, 9), "k-1"), (event(8, 8, text="\ud800"), "k-0")]),
        lambda ledger: ledger.put_scores("w-9", [score(9), score(8, reward=float("nan"))]),
        lambda ledger: ledger.put_traffic(traffic("v-1", canary_share=float("nan"))),
    ],
)
def test_what_could_not_be_read_back_is_refused(ledger: Ledger, write: Callable[[Ledger], None]) -> None:
    fill(ledger)
    before = everything(ledger)
    with pytest.raises(LedgerError):
        write(ledger)
    assert everything(ledger) == before


# ---- events


def test_an_event_may_come_before_its_generation(ledger: Ledger) -> None:
    assert ledger.add_events([(event(1, 3), "k-3")]) == ["waiting"]
    assert ledger.events(["g-000003"]) == {} and ledger.event_generations() == {"g-000003": 1}
    store(ledger, 3)
    assert ledger.add_events([(event(2, 3), "k-3"), (event(1, 3), "k-3")]) == ["stored", "duplicate"]
    assert ledger.events(["g-000003"]) == {"g-000003": [event(1, 3), event(2, 3)]}


def test_an_event_of_another_key_says_nothing_about_a_generation(ledger: Ledger) -> None:
    assert ledger.add_events([(event(1, 3, at_ms=CLOCK * 2), "k-0")]) == ["waiting"]
    store(ledger, 3)
    assert ledger.generation_keys(["g-000003", "g-000004"]) == {"g-000003": "k-3"}
    assert ledger.events(["g-000003"]) == {}
    assert ledger.user_clocks() == {"u-3": CLOCK + 3}


# ---- append-only, whoever opens the file


def row_of(database: sqlite3.Connection, table: str) -> dict[str, Any]:
    """The newest row of a table (in the spool, one that is not sealed)."""
    database.row_factory = sqlite3.Row
    return dict(database.execute(f"SELECT * FROM {table} ORDER BY 1 DESC LIMIT 1").fetchone())


def insert(verb: str, table: str, row: dict[str, Any], tail: str = "") -> tuple[str, list[Any]]:
    """An INSERT of this row."""
    names = ", ".join(f'"{name}"' for name in row)
    return f"{verb} INTO {table} ({names}) VALUES ({', '.join('?' * len(row))}) {tail}", list(row.values())


def attacks(table: str, row: dict[str, Any], number: int | None) -> list[tuple[str, list[Any]]]:
    """Every way to change or take away a row that SQLite knows of."""
    columns = schema.metadata.tables[table].columns
    groups = [[column.name for column in columns if column.primary_key], *([column.name] for column in columns if column.unique)]
    forged = {name: "forged" if isinstance(value, str) else b"forged" if isinstance(value, bytes) else value for name, value in row.items()}
    last = list(row)[-1]
    found: list[tuple[str, list[Any]]] = [(f"DELETE FROM {table}", []), (f"DELETE FROM {table} WHERE 1 = 1", [])]
    for name, value in row.items():
        other = value + 1000 if isinstance(value, int) else forged[name]
        found += [(f'UPDATE {table} SET "{name}" = ?', [other]), (f'UPDATE OR REPLACE {table} SET "{name}" = "{name}"', [])]
    for group in groups:
        same = {**forged, **{name: row[name] for name in group}}
        if "seq" in same and "seq" not in group:
            del same["seq"]
        update = f'ON CONFLICT DO UPDATE SET "{last}" = excluded."{last}"'
        found += [
            insert(verb, table, same)
            for verb in ("INSERT OR REPLACE", "REPLACE", "INSERT OR ROLLBACK", "INSERT OR FAIL", "INSERT OR IGNORE")
        ]
        found += [insert("INSERT", table, same, update), insert("INSERT OR REPLACE", table, same, update)]
        if number is not None:
            alias = groups[0][0]
            found.append(insert("INSERT OR REPLACE", table, {"rowid": number, **{name: forged[name] for name in row if name != alias}}))
    return found


@pytest.mark.parametrize("table", TABLES)
def test_the_database_itself_refuses_to_change_a_row(tmp_path: Path, ledger: Ledger, table: str) -> None:
    fill(ledger)
    with raw(tmp_path) as database:
        before = list(database.iterdump())
        row = row_of(database, table)
        has_rowid = table not in ("segment_rows", "trained", "scores")
        number = database.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] if has_rowid else None
        for recursive, (statement, values) in itertools.product(("ON", "OFF"), attacks(table, row, number)):
            database.execute(f"PRAGMA recursive_triggers = {recursive}")
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                database.execute(statement, values)
        if not has_rowid:
            with pytest.raises(sqlite3.OperationalError, match="rowid"):
                database.execute(f"SELECT rowid FROM {table}")
        assert list(database.iterdump()) == before


def test_a_spooled_array_goes_only_into_a_segment(tmp_path: Path, ledger: Ledger) -> None:
    fill(ledger)
    with raw(tmp_path) as database:
        for statement in (
            "DELETE FROM spool WHERE generation = 'g-000005'",
            "INSERT INTO segment_rows VALUES ('g-000005', 99)",  # no such segment
            "INSERT INTO segment_rows VALUES ('g-999999', 1)",  # no such array
            "INSERT INTO segment_rows VALUES ('g-000000', 1)",  # sealed already
        ):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                database.execute(statement)
    assert ledger.tokens(["g-000005"]) == {"g-000005": tokens(5)}


# ---- token arrays


def test_arrays_are_exact_in_the_spool_and_in_segments(ledger: Ledger) -> None:
    awkward = {
        0: tokens(0, logprobs=[-5e-324, -0.1, -1.7976931348623157e308, 0.0]),
        1: tokens(1, prompt_ids=[], completion_ids=[], logprobs=[], cuts=[], features=[]),
        2: tokens(2, prompt_ids=[2**31, 2**62]),
    }
    ledger.add_generations([(generation(n), awkward.get(n, tokens(n))) for n in range(20)])
    wanted = {f"g-{n:06d}": awkward.get(n, tokens(n)) for n in range(20)}
    assert ledger.tokens(list(wanted)) == wanted
    assert ledger.seal(21) == 0
    assert ledger.seal(20) == 20
    assert ledger.seal() == 0
    assert ledger.tokens(list(wanted)) == wanted
    store(ledger, 20, 21)
    assert ledger.seal() == 2
    assert ledger.tokens(["g-000001", "g-000021", "g-nowhere"]) == {"g-000001": awkward[1], "g-000021": tokens(21)}
    assert ledger.token_generations() == {f"g-{n:06d}" for n in range(22)}


def two_segments(ledger: Ledger, root: Path) -> tuple[Path, Path]:
    """Generations 0 to 2 in the first segment, 3 to 5 in the second."""
    for first in (0, 3):
        store(ledger, *range(first, first + 3))
        assert ledger.seal() == 3
    older, newer = segment_files(root)
    return older, newer


def test_a_flipped_bit_anywhere_in_a_segment_is_found(tmp_path: Path, ledger: Ledger) -> None:
    damaged, _ = two_segments(ledger, tmp_path)
    data = damaged.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 150)):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        (problem,) = ledger.verify_segments()
        assert damaged.name in problem and "damaged" in problem
        with pytest.raises(LedgerError, match=damaged.name):
            ledger.tokens(["g-000001"])
    assert ledger.tokens(["g-000004"]) == {"g-000004": tokens(4)}
    damaged.write_bytes(data)
    assert ledger.verify_segments() == []


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "folder"])
def test_a_segment_that_is_not_whole_is_named(tmp_path: Path, ledger: Ledger, how: str) -> None:
    damaged, _ = two_segments(ledger, tmp_path)
    data = damaged.read_bytes()
    damaged.unlink()
    if how == "folder":
        damaged.mkdir()
    elif how != "missing":
        damaged.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")
    (problem,) = ledger.verify_segments()
    assert damaged.name in problem
    with pytest.raises(LedgerError, match=damaged.name):
        ledger.tokens(["g-000001"])


def test_what_a_crash_left_of_a_segment_is_removed_at_open(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    store(ledger, 0, 1, 2)
    ledger.seal()
    store(ledger, 3)
    # A crash after the rename and before the ledger names it, one while writing, and a file of the user's.
    segments.write(tmp_path / "segments", [tokens(3)])
    (tmp_path / "segments" / "half.part").write_bytes(b"PAR1")
    (tmp_path / "segments" / "README").write_text("mine")
    ledger.close()
    ledger = Ledger.open(tmp_path)
    assert len(segment_files(tmp_path)) == 1
    assert {file.name for file in (tmp_path / "segments").iterdir()} == {segment_files(tmp_path)[0].name, "README", segments.LOCK}
    assert ledger.tokens(["g-000002", "g-000003"]) == {"g-000002": tokens(2), "g-000003": tokens(3)}
    assert ledger.seal() == 1 and ledger.verify_segments() == []
    ledger.close()


def test_a_segment_that_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    Ledger.open(tmp_path).close()
    with durable.locked(tmp_path / "segments" / segments.LOCK) as held:
        assert held
        name, _ = segments.write(tmp_path / "segments", [tokens(0)])
        Ledger.open(tmp_path).close()
        assert [file.name for file in segment_files(tmp_path)] == [name]
    Ledger.open(tmp_path).close()
    assert segment_files(tmp_path) == []


# ---- what was trained on


def test_a_sample_is_trained_once_per_lineage(ledger: Ledger) -> None:
    ledger.put_version(version("v-base"))
    ledger.publish(version("v-1", "v-base"), ["g-1", "g-2"])
    with pytest.raises(LedgerError, match="g-2 was already trained"):
        ledger.publish(version("v-2", "v-1"), ["g-2", "g-3"])
    assert ledger.trained("v-2") == set() and [one.id for one in ledger.versions()] == ["v-base", "v-1"]
    ledger.publish(version("v-2", "v-1"), ["g-3"])
    with pytest.raises(LedgerError, match="g-1 was already trained"):
        ledger.publish(version("v-3", "v-2"), ["g-1"])
    # After a rejected candidate its samples are free again, for its siblings.
    ledger.publish(version("v-1b", "v-base"), ["g-1", "g-2", "g-3"])
    assert ledger.trained_in_lineage("v-2") == {"g-1", "g-2", "g-3"} and ledger.lineage("v-2") == ["v-2", "v-1", "v-base"]


def test_a_registered_version_can_still_say_what_it_was_trained_on(ledger: Ledger) -> None:
    ledger.put_version(version("v-base"))
    ledger.put_version(version("v-1", "v-base"))
    ledger.publish(version("v-2", "v-1"), ["g-7"])
    with pytest.raises(LedgerError, match="g-7 was already trained"):
        ledger.publish(version("v-1", "v-base"), ["g-7"])
    ledger.publish(version("v-1", "v-base"), ["g-1"])
    assert ledger.trained("v-1") == {"g-1"}


def test_a_version_without_its_parent_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="v-nowhere"):
        ledger.publish(version("v-1", "v-nowhere"), ["g-1"])
    assert ledger.versions() == []


# ---- faults


def test_a_ledger_of_another_release_is_refused(tmp_path: Path) -> None:
    Ledger.open(tmp_path).close()
    with raw(tmp_path) as database:
        assert database.execute("SELECT version FROM schema_version").fetchall() == [(SCHEMA_VERSION,)]
        database.execute("INSERT INTO schema_version VALUES (?)", (SCHEMA_VERSION + 1,))
    with pytest.raises(LedgerError, match=f"schema {SCHEMA_VERSION + 1}, this release reads {SCHEMA_VERSION}"):
        Ledger.open(tmp_path)


def test_a_ledger_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    """Nothing is lost, the new table is append-only like the others, and two processes may do it at once."""
    ledger = Ledger.open(tmp_path)
    ledger.put_key(Key("k-1", "00", "acme", "ann", "code", ["serve"], 1))
    ledger.close()
    with raw(tmp_path) as database:  # as the first release left it
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            if name.startswith(("revocations", "schema_version")):
                database.execute(f"DROP TRIGGER {name}")
        database.execute("DROP TABLE revocations")
        database.execute("UPDATE schema_version SET version = 1")
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: Ledger.open(tmp_path), range(4)))
    for one in opened:
        assert [key.id for key in one.keys()] == ["k-1"] and one.revoked() == set()  # noqa: SIM118
    opened[0].revoke(Revocation("k-1", "laptop lost", 2))
    opened[0].revoke(Revocation("k-1", "again", 3))
    assert opened[1].revoked() == {"k-1"}
    with pytest.raises(LedgerError, match="no key k-2"):
        opened[0].revoke(Revocation("k-2", "", 2))
    for one in opened:
        one.close()
    with raw(tmp_path) as database:
        assert database.execute("SELECT version FROM schema_version").fetchall() == [(1,), (SCHEMA_VERSION,)]
        with pytest.raises(sqlite3.DatabaseError, match="append-only"):
            database.execute("DELETE FROM revocations")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(LedgerError, match="not a database.*restore ledger.sqlite"):
        Ledger.open(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"server\.data"):
        Ledger.open(tmp_path / "file")


def test_segments_without_their_ledger_are_not_taken_for_strays(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    store(ledger, 0)
    ledger.seal()
    ledger.close()
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(LedgerError, match="restore ledger.sqlite"):
        Ledger.open(tmp_path)
    assert len(segment_files(tmp_path)) == 1


_FULL = """
import resource, sys
from pathlib import Path
from keepgrad.errors import LedgerError
from keepgrad.ledger import Ledger
from tests.ledgers import generation, tokens

ledger = Ledger.open(Path(sys.argv[1]))
spent = max(file.stat().st_size for file in Path(sys.argv[1]).rglob("*") if file.is_file())
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]) or spent + 400_000, resource.RLIM_INFINITY))
try:
    if sys.argv[2] == "seal":
        ledger.seal()
    else:
        for first in range(100, 100_000, 10):
            ledger.add_generations([(generation(n), tokens(n)) for n in range(first, first + 10)])
            print(first + 10, flush=True)
except LedgerError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(error, file=sys.stderr)
"""


def when_full(root: Path, what: str, limit: int) -> tuple[list[int], str]:
    """Do `what` in a process that may not make a file larger than `limit` bytes. Returns what it acknowledged, and its complaint."""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", _FULL, str(root), what, str(limit)], capture_output=True, text=True, env=here, timeout=60)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()], done.stderr.strip()


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    ledger = Ledger.open(tmp_path)
    acknowledged, complaint = when_full(tmp_path, "add", 0)
    assert "\n" not in complaint and "refused" in complaint and "disk" in complaint
    assert acknowledged
    assert [one for _, one in ledger.generations()] == [generation(n) for n in range(100, acknowledged[-1])]
    _, complaint = when_full(tmp_path, "seal", 512)
    assert "\n" not in complaint and "could not write segment" in complaint and "free some disk" in complaint
    assert segment_files(tmp_path) == [] and list(tmp_path.glob("segments/*.part")) == []
    # Once there is room again everything goes on.
    store(ledger, 0)
    assert ledger.seal() == acknowledged[-1] - 99
    assert len(ledger.tokens([one.id for _, one in ledger.generations()])) == ledger.last_seq()
    ledger.close()


# ---- several at once


def _work(root: str, first: int, count: int) -> None:
    ledger = Ledger.open(Path(root))
    for n in range(first, first + count):
        store(ledger, n)
        ledger.add_events([(event(n, n), key_of(n))])
        if n % 10 == 0:
            ledger.seal()
    ledger.close()


def test_processes_that_open_and_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(str(tmp_path), first, 25)) for first in (0, 20, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    ledger = Ledger.open(tmp_path)
    wanted = sorted({*range(45), *range(100, 125)})
    rows = ledger.generations()
    assert [seq for seq, _ in rows] == list(range(1, len(wanted) + 1))
    assert sorted(one.seed for _, one in rows) == wanted
    assert ledger.tokens([one.id for _, one in rows]) == {f"g-{n:06d}": tokens(n) for n in wanted}
    assert ledger.verify_segments() == []
    ledger.close()


def test_threads_share_one_ledger(ledger: Ledger) -> None:
    troubles: list[Exception] = []

    def run(first: int) -> None:
        try:
            for n in range(first, first + 10):
                store(ledger, n)
                ledger.traffic()
                ledger.seal(5)
                assert ledger.tokens([f"g-{n:06d}"]) == {f"g-{n:06d}": tokens(n)}
        except (AssertionError, LedgerError) as error:
            troubles.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(0, 60, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert troubles == []
    assert sorted(one.seed for _, one in ledger.generations()) == list(range(60))


def test_traffic_is_that_of_the_last_writer_in_any_process(tmp_path: Path, ledger: Ledger) -> None:
    other = Ledger.open(tmp_path)
    for name in ("v-a", "v-b", "v-a"):
        other.put_traffic(traffic(name))
        assert ledger.traffic() == traffic(name)
    assert [one.incumbent for one in ledger.traffic_history()] == ["v-a", "v-b", "v-a"]
    other.close()


# ---- speed: CPU seconds, which other processes do not stretch; several times what it takes


def test_reading_traffic_takes_less_than_100_us(ledger: Ledger) -> None:
    ledger.put_traffic(traffic("v-a"))
    best = min(_seconds(lambda: [ledger.traffic() for _ in range(200)]) for _ in range(5))
    assert best / 200 < 100e-6


def test_a_window_of_thousands_is_quick(ledger: Ledger) -> None:
    batch = [(generation(n), tokens(n)) for n in range(2000)]
    told = [(event(n, n // 3), key_of(n // 3)) for n in range(6000)]
    ids = [one.id for one, _ in batch]
    steps: list[tuple[float, Callable[[], Any]]] = [
        (1.0, lambda: ledger.add_generations(batch)), (1.5, lambda: ledger.add_events(told)), (0.5, ledger.generations),
        (1.0, lambda: ledger.events(ids)), (0.5, ledger.user_clocks), (3.0, ledger.seal), (2.0, lambda: ledger.tokens(ids)),
    ]  # fmt: skip
    for limit, step in steps:
        assert _seconds(step) < limit


def _seconds(step: Callable[[], Any]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began
