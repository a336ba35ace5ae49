"""The splits never cross, hold hand-written code, and are found quickly."""

import hashlib
import time
from pathlib import Path

import pytest

from keepgrad.errors import ConfigError
from keepgrad.simulate import corpus

SPLITS: tuple[corpus.Split, ...] = ("train", "gate", "heldout", "projects")
JUDGING: tuple[corpus.Split, ...] = ("gate", "heldout", "projects")


def test_no_file_and_no_content_is_in_two_splits() -> None:
    paths: dict[Path, str] = {}
    contents: dict[str, str] = {}
    for split in SPLITS:
        for _, path in corpus.files(split):
            assert paths.setdefault(path, split) == split
            assert contents.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), split) == split


def test_held_out_projects_have_no_file_elsewhere() -> None:
    held_out = set(corpus.held_out_projects())
    assert len(held_out) >= 3
    for split in SPLITS[:3]:
        assert not held_out & {project for project, _ in corpus.files(split)}


def test_judging_files_are_not_copies_of_training_files() -> None:
    trained = {line for _, path in corpus.files("train") for line in _long_lines(path)}
    for split in JUDGING:
        for _, path in corpus.files(split)[:150]:
            lines = _long_lines(path)
            assert len(lines & trained) <= 0.5 * max(len(lines), 1), path


def test_each_split_is_large_enough_to_judge_and_to_learn_from() -> None:
    least: dict[corpus.Split, int] = {"train": 300, "gate": 60, "heldout": 100, "projects": 60}
    assert {split: len(corpus.files(split)) >= count for split, count in least.items()} == dict.fromkeys(least, True)


def test_a_file_keeps_its_split_whatever_else_is_installed() -> None:
    assert corpus._split("python", "argparse.py") == corpus._split("python", "argparse.py")
    places = {corpus._split("sqlalchemy", f"orm/module_{n}.py") for n in range(200)}
    assert places == {"train", "gate", "heldout"} or places == {"projects"}
    assert corpus._split("httpx2", "_client.py") == corpus._split("httpx", "_client.py")


def test_the_order_is_fixed_and_mixes_projects() -> None:
    first, again = corpus.files("train"), corpus.files("train")
    assert first == again
    assert len({project for project, _ in first[:40]}) > 10


def test_listing_is_quick() -> None:
    corpus._listing.cache_clear()
    started = time.perf_counter()
    corpus.files("train")
    assert time.perf_counter() - started < 10  # about 1.2 s on an idle machine


def test_labels_say_nothing_about_the_machine() -> None:
    for split in SPLITS:
        for project, path in corpus.files(split):
            name = corpus.label(project, path)
            assert name.startswith(f"{project}/") and name.endswith(".py") and "site-packages" not in name


def test_unknown_split_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="there is no split 'test': name one of train, gate, heldout, projects"):
        corpus.files("test")  # type: ignore[arg-type]


def _long_lines(path: Path) -> set[str]:
    return {line.strip() for line in path.read_text(encoding="utf-8").splitlines() if len(line.strip()) >= 24}
