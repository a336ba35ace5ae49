"""`keepgrad export`: what the ledger holds, as Parquet files that any tool for tables reads. One file per kind of record.

    generations   what was served, one row each                tokens    its arrays: prompt and completion ids, log-probs, cuts, features
    events        what clients saw happen to it                scores    place and reward, with the window that gave it
    versions, traffic, verdicts                                what was trained, what served, what gate and canary said

Columns are the fields of keepgrad/records.py, under their names. Keys are left out, and so is everything of other organisations and users
where one is named.
"""

import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from keepgrad.config import Config
from keepgrad.errors import ConfigError
from keepgrad.ledger import Ledger
from keepgrad.policy.traffic import user_hash
from keepgrad.records import Event, GateVerdict, Generation, Score, Tokens, Traffic, Version

_ROWS = 5_000
"""Rows written at a time."""
_PLAIN = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def export(config: Config, folder: Path, org: str = "", user: str = "") -> dict[str, int]:
    """Write the ledger into a new folder; rows by file. With `org`, and perhaps `user` in it, only what was served to them.

    Raises ConfigError if the folder is not empty, or a user is named without an organisation.
    """
    if user and not org:
        raise ConfigError(f"user {user!r} may be in several organisations: name one with --org")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger.open(config.root)
    try:
        whose = user_hash(org, user) if user else ""
        served = [one for _, one in ledger.generations() if org in ("", one.org) and whose in ("", one.user)]
        names = [one.id for one in served]
        wanted = set(names)
        arrays = (found[name] for part in _parts(names) for found in [ledger.tokens(part)] for name in part if name in found)
        events = (event for part in _parts(names) for found in ledger.events(part).values() for event in found)
        scores = (score for window in ledger.windows() for score in ledger.scores(window.id) if score.generation in wanted)
        counts = {
            "generations": _write(folder / "generations.parquet", Generation, served),
            "tokens": _write(folder / "tokens.parquet", Tokens, arrays),
            "events": _write(folder / "events.parquet", Event, events),
            "scores": _write(folder / "scores.parquet", Score, scores),
        }
        if not org:
            counts["versions"] = _write(folder / "versions.parquet", Version, ledger.versions())
            counts["traffic"] = _write(folder / "traffic.parquet", Traffic, ledger.traffic_history())
            counts["verdicts"] = _write(folder / "verdicts.parquet", GateVerdict, ledger.verdicts())
        return counts
    finally:
        ledger.close()


def _parts(names: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(names), _ROWS):
        yield names[at : at + _ROWS]


def _write(path: Path, kind: type[msgspec.Struct], records: Iterable[msgspec.Struct]) -> int:
    """One Parquet file, whole or not at all; its rows."""
    fields = [field for field in msgspec.structs.fields(kind) if field.name != "key"]
    forms = {field.name: _arrow(field.type) for field in fields}
    schema = pa.schema(list(forms.items()))
    part, count = path.with_suffix(".part"), 0
    with pq.ParquetWriter(part, schema, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        for record in records:
            rows.append({name: _value(getattr(record, name), form) for name, form in forms.items()})
            count += 1
            if len(rows) == _ROWS:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema))
    part.replace(path)
    return count


def _arrow(kind: Any) -> pa.DataType:
    """The Arrow type of a record's field; what has no fixed form (a verdict's metrics) is JSON text."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Literal:
        return pa.string()
    if origin in (Union, types.UnionType):
        return _arrow(next(one for one in inside if one is not type(None)))
    if origin is list:
        return pa.list_(_arrow(inside[0]))
    if origin is dict and inside[1] is not Any:
        return pa.map_(_arrow(inside[0]), _arrow(inside[1]))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return pa.struct([(field.name, _arrow(field.type)) for field in msgspec.structs.fields(kind)])
    return pa.string()


def _value(value: Any, form: pa.DataType) -> Any:
    if pa.types.is_map(form):
        return list(value.items())
    if pa.types.is_string(form) and not isinstance(value, str) and value is not None:
        return msgspec.json.encode(value).decode()
    return msgspec.to_builtins(value)
