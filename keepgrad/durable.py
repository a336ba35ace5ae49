"""Files that survive power loss: what has been written and synced here is on the disk, not in its cache."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write a file and have its content on the disk; its name is there for sure only after `sync_folder`. Raises OSError."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        _sync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path` for the block, against other processes and threads; it goes with the process, however that ends.

    Yields True once it is held, or False, at once, if `wait` is False and another holds it. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
    # On macOS fsync stops at the drive's own cache; this one asks the drive too. Not every file system there knows it.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
        except OSError:
            return
