"""Policy versions on disk: immutable, content-addressed folders with a manifest of their lineage, written whole or not at all."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from keepgrad import __version__, durable
from keepgrad.errors import VersionError
from keepgrad.records import Version

MANIFEST = "manifest.json"
_LOCK = ".lock"
_PART = ".part-"
_SEAL = "manifest_sha256"
_ID = re.compile(r"v-[0-9a-f]{16}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Store:
    """The folder `versions` below a data folder. Several processes may write: each in turn, aside, then renames."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "versions"

    def write(self, files: dict[str, bytes], *, parent: str, model: str, window: str, spec: str, seed: int) -> Version:
        """Store a version and return its manifest, durable when this returns.

        The id is `v-` and the first 16 hex digits of the SHA-256 over file hashes and lineage, so a name never comes to mean something
        else; the same content and lineage give the same id, and nothing is written twice. Raises VersionError, e.g. on a full disk.
        """
        for name in files:
            if name == MANIFEST or not _NAME.fullmatch(name):
                raise VersionError(f"a version cannot hold a file named {name!r}: use letters, digits, dots, dashes, and not {MANIFEST}")
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
        made = Version("", parent, model, window, spec, __version__, seed, hashes, int(time.time() * 1000))
        made = msgspec.structs.replace(made, id=_identity(made))
        with self._alone(made.id):
            if (self._folder / made.id).exists():
                return self._same(made)
            aside = Path(tempfile.mkdtemp(prefix=_PART, dir=self._folder))
            try:
                for name, data in {**files, MANIFEST: _render(msgspec.to_builtins(made))}.items():
                    durable.write(aside / name, data)
                os.chmod(aside, 0o755)
                durable.sync_folder(aside)
                os.replace(aside, self._folder / made.id)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            durable.sync_folder(self._folder)
        return made

    def path(self, version: str) -> Path:
        """The version's folder. Raises VersionError if there is none."""
        folder = self._folder / version
        if not _ID.fullmatch(version) or not folder.is_dir():
            raise VersionError(f"there is no version {version!r} in {self._folder}: `keepgrad versions` lists those there are")
        return folder

    def read(self, version: str) -> Version:
        """The manifest. Raises VersionError naming it if it is missing or not what was written."""
        file = self.path(version) / MANIFEST
        try:
            data = file.read_bytes()
            tree = msgspec.json.decode(data)
            made = msgspec.convert(tree, Version)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise _damaged(file) from error
        tree.pop(_SEAL, None)
        if data != _render(tree) or made.id != version or _identity(made) != version:
            raise _damaged(file)
        return made

    def verify(self, version: str) -> None:
        """Raises VersionError naming the first file whose content is not what was written."""
        folder = self.path(version)
        for name, wanted in self.read(version).files.items():
            try:
                found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            except OSError as error:
                raise _damaged(folder / name) from error
            if found != wanted:
                raise _damaged(folder / name)

    def discard(self, version: str) -> None:
        """Remove a version that was never published, so that nothing can refer to it."""
        with self._alone(version):
            self.path(version).rename(aside := self._folder / f"{_PART}{version}")
            shutil.rmtree(aside, ignore_errors=True)

    def list(self) -> list[Version]:
        """All manifests, oldest first."""
        if not self._folder.exists():
            return []
        found = [self.read(folder.name) for folder in self._folder.iterdir() if _ID.fullmatch(folder.name)]
        return sorted(found, key=lambda version: (version.created_ms, version.id))

    @contextlib.contextmanager
    def _alone(self, identity: str) -> Iterator[None]:
        """The only writer for the block; what a killed writer left is removed, for nobody else can be at it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with durable.locked(self._folder / _LOCK):
                for stray in self._folder.glob(f"{_PART}*"):
                    shutil.rmtree(stray, ignore_errors=True)
                yield
        except OSError as error:
            trouble = error.strerror or str(error)
            raise VersionError(f"could not store version {identity} in {self._folder} ({trouble}): free some disk and try again") from error

    def _same(self, made: Version) -> Version:
        """The stored version, if it is whole and holds the same content."""
        self.verify(made.id)
        stored = self.read(made.id)
        if stored.files != made.files:
            raise VersionError(f"{made.id} is taken by other content in {self._folder}: train with another seed")
        return stored


def _identity(version: Version) -> str:
    """The id that files and lineage give. When and by which release it was made do not matter."""
    lineage = [version.files, version.parent, version.model, version.window, version.spec, version.seed]
    return f"v-{hashlib.sha256(msgspec.json.encode(lineage)).hexdigest()[:16]}"


def _render(tree: dict[str, Any]) -> bytes:
    """The manifest's bytes: the record and, as its last field, a checksum of the rest, so that not a byte of it can change unnoticed."""
    seal = hashlib.sha256(msgspec.json.encode(tree)).hexdigest()
    return msgspec.json.format(msgspec.json.encode({**tree, _SEAL: seal}))


def _damaged(file: Path) -> VersionError:
    return VersionError(f"{file} is missing or damaged: roll back to another version, or restore the folder from a copy")
