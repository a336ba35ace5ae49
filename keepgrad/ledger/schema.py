"""The ledger's tables, and the triggers that make them append-only whoever opens the file.

Every table holds one kind of record as JSON beside the few columns that are looked up by. The triggers refuse UPDATE, DELETE, and an INSERT
of a key that is there already, which is what INSERT OR REPLACE and upserts would need. The one exception is the spool of token arrays: its
rows may go once a segment holds them.
"""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

SCHEMA_VERSION = 2
_SINCE = {"revocations": 2}
"""The schema in which a table came, if not in the first."""

metadata = sa.MetaData()


def _records(name: str, *columns: sa.Column[Any]) -> sa.Table:
    """A table whose rows are numbered without a gap in the order they were written (AUTOINCREMENT: a number is never given twice)."""
    return sa.Table(
        name,
        metadata,
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        *columns,
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )


def _keyed(name: str, *columns: sa.Column[Any]) -> sa.Table:
    """A table found by its key alone. WITHOUT ROWID, or INSERT OR REPLACE could replace a row by SQLite's own hidden number for it."""
    return sa.Table(name, metadata, *columns, sqlite_with_rowid=False)


def _id(name: str = "id") -> sa.Column[Any]:
    return sa.Column(name, sa.String, nullable=False, unique=True)


def _key(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.String, primary_key=True)


schema_version = sa.Table("schema_version", metadata, sa.Column("version", sa.Integer, primary_key=True))
generations = _records(
    "generations",
    _id(),
    sa.Column("org", sa.String),
    sa.Column("user", sa.String),
    sa.Column("key", sa.String),
    sa.Column("conversation", sa.String, index=True),
    sa.Column("client_ms", sa.Integer),
)
events = _records(
    "events", _id(), sa.Column("generation", sa.String, index=True), sa.Column("key", sa.String), sa.Column("at_ms", sa.Integer)
)
spool = _records("spool", _id("generation"))
segments = _records("segments", _id("path"))
segment_rows = _keyed("segment_rows", _key("generation"), sa.Column("segment", sa.Integer, nullable=False))
versions = _records("versions", _id())
trained = _keyed("trained", _key("generation"), _key("version"))
traffic = _records("traffic")
windows = _records("windows", _id())
scores = _keyed("scores", _key("window"), _key("generation"), sa.Column("payload", sa.LargeBinary, nullable=False))
verdicts = _records("verdicts", _id())
stages = _records("stages", sa.Column("cycle", sa.String, index=True), sa.Column("stage", sa.String))
keys = _records("keys", _id())
revocations = _records("revocations", _id())
counters = sa.Table(
    "counters",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("name", sa.String),
    sa.Column("n", sa.Integer),
    sqlite_autoincrement=True,
)


def create(connection: sa.Connection) -> None:
    """Every table, index and trigger, and the schema's number. Runs inside the caller's transaction."""
    metadata.create_all(connection)
    for statement in triggers():
        connection.exec_driver_sql(statement)
    connection.execute(schema_version.insert().values(version=SCHEMA_VERSION))


def migrate(connection: sa.Connection, found: int) -> None:
    """From schema `found` to this one: the tables that came since, with their triggers. Runs inside the caller's transaction."""
    new = [metadata.tables[name] for name, since in _SINCE.items() if since > found]
    metadata.create_all(connection, tables=new)
    for table in new:
        for statement in _append_only(table):
            connection.exec_driver_sql(statement)
    for version in range(found + 1, SCHEMA_VERSION + 1):
        connection.execute(schema_version.insert().values(version=version))


def triggers() -> Iterator[str]:
    """The triggers of every table, as SQL."""
    for table in metadata.tables.values():
        yield from _append_only(table)
    # A spool row may go when a segment is said to hold it, so nobody may say so of a segment or an array that is not there.
    yield (
        "CREATE TRIGGER segment_rows_no_fiction BEFORE INSERT ON segment_rows "
        "WHEN NOT EXISTS (SELECT 1 FROM segments WHERE seq = NEW.segment) "
        "OR NOT EXISTS (SELECT 1 FROM spool WHERE generation = NEW.generation) "
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: segment_rows names a segment or an array that is not there'); END"
    )


def _append_only(table: sa.Table) -> Iterator[str]:
    name = table.name
    deny = f"SELECT RAISE(ABORT, 'the ledger is append-only: {name} may not be changed')"
    yield f"CREATE TRIGGER {name}_no_update BEFORE UPDATE ON {name} BEGIN {deny}; END"
    sealed = "WHEN NOT EXISTS (SELECT 1 FROM segment_rows WHERE generation = OLD.generation)" if table is spool else ""
    yield f"CREATE TRIGGER {name}_no_delete BEFORE DELETE ON {name} {sealed} BEGIN {deny}; END"
    unique = [[column.name for column in table.primary_key.columns], *([column.name] for column in table.columns if column.unique)]
    same = " OR ".join("(" + " AND ".join(f'"{column}" = NEW."{column}"' for column in group) + ")" for group in unique)
    yield f"CREATE TRIGGER {name}_no_replace BEFORE INSERT ON {name} WHEN EXISTS (SELECT 1 FROM {name} WHERE {same}) BEGIN {deny}; END"
