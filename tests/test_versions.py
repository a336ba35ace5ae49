"""Versions on disk: content-addressed, whole or not there at all, and never what they were not when written (P3)."""

import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepgrad.errors import VersionError
from keepgrad.policy.versions import MANIFEST, Store
from keepgrad.records import Version

FILES = {"adapter_model.safetensors": bytes(range(256)), "adapter_config.json": b'{"r": 16}', "from_last": b""}
LINEAGE: dict[str, Any] = {"parent": "v-base", "model": "m", "window": "w-1", "spec": "s", "seed": 0}


def write(store: Store, files: dict[str, bytes] | None = None, **fields: Any) -> Version:
    """A version of FILES with LINEAGE, some of it changed."""
    return store.write(FILES if files is None else files, **{**LINEAGE, **fields})


def test_a_version_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert Store(tmp_path).list() == []
    made = write(Store(tmp_path))
    store = Store(tmp_path)
    assert store.read(made.id) == made and store.list() == [made]
    assert (made.parent, made.window, made.seed, set(made.files)) == ("v-base", "w-1", 0, set(FILES))
    assert {name: (store.path(made.id) / name).read_bytes() for name in FILES} == FILES
    store.verify(made.id)


def test_the_same_content_is_the_same_version_and_is_written_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = write(store)
    time.sleep(0.005)
    assert write(store, dict(reversed(FILES.items()))) == made
    other = tmp_path / "other"
    assert write(Store(other)).id == made.id
    assert len(store.list()) == 1


@pytest.mark.parametrize("field", LINEAGE)
def test_another_lineage_is_another_version(tmp_path: Path, field: str) -> None:
    assert write(Store(tmp_path)).id != write(Store(tmp_path), **{field: 1 if field == "seed" else "v-other"}).id


_NAMES = st.text("abc.", min_size=1, max_size=3).filter(lambda name: not name.startswith("."))
_TEXT = st.text("ab", max_size=2)
_CONTENT = st.tuples(st.dictionaries(_NAMES, st.binary(max_size=3), max_size=3), _TEXT, _TEXT, _TEXT, _TEXT, st.integers(0, 3))


@settings(max_examples=15, deadline=None)
@given(st.lists(_CONTENT, min_size=2, max_size=5))
def test_an_id_means_one_content_only(tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[Any, ...]]) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    meant: dict[str, tuple[Any, ...]] = {}
    for content in contents:
        files, parent, model, window, spec, seed = content
        made = store.write(files, parent=parent, model=model, window=window, spec=spec, seed=seed)
        assert meant.setdefault(made.id, content) == content
    assert len(meant) == sum(content not in contents[:n] for n, content in enumerate(contents)) == len(store.list())
    for name, content in meant.items():
        store.verify(name)
        assert {file: (store.path(name) / file).read_bytes() for file in content[0]} == content[0]


def test_a_flipped_bit_in_any_byte_of_any_file_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = write(store)
    for name in (*FILES, MANIFEST):
        file = store.path(made.id) / name
        data = file.read_bytes()
        for at in range(len(data)):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            with pytest.raises(VersionError, match=f"{name} is missing or damaged"):
                store.verify(made.id)
        for other in (data + b"\n", data[:-1] if data else None, None):
            file.unlink()
            if other is not None:
                file.write_bytes(other)
            with pytest.raises(VersionError, match=f"{name} is missing or damaged"):
                store.verify(made.id)
            file.write_bytes(data)
    store.verify(made.id)


def test_a_damaged_version_is_not_written_over(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = write(store)
    file = store.path(made.id) / "adapter_model.safetensors"
    file.write_bytes(b"other")
    with pytest.raises(VersionError, match="adapter_model.safetensors"):
        write(store)
    assert file.read_bytes() == b"other"


def test_a_manifest_put_into_another_versions_place_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mine, other = write(store), write(store, seed=1)
    shutil.copy(store.path(other.id) / MANIFEST, store.path(mine.id) / MANIFEST)
    with pytest.raises(VersionError, match=mine.id):
        store.read(mine.id)


@pytest.mark.parametrize("manifest", [b"", b"[]", b"7", b'"x"', b"{}", b"\xff"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, manifest: bytes) -> None:
    store = Store(tmp_path)
    made = write(store)
    (store.path(made.id) / MANIFEST).write_bytes(manifest)
    for step in (store.read, store.verify, lambda _: store.list()):
        with pytest.raises(VersionError, match=MANIFEST):
            step(made.id)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", MANIFEST, "/etc/passwd", "a\0b", "a b"])
def test_a_file_name_that_could_lie_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(VersionError, match="cannot hold a file"):
        write(Store(tmp_path), {name: b"x"})
    assert not (tmp_path / "versions").exists()


@pytest.mark.parametrize("name", ["", "v-none", "../versions", "v-0000000000000000", "v-../../../etc/x", "v-\0"])
def test_there_is_no_such_version(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    write(store)
    for step in (store.path, store.read, store.verify):
        with pytest.raises(VersionError, match="there is no version"):
            step(name)


# ---- writers that die, and writers at the same time


def _write_on(root: str, seed: int) -> None:
    store = Store(Path(root))
    for n in range(10_000):
        store.write(content(seed, n), **{**LINEAGE, "seed": seed * 10_000 + n})


def content(seed: int, n: int) -> dict[str, bytes]:
    """Five files of some kilobytes that follow from two numbers."""
    draw = random.Random(seed * 10_000 + n)
    return {f"file-{k}": draw.randbytes(20_000) for k in range(5)}


def test_a_writer_killed_half_way_leaves_nothing_visible(tmp_path: Path) -> None:
    context, chance, strays = multiprocessing.get_context("spawn"), random.Random(5), 0
    store = Store(tmp_path)
    for seed in range(1, 7):
        before = len(store.list())
        child = context.Process(target=_write_on, args=(str(tmp_path), seed))
        child.start()
        deadline = time.monotonic() + 60
        while len(store.list()) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.05))
        child.kill()
        child.join(30)
        assert len(store.list()) >= before + 2
        strays += len(list((tmp_path / "versions").glob(".part-*")))
    for made in store.list():
        store.verify(made.id)
        assert {name: (store.path(made.id) / name).read_bytes() for name in made.files} == content(*divmod(made.seed, 10_000))
    assert strays > 0, "no kill hit a write: make the files larger"
    write(store)
    assert list((tmp_path / "versions").glob(".part-*")) == []


def _write_same(root: str) -> None:
    write(Store(Path(root)))


def test_writers_at_the_same_time_make_one_version(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_same, args=(str(tmp_path),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    (made,) = Store(tmp_path).list()
    Store(tmp_path).verify(made.id)


_FULL = """
import resource, sys
from pathlib import Path
from keepgrad.errors import VersionError
from keepgrad.policy.versions import Store

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
try:
    Store(Path(sys.argv[1])).write({"a": b"a", "b": bytes(20_000)}, parent="", model="m", window="", spec="", seed=0)
except VersionError as error:
    print(error)
"""


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, env=here, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "could not store version v-" in done.stdout and "free some disk" in done.stdout
    assert Store(tmp_path).list() == [] and [file.name for file in (tmp_path / "versions").iterdir()] == [".lock"]
