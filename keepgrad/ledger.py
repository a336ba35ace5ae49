"""The append-only store: SQLAlchemy Core on SQLite, token arrays in Parquet segments. Nothing here is ever updated or deleted.

Every table holds one kind of record as JSON beside the few columns that are looked up by. Triggers refuse UPDATE, DELETE and an INSERT of a key
that is there already (which is what INSERT OR REPLACE and upserts would need), whoever opens the file. The one exception is the spool of token
arrays: its rows may go once a segment holds them. A write has returned only when it survives power loss (WAL, synchronous=FULL).
One writer per table: the gateway writes generations, spool, segments, events and counters; the cycle the rest; keys and traffic also the operator.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa

from keepgrad.errors import ConflictError, LedgerError
from keepgrad.records import Event, GateVerdict, Generation, Key, Score, Tokens, Traffic, Version, Window, uuid7

SCHEMA_VERSION = 1
_T = TypeVar("_T")
_CHUNK = 500

_meta = sa.MetaData()
_schema = sa.Table("schema_version", _meta, sa.Column("version", sa.Integer, primary_key=True))


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(
        name,
        _meta,
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        *columns,
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )


def _id(name: str = "id") -> sa.Column[Any]:
    return sa.Column(name, sa.String, nullable=False, unique=True)


generations = _table(
    "generations", _id(), sa.Column("org", sa.String), sa.Column("user", sa.String), sa.Column("key", sa.String),
    sa.Column("conversation", sa.String, index=True), sa.Column("client_ms", sa.Integer),
)  # fmt: skip
events = _table(
    "events", _id(), sa.Column("generation", sa.String, index=True), sa.Column("key", sa.String), sa.Column("at_ms", sa.Integer)
)
spool = _table("spool", _id("generation"))
segments = _table("segments", _id("path"))
segment_rows = sa.Table(
    "segment_rows", _meta, sa.Column("generation", sa.String, primary_key=True), sa.Column("segment", sa.Integer, nullable=False)
)
versions = _table("versions", _id())
trained = sa.Table(
    "trained", _meta, sa.Column("generation", sa.String, primary_key=True), sa.Column("version", sa.String, primary_key=True)
)
traffic = _table("traffic")
windows = _table("windows", _id())
scores = sa.Table(
    "scores", _meta, sa.Column("window", sa.String, primary_key=True), sa.Column("generation", sa.String, primary_key=True),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)  # fmt: skip
verdicts = _table("verdicts", _id())
stages = _table("stages", sa.Column("cycle", sa.String, index=True), sa.Column("stage", sa.String))
keys = _table("keys", _id())
counters = sa.Table(
    "counters", _meta, sa.Column("seq", sa.Integer, primary_key=True), sa.Column("name", sa.String), sa.Column("n", sa.Integer),
    sqlite_autoincrement=True,
)  # fmt: skip

_KEYS = {
    "segment_rows": ("generation",), "trained": ("generation", "version"), "scores": ("window", "generation"), "schema_version": ("version",)
}  # fmt: skip


def _triggers() -> Iterator[str]:
    for table in _meta.tables.values():
        name = table.name
        deny = f"SELECT RAISE(ABORT, 'the ledger is append-only: {name} may not be changed')"
        yield f"CREATE TRIGGER IF NOT EXISTS {name}_no_update BEFORE UPDATE ON {name} BEGIN {deny}; END"
        held = "WHEN NOT EXISTS (SELECT 1 FROM segment_rows WHERE generation = OLD.generation)" if name == "spool" else ""
        yield f"CREATE TRIGGER IF NOT EXISTS {name}_no_delete BEFORE DELETE ON {name} {held} BEGIN {deny}; END"
        unique = [[column.name] for column in table.columns if column.unique]
        unique.append(list(_KEYS.get(name, ("seq",))))
        same = " OR ".join("(" + " AND ".join(f'"{column}" = NEW."{column}"' for column in group) + ")" for group in unique)
        yield (
            f"CREATE TRIGGER IF NOT EXISTS {name}_no_replace BEFORE INSERT ON {name} "
            f"WHEN EXISTS (SELECT 1 FROM {name} WHERE {same}) BEGIN {deny}; END"
        )


class Ledger:
    """One open ledger; safe to share between threads. Open it once per process."""

    def __init__(self, root: Path, engine: sa.Engine) -> None:
        self._root, self._engine = root, engine

    @classmethod
    def open(cls, root: Path) -> "Ledger":
        """Open, or make, the ledger in `root`. Raises LedgerError if it cannot be written or was made by another release."""
        try:
            (root / "segments").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(f"cannot make the data folder {root} ({error.strerror}): set [server] data to a folder you may write") from error
        engine = sa.create_engine(f"sqlite:///{root / 'ledger.sqlite'}", connect_args={"timeout": 30}, pool_size=16, max_overflow=16)
        sa.event.listen(engine, "connect", _prepare)
        ledger = cls(root, engine)
        with ledger._write() as connection:
            if not sa.inspect(connection).has_table("schema_version"):
                _meta.create_all(connection)
                for trigger in _triggers():
                    connection.exec_driver_sql(trigger)
                connection.execute(_schema.insert().values(version=SCHEMA_VERSION))
            found = connection.execute(sa.select(sa.func.max(_schema.c.version))).scalar()
        if found != SCHEMA_VERSION:
            raise LedgerError(f"the ledger in {root} has schema {found}, this release reads {SCHEMA_VERSION}: use the release that made it")
        return ledger

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    # ---- generations, tokens, events

    def add_generations(self, items: Sequence[tuple[Generation, Tokens]]) -> None:
        """Store generations with their arrays in one durable transaction. The same again is ignored; other content under an id is a ConflictError."""
        with self._write() as connection:
            stored = self._payloads(connection, generations, [generation.id for generation, _ in items])
            rows, arrays = [], []
            for generation, tokens in items:
                payload = msgspec.json.encode(generation)
                if _new(stored, generation.id, payload, "generation"):
                    rows.append(
                        {"id": generation.id, "org": generation.org, "user": generation.user, "key": generation.key,
                         "conversation": generation.conversation, "client_ms": generation.client_ms, "payload": payload}
                    )  # fmt: skip
                    arrays.append({"generation": generation.id, "payload": msgspec.msgpack.encode(tokens)})
            _insert(connection, generations, rows)
            _insert(connection, spool, arrays)

    def generation(self, identity: str) -> Generation | None:
        """One generation by id."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(generations.c.payload).where(generations.c.id == identity)).first()
        return msgspec.json.decode(row[0], type=Generation) if row else None

    def generations(self, first_seq: int = 1, last_seq: int | None = None) -> list[tuple[int, Generation]]:
        """Sequence number and generation, in order, both ends included."""
        query = sa.select(generations.c.seq, generations.c.payload).where(generations.c.seq >= first_seq).order_by(generations.c.seq)
        if last_seq is not None:
            query = query.where(generations.c.seq <= last_seq)
        decode = msgspec.json.Decoder(Generation).decode
        with self._engine.connect() as connection:
            return [(seq, decode(payload)) for seq, payload in connection.execute(query)]

    def last_seq(self) -> int:
        """The highest sequence number given to a generation; 0 if there is none. Counts rows that were deleted by force."""
        with self._engine.connect() as connection:
            given = connection.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = 'generations'").scalar()
        return int(given or 0)

    def generation_keys(self, identities: Sequence[str]) -> dict[str, str]:
        """Generation id to the key it was served to, for those that are known."""
        return self._lookup(generations.c.id, generations.c.key, identities)

    def last_of_conversation(self, conversation: str, org: str) -> Generation | None:
        """The conversation's newest generation, which says which version it is leased to."""
        query = sa.select(generations.c.payload).where(generations.c.conversation == conversation, generations.c.org == org)
        with self._engine.connect() as connection:
            row = connection.execute(query.order_by(generations.c.seq.desc()).limit(1)).first()
        return msgspec.json.decode(row[0], type=Generation) if row else None

    def add_events(self, items: Sequence[tuple[Event, str]]) -> list[str]:
        """Store (event, key id) pairs in one durable transaction; "stored", "duplicate" or "waiting" (its generation is not known yet) for each.

        Raises ConflictError, and stores none of them, if an id is there with other content.
        """
        with self._write() as connection:
            stored = self._payloads(connection, events, [event.id for event, _ in items])
            known = self._known(connection, [event.generation for event, _ in items])
            rows, answers = [], []
            for event, key in items:
                payload = msgspec.json.encode(event)
                if not _new(stored, event.id, payload, "event"):
                    answers.append("duplicate")
                    continue
                rows.append({"id": event.id, "generation": event.generation, "key": key, "at_ms": event.at_ms, "payload": payload})
                answers.append("stored" if event.generation in known else "waiting")
            _insert(connection, events, rows)
        return answers

    def events(self, identities: Sequence[str]) -> dict[str, list[Event]]:
        """Generation id to its events in the order they were stored; only those sent with the key the generation was served to."""
        found: dict[str, list[Event]] = {}
        decode = msgspec.json.Decoder(Event).decode
        joined = events.join(generations, sa.and_(events.c.generation == generations.c.id, events.c.key == generations.c.key))
        with self._engine.connect() as connection:
            for part in _chunks(identities):
                query = sa.select(events.c.payload).select_from(joined).where(events.c.generation.in_(part)).order_by(events.c.seq)
                for (payload,) in connection.execute(query):
                    event = decode(payload)
                    found.setdefault(event.generation, []).append(event)
        return found

    def event_generations(self) -> dict[str, int]:
        """Every generation id that an event names, with the number of its events (the audit looks for those that are missing)."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(events.c.generation, sa.func.count()).group_by(events.c.generation))
            return {generation: count for generation, count in rows}

    def user_clocks(self) -> dict[str, int]:
        """User to the latest time of that user's client clock, in ms, over generations and events."""
        asked = sa.select(generations.c.user, sa.func.max(generations.c.client_ms)).group_by(generations.c.user)
        told = (
            sa.select(generations.c.user, sa.func.max(events.c.at_ms))
            .select_from(events.join(generations, sa.and_(events.c.generation == generations.c.id, events.c.key == generations.c.key)))
            .group_by(generations.c.user)
        )
        clocks: dict[str, int] = {}
        with self._engine.connect() as connection:
            for query in (asked, told):
                for user, ms in connection.execute(query):
                    clocks[user] = max(clocks.get(user, 0), ms)
        return clocks

    # ---- token arrays

    def tokens(self, identities: Sequence[str]) -> dict[str, Tokens]:
        """Arrays by generation id, from spool and segments. Raises LedgerError for a segment that cannot be read."""
        found: dict[str, Tokens] = {}
        wanted: dict[int, set[str]] = {}
        decode = msgspec.msgpack.Decoder(Tokens).decode
        with self._engine.connect() as connection:
            for part in _chunks(identities):
                for (payload,) in connection.execute(sa.select(spool.c.payload).where(spool.c.generation.in_(part))):
                    tokens = decode(payload)
                    found[tokens.generation] = tokens
                query = sa.select(segment_rows.c.generation, segment_rows.c.segment).where(segment_rows.c.generation.in_(part))
                for generation, segment in connection.execute(query):
                    wanted.setdefault(segment, set()).add(generation)
            paths = {seq: path for seq, path in connection.execute(sa.select(segments.c.seq, segments.c.path))}
        for segment, names in wanted.items():
            try:
                rows = pq.read_table(self._root / paths[segment], filters=[("generation", "in", names)]).to_pylist()
            except (OSError, pa.ArrowException, KeyError) as error:
                raise LedgerError(f"segment {paths.get(segment, segment)} cannot be read ({error}): restore it; `keepgrad audit` lists its rows") from error
            found.update((row["generation"], Tokens(**row)) for row in rows)
        return found

    def token_generations(self) -> set[str]:
        """Every generation id that has arrays, in the spool or a segment."""
        with self._engine.connect() as connection:
            spooled = connection.execute(sa.select(spool.c.generation)).scalars().all()
            sealed = connection.execute(sa.select(segment_rows.c.generation)).scalars().all()
        return {*spooled, *sealed}

    def seal(self, min_rows: int = 1) -> int:
        """Move the spool, if it holds `min_rows`, into one Parquet segment; returns the rows moved.

        The file is complete and durable under its final name before the ledger names it; a crash in between leaves a stray that nobody reads.
        """
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(spool.c.seq, spool.c.payload).order_by(spool.c.seq)).all()
        if len(rows) < max(min_rows, 1):
            return 0
        tokens = [msgspec.msgpack.decode(payload, type=Tokens) for _, payload in rows]
        relative = f"segments/{uuid7()}.parquet"
        digest = self._write_segment(self._root / relative, tokens)
        with self._write() as connection:
            payload = msgspec.json.encode({"sha256": digest, "rows": len(tokens)})
            connection.execute(segments.insert().values(path=relative, payload=payload))
            number = connection.execute(sa.select(segments.c.seq).where(segments.c.path == relative)).scalar_one()
            _insert(connection, segment_rows, [{"generation": one.generation, "segment": number} for one in tokens])
            connection.execute(spool.delete().where(spool.c.seq <= rows[-1][0]))
        return len(tokens)

    def _write_segment(self, path: Path, tokens: Sequence[Tokens]) -> str:
        part = path.with_suffix(".part")
        schema = pa.schema(
            [("generation", pa.string()), ("prompt_ids", pa.list_(pa.int32())), ("completion_ids", pa.list_(pa.int32())),
             ("logprobs", pa.list_(pa.float64())), ("features", pa.list_(pa.float64()))]
        )  # fmt: skip
        try:
            pq.write_table(pa.Table.from_pylist([msgspec.to_builtins(one) for one in tokens], schema), part, compression="zstd")
            with part.open("rb") as stream:
                digest = hashlib.sha256(stream.read()).hexdigest()
                os.fsync(stream.fileno())
            os.replace(part, path)
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise LedgerError(f"could not write segment {path} ({error.strerror}): free some disk; the rows stay in the ledger") from error
        return digest

    def verify_segments(self) -> list[str]:
        """One sentence per segment that is missing or not what was written."""
        problems = []
        with self._engine.connect() as connection:
            known = connection.execute(sa.select(segments.c.path, segments.c.payload)).all()
        for relative, payload in known:
            file = self._root / relative
            if not file.exists():
                problems.append(f"segment {relative} is missing: restore it from a copy")
            elif hashlib.sha256(file.read_bytes()).hexdigest() != msgspec.json.decode(payload)["sha256"]:
                problems.append(f"segment {relative} is damaged: restore it from a copy")
        return problems

    # ---- what the cycle and the operator write

    def put_version(self, version: Version) -> None:
        """Register a version."""
        self._put(versions, version.id, version)

    def versions(self) -> list[Version]:
        """Registered versions, oldest first."""
        return self._all(versions, Version)

    def publish(self, version: Version, generations_trained: Sequence[str]) -> None:
        """Register a trained version and the generations it was trained on, in one transaction; harmless when repeated.

        Raises LedgerError if one of them was already trained on by an ancestor.
        """
        with self._write() as connection:
            there = self._payloads(connection, versions, [version.id])
            if version.id in there:
                return
            line = self._line(connection, version.parent)
            query = sa.select(trained.c.generation).where(trained.c.version.in_(line))
            twice = set(connection.execute(query).scalars()) & set(generations_trained)
            if twice:
                raise LedgerError(f"generation {min(twice)} was already trained on by an ancestor of {version.id}: a sample is trained once")
            _insert(connection, versions, [{"id": version.id, "payload": msgspec.json.encode(version)}])
            _insert(connection, trained, [{"generation": one, "version": version.id} for one in dict.fromkeys(generations_trained)])

    def lineage(self, version: str) -> list[str]:
        """The version, its parent, and so on to the base."""
        with self._engine.connect() as connection:
            return self._line(connection, version)

    def trained(self, version: str) -> set[str]:
        """Generations that this version's own step was trained on."""
        return self._trained([version])

    def trained_in_lineage(self, version: str) -> set[str]:
        """Generations that this version or an ancestor was trained on."""
        return self._trained(self.lineage(version))

    def put_traffic(self, record: Traffic) -> None:
        """From now on this decides who gets which version."""
        with self._write() as connection:
            _insert(connection, traffic, [{"payload": msgspec.json.encode(record)}])

    def traffic(self) -> Traffic | None:
        """The record in force."""
        with self._engine.connect() as connection:
            payload = connection.exec_driver_sql("SELECT payload FROM traffic ORDER BY seq DESC LIMIT 1").scalar()
        return msgspec.json.decode(payload, type=Traffic) if payload else None

    def traffic_history(self) -> list[Traffic]:
        """All records, oldest first."""
        return self._all(traffic, Traffic)

    def put_window(self, window: Window) -> None:
        """Close a window."""
        self._put(windows, window.id, window)

    def windows(self) -> list[Window]:
        """All windows, oldest first."""
        return self._all(windows, Window)

    def put_scores(self, window: str, found: Sequence[Score]) -> None:
        """Keep a window's scores; those already kept stay as they are, and must be the same (ConflictError)."""
        with self._write() as connection:
            query = sa.select(scores.c.generation, scores.c.payload).where(scores.c.window == window)
            stored = {generation: payload for generation, payload in connection.execute(query)}
            rows = []
            for score in found:
                payload = msgspec.json.encode(score)
                if _new(stored, score.generation, payload, "score"):
                    rows.append({"window": window, "generation": score.generation, "payload": payload})
            _insert(connection, scores, rows)

    def scores(self, window: str) -> list[Score]:
        """A window's scores."""
        with self._engine.connect() as connection:
            query = sa.select(scores.c.payload).where(scores.c.window == window).order_by(scores.c.generation)
            return [msgspec.json.decode(payload, type=Score) for payload in connection.execute(query).scalars()]

    def put_verdict(self, verdict: GateVerdict) -> None:
        """Keep a verdict."""
        self._put(verdicts, verdict.id, verdict)

    def verdicts(self) -> list[GateVerdict]:
        """All verdicts, oldest first."""
        return self._all(verdicts, GateVerdict)

    def start_stage(self, cycle: str, stage: str) -> None:
        """Note that a stage of a cycle begins."""
        self._stage(cycle, stage, {"started": True})

    def put_stage(self, cycle: str, stage: str, seconds: float, counts: dict[str, Any]) -> None:
        """Note that a stage of a cycle has ended, how long it took and what it counted."""
        self._stage(cycle, stage, {"started": False, "seconds": seconds, "counts": counts})

    def stages(self) -> list[dict[str, Any]]:
        """Every begin and end of a stage, oldest first: {cycle, stage, finished, seconds, counts, at_ms}; a begin has no seconds and counts."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(stages.c.cycle, stages.c.stage, stages.c.payload).order_by(stages.c.seq)).all()
        found = []
        for cycle, stage, payload in rows:
            row = {"seconds": 0.0, "counts": {}, **msgspec.json.decode(payload)}
            found.append({"cycle": cycle, "stage": stage, "finished": not row.pop("started"), **row})
        return found

    def current_stage(self) -> str:
        """The stage under way, or "idle"."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(stages.c.stage, stages.c.payload).order_by(stages.c.seq.desc()).limit(1)).first()
        return row[0] if row and msgspec.json.decode(row[1])["started"] else "idle"

    def put_key(self, key: Key) -> None:
        """Keep an access key (its hash only)."""
        self._put(keys, key.id, key)

    def keys(self) -> list[Key]:
        """All keys."""
        return self._all(keys, Key)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        with self._write() as connection:
            connection.execute(counters.insert().values(name=name, n=n))

    def counters(self) -> dict[str, int]:
        """Counter to its sum."""
        with self._engine.connect() as connection:
            return {name: n for name, n in connection.execute(sa.select(counters.c.name, sa.func.sum(counters.c.n)).group_by(counters.c.name))}

    # ---- inside

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.exec_driver_sql("COMMIT")
                except BaseException:
                    if connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
                        connection.exec_driver_sql("ROLLBACK")
                    raise
        except sa.exc.DBAPIError as error:
            raise LedgerError(f"the ledger in {self._root} refused a write ({error.orig}): check disk space and who else writes it") from error

    def _payloads(self, connection: sa.Connection, table: sa.Table, identities: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for part in _chunks(identities):
            found.update((identity, payload) for identity, payload in connection.execute(sa.select(table.c.id, table.c.payload).where(table.c.id.in_(part))))
        return found

    def _known(self, connection: sa.Connection, identities: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for part in _chunks(identities):
            found.update(connection.execute(sa.select(generations.c.id).where(generations.c.id.in_(part))).scalars())
        return found

    def _lookup(self, by: sa.Column[Any], value: sa.Column[Any], identities: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        with self._engine.connect() as connection:
            for part in _chunks(identities):
                found.update((key, got) for key, got in connection.execute(sa.select(by, value).where(by.in_(part))))
        return found

    def _line(self, connection: sa.Connection, version: str) -> list[str]:
        parents = {row.id: row.parent for row in (msgspec.json.decode(p, type=Version) for p in connection.execute(sa.select(versions.c.payload)).scalars())}
        line = []
        while version and version not in line:
            line.append(version)
            version = parents.get(version, "")
        return line

    def _trained(self, names: Sequence[str]) -> set[str]:
        with self._engine.connect() as connection:
            return set(connection.execute(sa.select(trained.c.generation).where(trained.c.version.in_(names))).scalars())

    def _stage(self, cycle: str, stage: str, content: dict[str, Any]) -> None:
        payload = msgspec.json.encode({**content, "at_ms": int(time.time() * 1000)})
        with self._write() as connection:
            _insert(connection, stages, [{"cycle": cycle, "stage": stage, "payload": payload}])

    def _put(self, table: sa.Table, identity: str, record: msgspec.Struct) -> None:
        with self._write() as connection:
            payload = msgspec.json.encode(record)
            if _new(self._payloads(connection, table, [identity]), identity, payload, table.name):
                _insert(connection, table, [{"id": identity, "payload": payload}])

    def _all(self, table: sa.Table, kind: type[_T]) -> list[_T]:
        with self._engine.connect() as connection:
            return [msgspec.json.decode(payload, type=kind) for payload in connection.execute(sa.select(table.c.payload).order_by(table.c.seq)).scalars()]


def _prepare(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # we say BEGIN IMMEDIATE ourselves
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _new(stored: dict[str, bytes], identity: str, payload: bytes, what: str) -> bool:
    """False if the very same is there; True, and remembered, if nothing is; ConflictError otherwise."""
    if identity not in stored:
        stored[identity] = payload
        return True
    if stored[identity] != payload:
        raise ConflictError(f"{what} {identity} is already stored with other content: use a new id for a new {what}")
    return False


def _insert(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(table.insert(), rows)


def _chunks(items: Iterable[str]) -> Iterator[list[str]]:
    unique = list(dict.fromkeys(items))
    for at in range(0, len(unique), _CHUNK):
        yield unique[at : at + _CHUNK]
