"""Token arrays in Parquet segments: a file is written whole and durable before the ledger names it, and is never written again.

The folder's lock is held from the first byte of a segment until the ledger names it, so whoever holds the lock and finds a file that the
ledger does not name has found what a crash left behind.
"""

import contextlib
import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from keepgrad import durable
from keepgrad.errors import LedgerError
from keepgrad.records import Tokens, uuid7

LOCK = ".lock"
_PART = ".part"
_SCHEMA = pa.schema(
    [
        ("generation", pa.string()),
        ("prompt_ids", pa.list_(pa.int64())),
        ("completion_ids", pa.list_(pa.int64())),
        ("logprobs", pa.list_(pa.float64())),
        ("cuts", pa.list_(pa.int64())),
        ("features", pa.list_(pa.list_(pa.float64()))),
    ]
)


class Segment(msgspec.Struct, frozen=True):
    """What the ledger notes of a segment beside its path. Made by `write`, eaten by `read` and `trouble`.

    >>> Segment(sha256="9c1e...", rows=512)
    """

    sha256: str
    rows: int


def write(folder: Path, tokens: Sequence[Tokens]) -> tuple[str, Segment]:
    """Write one segment under a new name, durable when this returns. Returns its file name. Raises LedgerError, e.g. on a full disk."""
    path = folder / f"{uuid7()}.parquet"
    part = path.with_suffix(_PART)
    try:
        table = pa.table({name: [getattr(one, name) for one in tokens] for name in _SCHEMA.names}, _SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        durable.write(part, data)
        os.replace(part, path)
        durable.sync_folder(folder)
    except (OSError, pa.ArrowException, OverflowError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise LedgerError(f"could not write segment {path} ({error}): free some disk; its rows stay in the ledger's spool") from error
    return path.name, Segment(hashlib.sha256(data).hexdigest(), len(tokens))


def read(path: Path, segment: Segment, generations: Collection[str]) -> list[Tokens]:
    """The arrays of these generations. Raises LedgerError naming the file if it is missing or damaged.

    The checksum of the whole file is compared first: Parquet itself gives out most of what a flipped bit has changed as if it were right.
    """
    data, found = _load(path, segment)
    if data is None:
        raise LedgerError(found)
    try:
        rows = pq.read_table(pa.BufferReader(data), filters=[("generation", "in", set(generations))]).to_pylist()
        return [Tokens(**row) for row in rows]
    except (pa.ArrowException, OSError, TypeError) as error:
        raise LedgerError(f"segment {path} cannot be read ({error}): use the release that wrote it") from error


def trouble(path: Path, segment: Segment) -> str:
    """One sentence on what is wrong with a segment; empty if it is what was written."""
    return _load(path, segment)[1]


def sweep(folder: Path, named: Collection[str]) -> list[str]:
    """Remove every file of the folder that the ledger does not name; returns their names. The caller holds the folder's lock."""
    strays = [file for file in folder.iterdir() if file.suffix in (_PART, ".parquet") and file.name not in named]
    removed = []
    for file in strays:
        # Someone who may only read this folder still reads it.
        with contextlib.suppress(OSError):
            file.unlink()
            removed.append(file.name)
    return sorted(removed)


def _load(path: Path, segment: Segment) -> tuple[bytes | None, str]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, f"segment {path} is missing: restore it from a copy"
    except OSError as error:
        return None, f"segment {path} cannot be read ({error.strerror}): let this user read it, or restore it from a copy"
    if hashlib.sha256(data).hexdigest() != segment.sha256:
        return None, f"segment {path} is damaged: restore it from a copy"
    return data, ""
