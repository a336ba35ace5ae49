"""The ledger itself: what the gateway, the cycle and the operator write, and how everyone reads it. SQLAlchemy Core on SQLite.

Nothing is ever updated or deleted. A write has returned only when it survives power loss (WAL, synchronous=FULL).
One writer per table: the gateway writes generations, spool, segments, events and counters; the cycle writes the rest; keys and traffic are
also the operator's. All of them, and any reader, may have the same file open.
"""

import math
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from keepgrad import durable
from keepgrad.errors import ConflictError, LedgerError
from keepgrad.ledger import schema, segments
from keepgrad.ledger.segments import Segment
from keepgrad.records import Event, GateVerdict, Generation, Key, Revocation, Score, Tokens, Traffic, Version, Window

_T = TypeVar("_T")
_CHUNK = 500
_PATIENCE_S = 30
"""How long a write waits for another process's."""
_FOLDER = "segments"
_TRAFFIC = "SELECT payload FROM traffic ORDER BY seq DESC LIMIT 1"


class Ledger:
    """One open ledger; safe to share between threads. Open it once per process. Everything here may raise LedgerError."""

    def __init__(self, root: Path, engine: sa.Engine) -> None:
        self._root, self._engine = root, engine
        self._folder = root / _FOLDER
        # Traffic is read at every request, so one connection is kept for it alone, with the statement prepared and the record decoded.
        self._traffic_lock = threading.Lock()
        self._traffic_connection: sa.PoolProxiedConnection | None = None
        self._traffic_last: tuple[bytes, Traffic] | None = None

    @classmethod
    def open(cls, root: Path) -> "Ledger":
        """Open, or make, the ledger in `root`, and clear away what a crash left. Raises LedgerError if it cannot be used."""
        try:
            (root / _FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"cannot make the data folder {root} ({error.strerror}): set server.data to a folder you may write"
            ) from error
        engine = sa.create_engine(
            f"sqlite:///{root / 'ledger.sqlite'}", connect_args={"timeout": _PATIENCE_S}, pool_size=16, max_overflow=16
        )
        sa.event.listen(engine, "connect", _prepare)
        ledger = cls(root, engine)
        try:
            ledger._check_schema()
            ledger._sweep()
        except BaseException:
            ledger.close()
            raise
        return ledger

    def close(self) -> None:
        """Close every connection."""
        with self._traffic_lock:
            if self._traffic_connection is not None:
                self._traffic_connection.close()
                self._traffic_connection = None
        self._engine.dispose()

    # ---- generations, tokens, events

    def add_generations(self, items: Sequence[tuple[Generation, Tokens]]) -> None:
        """Store generations with their arrays in one durable transaction.

        The same again is ignored. Raises ConflictError, and stores none of them, if an id is there with another record or other arrays.
        """
        with self._write() as connection:
            stored = self._payloads(connection, schema.generations, [generation.id for generation, _ in items])
            rows, fresh, again = [], dict[str, Tokens](), list[Tokens]()
            for generation, tokens in items:
                _check_tokens(generation, tokens)
                if (payload := _new(stored, generation.id, generation)) is None:
                    again.append(tokens)
                    continue
                fresh[generation.id] = tokens
                rows.append(
                    {"id": generation.id, "org": generation.org, "user": generation.user, "key": generation.key,
                     "conversation": generation.conversation, "client_ms": generation.client_ms, "payload": payload}
                )  # fmt: skip
            kept = fresh | self.tokens([tokens.generation for tokens in again if tokens.generation not in fresh])
            for tokens in again:
                if kept.get(tokens.generation, tokens) != tokens:
                    raise ConflictError(
                        f"generation {tokens.generation} is already stored with other token arrays: use a new id for a new one"
                    )
            _insert(connection, schema.generations, rows)
            _insert(connection, schema.spool, [{"generation": one, "payload": msgspec.msgpack.encode(fresh[one])} for one in fresh])

    def generation(self, identity: str) -> Generation | None:
        """One generation by id."""
        with self._read() as connection:
            row = connection.execute(sa.select(schema.generations.c.payload).where(schema.generations.c.id == identity)).first()
        return msgspec.json.decode(row[0], type=Generation) if row else None

    def generations(self, first_seq: int = 1, last_seq: int | None = None) -> list[tuple[int, Generation]]:
        """Sequence number and generation, in order, both ends included."""
        table = schema.generations
        query = sa.select(table.c.seq, table.c.payload).where(table.c.seq >= first_seq).order_by(table.c.seq)
        if last_seq is not None:
            query = query.where(table.c.seq <= last_seq)
        decode = msgspec.json.Decoder(Generation).decode
        with self._read() as connection:
            return [(seq, decode(payload)) for seq, payload in connection.execute(query)]

    def last_seq(self) -> int:
        """The highest sequence number given to a generation; 0 if there is none. Counts rows that were deleted by force."""
        with self._read() as connection:
            given = connection.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = 'generations'").scalar()
        return int(given or 0)

    def generation_keys(self, identities: Sequence[str]) -> dict[str, str]:
        """Generation id to the key it was served to, for those that are known."""
        table, found = schema.generations, dict[str, str]()
        with self._read() as connection:
            for part in _chunks(identities):
                found.update((one, key) for one, key in connection.execute(sa.select(table.c.id, table.c.key).where(table.c.id.in_(part))))
        return found

    def last_of_conversation(self, conversation: str, org: str) -> Generation | None:
        """The conversation's newest generation, which says which version it is leased to."""
        table = schema.generations
        query = sa.select(table.c.payload).where(table.c.conversation == conversation, table.c.org == org)
        with self._read() as connection:
            row = connection.execute(query.order_by(table.c.seq.desc()).limit(1)).first()
        return msgspec.json.decode(row[0], type=Generation) if row else None

    def add_events(self, items: Sequence[tuple[Event, str]]) -> list[str]:
        """Store (event, key id) pairs in one durable transaction.

        Returns for each "stored", "duplicate" or "waiting" (stored, but its generation is not known yet). Raises ConflictError, and stores
        none of them, if an id is there with other content.
        """
        with self._write() as connection:
            stored = self._payloads(connection, schema.events, [event.id for event, _ in items])
            known = self._known(connection, [event.generation for event, _ in items])
            rows, answers = [], []
            for event, key in items:
                if (payload := _new(stored, event.id, event)) is None:
                    answers.append("duplicate")
                    continue
                rows.append({"id": event.id, "generation": event.generation, "key": key, "at_ms": event.at_ms, "payload": payload})
                answers.append("stored" if event.generation in known else "waiting")
            _insert(connection, schema.events, rows)
        return answers

    def events(self, identities: Sequence[str]) -> dict[str, list[Event]]:
        """Generation id to its events in the order they were stored; only those sent with the key the generation was served to."""
        table, found = schema.events, dict[str, list[Event]]()
        decode = msgspec.json.Decoder(Event).decode
        query = sa.select(table.c.payload).select_from(_owned_events()).order_by(table.c.seq)
        with self._read() as connection:
            for part in _chunks(identities):
                for (payload,) in connection.execute(query.where(table.c.generation.in_(part))):
                    event = decode(payload)
                    found.setdefault(event.generation, []).append(event)
        return found

    def event_generations(self) -> dict[str, int]:
        """Every generation id that an event names, with the number of its events (the audit looks for those that are missing)."""
        table = schema.events
        with self._read() as connection:
            rows = connection.execute(sa.select(table.c.generation, sa.func.count()).group_by(table.c.generation))
            return {generation: count for generation, count in rows}

    def missing_events(self) -> list[int]:
        """Numbers of events that were written and are there no more. Numbers are given without a gap, and never twice."""
        table = schema.events
        with self._read() as connection:
            given = connection.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = 'events'").scalar() or 0
            if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() == given:
                return []
            return sorted(set(range(1, given + 1)) - set(connection.execute(sa.select(table.c.seq)).scalars()))

    def user_clocks(self) -> dict[str, int]:
        """User to the latest time of that user's client clock, in ms, over generations and events."""
        user = schema.generations.c.user
        asked = sa.select(user, sa.func.max(schema.generations.c.client_ms)).group_by(user)
        told = sa.select(user, sa.func.max(schema.events.c.at_ms)).select_from(_owned_events()).group_by(user)
        clocks: dict[str, int] = {}
        with self._read() as connection:
            for query in (asked, told):
                for name, ms in connection.execute(query):
                    clocks[name] = max(clocks.get(name, 0), ms)
        return clocks

    # ---- token arrays

    def tokens(self, identities: Sequence[str]) -> dict[str, Tokens]:
        """Arrays by generation id, from spool and segments. Raises LedgerError naming a segment that is missing or damaged."""
        found: dict[str, Tokens] = {}
        wanted: dict[int, list[str]] = {}
        spool, rows = schema.spool.c, schema.segment_rows.c
        decode = msgspec.msgpack.Decoder(Tokens).decode
        with self._read() as connection:
            for part in _chunks(identities):
                # The spool first: what is sealed between the two queries is then found in both, never in neither.
                for (payload,) in connection.execute(sa.select(spool.payload).where(spool.generation.in_(part))):
                    tokens = decode(payload)
                    found[tokens.generation] = tokens
                for one, segment in connection.execute(sa.select(rows.generation, rows.segment).where(rows.generation.in_(part))):
                    wanted.setdefault(segment, []).append(one)
            known = self._segments(connection) if wanted else {}
        for number, names in wanted.items():
            if number not in known:
                raise LedgerError(f"segment {number} of {self._root} is not in the ledger any more: restore ledger.sqlite from a copy")
            relative, segment = known[number]
            found.update((one.generation, one) for one in segments.read(self._root / relative, segment, names))
        return found

    def token_generations(self) -> set[str]:
        """Every generation id that has arrays, in the spool or a segment."""
        with self._read() as connection:
            spooled = connection.execute(sa.select(schema.spool.c.generation)).scalars().all()
            sealed = connection.execute(sa.select(schema.segment_rows.c.generation)).scalars().all()
        return {*spooled, *sealed}

    def seal(self, min_rows: int = 1) -> int:
        """Move the spool, if it holds `min_rows`, into one Parquet segment; returns the rows moved.

        The file is complete and durable under its final name before the ledger names it; a crash in between leaves a stray, which nobody
        reads and the next to open the ledger removes.
        """
        with self._read() as connection:
            if int(connection.execute(sa.select(sa.func.count(schema.spool.c.generation))).scalar_one()) < max(min_rows, 1):
                return 0
        with self._folder_lock(wait=True):
            with self._read() as connection:
                rows = connection.execute(sa.select(schema.spool.c.seq, schema.spool.c.payload).order_by(schema.spool.c.seq)).all()
            if len(rows) < max(min_rows, 1):
                return 0
            tokens = [msgspec.msgpack.decode(payload, type=Tokens) for _, payload in rows]
            file, segment = segments.write(self._folder, tokens)
            # Should this fail, the file stays for the sweep: only the ledger can say whether a failed commit was one.
            with self._write() as connection:
                row = {"path": f"{_FOLDER}/{file}", "payload": _encode(segment)}
                number = connection.execute(schema.segments.insert().returning(schema.segments.c.seq), row).scalar_one()
                _insert(connection, schema.segment_rows, [{"generation": one.generation, "segment": number} for one in tokens])
                connection.execute(schema.spool.delete().where(schema.spool.c.seq <= rows[-1][0]))
        return len(rows)

    def verify_segments(self) -> list[str]:
        """One sentence per segment that is missing or not what was written."""
        with self._read() as connection:
            known = self._segments(connection)
        return [found for relative, segment in known.values() if (found := segments.trouble(self._root / relative, segment))]

    # ---- what the cycle and the operator write; each put is harmless when repeated, and a ConflictError with other content under the id

    def put_version(self, version: Version) -> None:
        """Register a version."""
        self._put(schema.versions, version.id, version)

    def versions(self) -> list[Version]:
        """Registered versions, oldest first."""
        return self._all(schema.versions, Version)

    def publish(self, version: Version, generations: Sequence[str]) -> None:
        """Register a trained version and the generations it was trained on, in one transaction; harmless when repeated.

        Raises LedgerError if one of them was already trained on by an ancestor (or descendant), or if the parent is not registered.
        """
        with self._write() as connection:
            payload = _new(self._payloads(connection, schema.versions, [version.id]), version.id, version)
            mine = self._trained(connection, [version.id])
            if mine and mine != set(generations):
                raise ConflictError(f"version {version.id} is already published with other samples: publish a new version for new ones")
            if mine:
                return
            parents = self._parents(connection) | {version.id: version.parent}
            if version.parent and version.parent not in parents:
                raise LedgerError(f"version {version.id} has the parent {version.parent}, which is not registered: register that first")
            line = _line(parents, version.id)
            related = {*line, *(other for other in parents if version.id in _line(parents, other))}
            twice = self._trained(connection, sorted(related)) & set(generations)
            if twice:
                raise LedgerError(
                    f"generation {min(twice)} was already trained on in the lineage of {version.id}: a sample is trained once"
                )
            if payload is not None:
                _insert(connection, schema.versions, [{"id": version.id, "payload": payload}])
            _insert(connection, schema.trained, [{"generation": one, "version": version.id} for one in dict.fromkeys(generations)])

    def lineage(self, version: str) -> list[str]:
        """The version, its parent, and so on to the base."""
        with self._read() as connection:
            return _line(self._parents(connection), version)

    def trained(self, version: str) -> set[str]:
        """Generations that this version's own step was trained on."""
        with self._read() as connection:
            return self._trained(connection, [version])

    def trained_in_lineage(self, version: str) -> set[str]:
        """Generations that this version or an ancestor was trained on."""
        with self._read() as connection:
            return self._trained(connection, _line(self._parents(connection), version))

    def put_traffic(self, record: Traffic) -> None:
        """From now on this decides who gets which version. The very record that is in force already is not written again."""
        payload = _encode(record)
        with self._write() as connection:
            if connection.exec_driver_sql(_TRAFFIC).scalar() != payload:
                _insert(connection, schema.traffic, [{"payload": payload}])

    def traffic(self) -> Traffic | None:
        """The record in force. Costs a few microseconds, so that it can be asked at every request."""
        try:
            with self._traffic_lock:
                if self._traffic_connection is None:
                    self._traffic_connection = self._engine.raw_connection()
                driver: Any = self._traffic_connection.driver_connection
                row = driver.execute(_TRAFFIC).fetchone()
                if row is None:
                    return None
                if self._traffic_last is None or self._traffic_last[0] != row[0]:
                    self._traffic_last = row[0], msgspec.json.decode(row[0], type=Traffic)
                return self._traffic_last[1]
        except (sqlite3.Error, sa.exc.DBAPIError) as error:
            raise self._refusal(error) from error

    def traffic_history(self) -> list[Traffic]:
        """All records, oldest first."""
        return self._all(schema.traffic, Traffic)

    def put_window(self, window: Window) -> None:
        """Close a window."""
        self._put(schema.windows, window.id, window)

    def windows(self) -> list[Window]:
        """All windows, oldest first."""
        return self._all(schema.windows, Window)

    def put_scores(self, window: str, found: Sequence[Score]) -> None:
        """Keep a window's scores, in one transaction."""
        table = schema.scores
        with self._write() as connection:
            query = sa.select(table.c.generation, table.c.payload).where(table.c.window == window)
            stored = {generation: payload for generation, payload in connection.execute(query)}
            rows = [
                {"window": window, "generation": score.generation, "payload": payload}
                for score in found
                if (payload := _new(stored, score.generation, score)) is not None
            ]
            _insert(connection, table, rows)

    def scores(self, window: str) -> list[Score]:
        """A window's scores, by generation id."""
        table = schema.scores
        decode = msgspec.json.Decoder(Score).decode
        with self._read() as connection:
            query = sa.select(table.c.payload).where(table.c.window == window).order_by(table.c.generation)
            return [decode(payload) for payload in connection.execute(query).scalars()]

    def put_verdict(self, verdict: GateVerdict) -> None:
        """Keep a verdict."""
        self._put(schema.verdicts, verdict.id, verdict)

    def verdicts(self) -> list[GateVerdict]:
        """All verdicts, oldest first."""
        return self._all(schema.verdicts, GateVerdict)

    def start_stage(self, cycle: str, stage: str) -> None:
        """Note that a stage of a cycle begins."""
        self._stage(cycle, stage, {"started": True})

    def put_stage(self, cycle: str, stage: str, seconds: float, counts: Mapping[str, Any]) -> None:
        """Note that a stage of a cycle has ended, how long it took and what it counted."""
        self._stage(cycle, stage, {"started": False, "seconds": seconds, "counts": counts})

    def stages(self) -> list[dict[str, Any]]:
        """Each begin and end of a stage, oldest first: {cycle, stage, finished, seconds, counts, at_ms}; a begin has 0 s and no counts."""
        table = schema.stages
        with self._read() as connection:
            rows = connection.execute(sa.select(table.c.cycle, table.c.stage, table.c.payload).order_by(table.c.seq)).all()
        found = []
        for cycle, stage, payload in rows:
            row = {"seconds": 0.0, "counts": {}, **msgspec.json.decode(payload)}
            found.append({"cycle": cycle, "stage": stage, "finished": not row.pop("started"), **row})
        return found

    def current_stage(self) -> str:
        """The stage under way, or "idle"."""
        table = schema.stages
        with self._read() as connection:
            row = connection.execute(sa.select(table.c.stage, table.c.payload).order_by(table.c.seq.desc()).limit(1)).first()
        return row[0] if row and msgspec.json.decode(row[1])["started"] else "idle"

    def put_key(self, key: Key) -> None:
        """Keep an access key (its hash only)."""
        self._put(schema.keys, key.id, key)

    def keys(self) -> list[Key]:
        """All keys, oldest first."""
        return self._all(schema.keys, Key)

    def revoke(self, record: Revocation) -> None:
        """End a key. Raises LedgerError if there is no such key; a key that has been revoked stays so."""
        if record.id not in {key.id for key in self.keys()}:
            raise LedgerError(f"there is no key {record.id}: `keepgrad key list` shows them")
        if record.id not in self.revoked():
            self._put(schema.revocations, record.id, record)

    def revoked(self) -> set[str]:
        """Ids of the keys that were revoked."""
        table = schema.revocations
        with self._read() as connection:
            return set(connection.execute(sa.select(table.c.id)).scalars())

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        with self._write() as connection:
            _insert(connection, schema.counters, [{"name": name, "n": n}])

    def counters(self) -> dict[str, int]:
        """Counter to its sum."""
        table = schema.counters
        with self._read() as connection:
            return {name: n for name, n in connection.execute(sa.select(table.c.name, sa.func.sum(table.c.n)).group_by(table.c.name))}

    # ---- inside

    def _check_schema(self) -> None:
        with self._read() as connection:
            made = sa.inspect(connection).has_table("schema_version")
        if not made:
            with self._write() as connection:
                # Another process may have been faster since.
                if not sa.inspect(connection).has_table("schema_version"):
                    if any(self._folder.glob("*.parquet")):
                        raise LedgerError(
                            f"{self._root} holds segments but no ledger that names them: restore ledger.sqlite from a copy, "
                            "or move the folder away to begin anew"
                        )
                    schema.create(connection)
        with self._read() as connection:
            found = connection.execute(sa.select(sa.func.max(schema.schema_version.c.version))).scalar()
        if found is not None and 0 < found < schema.SCHEMA_VERSION:
            with self._write() as connection:  # whoever comes second finds it done
                found = connection.execute(sa.select(sa.func.max(schema.schema_version.c.version))).scalar_one()
                if found < schema.SCHEMA_VERSION:
                    schema.migrate(connection, found)
                found = max(found, schema.SCHEMA_VERSION)
        if found != schema.SCHEMA_VERSION:
            raise LedgerError(
                f"the ledger in {self._root} has schema {found}, this release reads {schema.SCHEMA_VERSION}: use the release that made it"
            )

    def _sweep(self) -> None:
        """Remove what a crash left of a segment. Not while another process seals: its file is not named yet."""
        with self._folder_lock(wait=False) as held:
            if held:
                with self._read() as connection:
                    named = {Path(relative).name for relative, _ in self._segments(connection).values()}
                segments.sweep(self._folder, named)

    @contextmanager
    def _folder_lock(self, wait: bool) -> Iterator[bool]:
        try:
            with durable.locked(self._folder / segments.LOCK, wait) as held:
                yield held
        except OSError as error:
            raise LedgerError(f"cannot use the segment folder {self._folder} ({error.strerror}): let this user write it") from error

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except (sa.exc.DBAPIError, sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
            raise self._refusal(error) from error

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        """One transaction, durable when the block has ended; nothing of it is kept if the block raises."""
        with self._read() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                driver: Any = connection.connection.driver_connection
                if driver.in_transaction:  # a full disk may have ended it already
                    connection.exec_driver_sql("ROLLBACK")
                raise

    def _refusal(self, error: Exception) -> LedgerError:
        """What to tell the user about an error of the database."""
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        mend = {
            sqlite3.SQLITE_FULL: "free some disk and try again; nothing of this write was kept",
            sqlite3.SQLITE_IOERR: "check the disk, free some of it and try again",
            sqlite3.SQLITE_BUSY: f"another process has been writing it for {_PATIENCE_S} s: see which one hangs and end it",
            sqlite3.SQLITE_READONLY: "let this user write the folder",
            sqlite3.SQLITE_CANTOPEN: "let this user read and write the folder",
            sqlite3.SQLITE_CORRUPT: "restore ledger.sqlite from a copy",
            sqlite3.SQLITE_NOTADB: "restore ledger.sqlite from a copy, or move the file away to begin anew",
            sqlite3.SQLITE_CONSTRAINT: "write a new record instead",
        }.get(code, "mend what was sent and send it again")
        return LedgerError(f"the ledger in {self._root} refused ({cause}): {mend}")

    def _payloads(self, connection: sa.Connection, table: sa.Table, identities: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for part in _chunks(identities):
            query = sa.select(table.c.id, table.c.payload).where(table.c.id.in_(part))
            found.update((identity, payload) for identity, payload in connection.execute(query))
        return found

    def _known(self, connection: sa.Connection, identities: Sequence[str]) -> set[str]:
        table, found = schema.generations, set[str]()
        for part in _chunks(identities):
            found.update(connection.execute(sa.select(table.c.id).where(table.c.id.in_(part))).scalars())
        return found

    def _segments(self, connection: sa.Connection) -> dict[int, tuple[str, Segment]]:
        table = schema.segments
        rows = connection.execute(sa.select(table.c.seq, table.c.path, table.c.payload).order_by(table.c.seq))
        return {seq: (relative, msgspec.json.decode(payload, type=Segment)) for seq, relative, payload in rows}

    def _parents(self, connection: sa.Connection) -> dict[str, str]:
        payloads = connection.execute(sa.select(schema.versions.c.payload)).scalars()
        return {version.id: version.parent for version in (msgspec.json.decode(payload, type=Version) for payload in payloads)}

    def _trained(self, connection: sa.Connection, versions: Sequence[str]) -> set[str]:
        table, found = schema.trained, set[str]()
        for part in _chunks(versions):
            found.update(connection.execute(sa.select(table.c.generation).where(table.c.version.in_(part))).scalars())
        return found

    def _stage(self, cycle: str, stage: str, content: dict[str, Any]) -> None:
        payload = msgspec.json.encode({**content, "at_ms": int(time.time() * 1000)})
        with self._write() as connection:
            _insert(connection, schema.stages, [{"cycle": cycle, "stage": stage, "payload": payload}])

    def _put(self, table: sa.Table, identity: str, record: msgspec.Struct) -> None:
        with self._write() as connection:
            payload = _new(self._payloads(connection, table, [identity]), identity, record)
            if payload is not None:
                _insert(connection, table, [{"id": identity, "payload": payload}])

    def _all(self, table: sa.Table, kind: type[_T]) -> list[_T]:
        decode = msgspec.json.Decoder(kind).decode
        with self._read() as connection:
            return [decode(payload) for payload in connection.execute(sa.select(table.c.payload).order_by(table.c.seq)).scalars()]


def _prepare(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # we say BEGIN IMMEDIATE ourselves
    # The last two only do something on macOS, whose fsync stops at the drive's own cache.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "fullfsync=ON", "checkpoint_fullfsync=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _owned_events() -> sa.Join:
    """Events beside the generation they are about, where the same key sent and was served (P8)."""
    events, generations = schema.events, schema.generations
    return events.join(generations, sa.and_(events.c.generation == generations.c.id, events.c.key == generations.c.key))


def _line(parents: Mapping[str, str], version: str) -> list[str]:
    """The version, its parent, and so on."""
    line: list[str] = []
    while version and version not in line:
        line.append(version)
        version = parents.get(version, "")
    return line


def _check_tokens(generation: Generation, tokens: Tokens) -> None:
    if tokens.generation != generation.id:
        raise LedgerError(f"generation {generation.id} came with the arrays of {tokens.generation}: send each with its own")
    if not all(map(math.isfinite, tokens.logprobs)) or not all(math.isfinite(value) for row in tokens.features for value in row):
        raise LedgerError(
            f"the log-probs or features of generation {generation.id} are not all finite numbers: look at the engine's version"
        )


def _encode(record: msgspec.Struct) -> bytes:
    """As JSON. Refuses what could not be read back, for it could never be taken out again: JSON writes NaN and infinity as null."""
    try:
        payload = msgspec.json.encode(record)
        if b"null" in payload:
            msgspec.json.decode(payload, type=type(record))
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise LedgerError(f"a {type(record).__name__} holds what cannot be stored ({error}): no NaN, infinity or lone surrogate") from error
    return payload


def _new(stored: dict[str, bytes], identity: str, record: msgspec.Struct) -> bytes | None:
    """The payload to store, remembered in `stored`; None if the very same is there; ConflictError if something else is."""
    payload = _encode(record)
    there = stored.setdefault(identity, payload)
    if there is payload:
        return payload
    # A field added since the stored one was written takes its default, so other bytes need not be another record.
    if there != payload and msgspec.json.decode(there, type=type(record)) != record:
        what = type(record).__name__
        raise ConflictError(f"{what} {identity} is already stored with other content: use a new id for a new {what}")
    return None


def _insert(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(table.insert(), rows)


def _chunks(items: Iterable[str]) -> Iterator[list[str]]:
    unique = list(dict.fromkeys(items))
    for at in range(0, len(unique), _CHUNK):
        yield unique[at : at + _CHUNK]
