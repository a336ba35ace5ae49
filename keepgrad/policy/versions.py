"""Policy versions on disk: immutable, content-addressed folders with a manifest of their lineage, written whole or not at all."""

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from keepgrad import __version__
from keepgrad.errors import VersionError
from keepgrad.records import Version

MANIFEST = "manifest.json"


class Store:
    """The folder `versions` below a data folder. Writers never meet: each writes aside and renames."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "versions"

    def write(self, files: dict[str, bytes], *, parent: str, model: str, window: str, spec: str, seed: int) -> Version:
        """Store a version and return its manifest; the same content and lineage give the same id, and nothing is written twice.

        The id is `v-` and the first 16 hex digits of the SHA-256 over file hashes and lineage: a name can never come to mean something else.
        """
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
        digest = hashlib.sha256(msgspec.json.encode([hashes, parent, model, window, spec, seed])).hexdigest()
        identity = f"v-{digest[:16]}"
        if (self._folder / identity / MANIFEST).exists():
            self.verify(identity)
            return self.read(identity)
        made = Version(identity, parent, model, window, spec, __version__, seed, hashes, int(time.time() * 1000))
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".part-", dir=self._folder))
        try:
            for name, data in {**files, MANIFEST: msgspec.json.format(msgspec.json.encode(made))}.items():
                _write_durably(aside / name, data)
            os.chmod(aside, 0o755)
            os.replace(aside, self._folder / identity)
            _sync_folder(self._folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise VersionError(f"could not store version {identity} in {self._folder} ({error.strerror}): free some disk and try again") from error
        return made

    def path(self, version: str) -> Path:
        """The version's folder. Raises VersionError if there is none."""
        folder = self._folder / version
        if not version.startswith("v-") or "/" in version or not (folder / MANIFEST).exists():
            raise VersionError(f"there is no version {version!r} in {self._folder}: `keepgrad versions` lists those there are")
        return folder

    def read(self, version: str) -> Version:
        """The manifest. Raises VersionError if it is missing or cannot be read."""
        file = self.path(version) / MANIFEST
        try:
            return msgspec.json.decode(file.read_bytes(), type=Version)
        except msgspec.DecodeError as error:
            raise VersionError(f"{file} is damaged ({error}): roll back to another version, or restore the folder from a copy") from error

    def verify(self, version: str) -> None:
        """Raises VersionError naming the first file whose content is not what the manifest says."""
        folder, manifest = self.path(version), self.read(version)
        for name, wanted in manifest.files.items():
            file = folder / name
            if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != wanted:
                raise VersionError(f"{file} is missing or damaged: roll back to another version, or restore the folder from a copy")

    def list(self) -> list[Version]:
        """All manifests, oldest first."""
        if not self._folder.exists():
            return []
        found = [self.read(folder.name) for folder in self._folder.glob("v-*") if (folder / MANIFEST).exists()]
        return sorted(found, key=lambda version: (version.created_ms, version.id))


def _write_durably(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
