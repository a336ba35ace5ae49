"""The suite: cursors where developers pause, in code and nowhere else; files whole or not at all; rotation over the pool."""

import json
import tempfile
from pathlib import Path

import pytest

from keepgrad.errors import GateError
from keepgrad.release import suite

FILES = [("python", Path(json.__file__).with_name(name)) for name in ("decoder.py", "encoder.py", "scanner.py")]
FILES += [("python", Path(tempfile.__file__))]


@pytest.fixture(scope="module")
def contexts() -> list[suite.Context]:
    return suite.cut(FILES, 1_000, seed=0, per_file=200)


def test_prefix_and_truth_are_the_file(contexts: list[suite.Context]) -> None:
    sources = {path.name: path.read_text() for _, path in FILES}
    for context in contexts:
        source = sources[context.file.rsplit("/", 1)[-1]]
        assert context.prefix + context.truth + "\n" in source
        assert "\n" not in context.truth


def test_cursors_stand_in_code_with_enough_around_them(contexts: list[suite.Context]) -> None:
    assert len(contexts) > 300
    for context in contexts:
        assert len(context.prefix) >= 200
        assert sum(not character.isspace() for character in context.truth) >= 4
        line = context.prefix.rsplit("\n", 1)[-1] + context.truth
        assert not line.lstrip().startswith("#")
        assert not context.truth.startswith(('"""', "'''", 'r"""'))
        before = context.prefix.rsplit("\n", 1)[-1]
        assert not before or before[-1] in " ([{,=.:+-*/%<>|" or before.strip()[-1].isalpha()


def test_some_start_a_line_and_some_stand_inside(contexts: list[suite.Context]) -> None:
    starts = sum(not context.prefix.rsplit("\n", 1)[-1].strip() for context in contexts)
    assert 0.2 < starts / len(contexts) < 0.6


def test_no_cursor_in_a_docstring_comment_or_string(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    body = "\n".join(f"value_{i} = call(first_{i}, second_{i})" for i in range(20))
    file.write_text(f'"""Licence, words (and, more) = words."""\n# note (a, b, c) = d\n{body}\nname = "text (with, commas)"\n')
    found = suite.cut([("p", file)], 500, seed=1, per_file=500)
    assert found
    for context in found:
        line = context.prefix.rsplit("\n", 1)[-1]
        assert "words" not in line + context.truth
        assert "#" not in line
        assert "text (" not in line


def test_a_file_that_is_no_python_is_left_out(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.py", tmp_path / "binary.py"
    broken.write_text("value = call(first, second)\n" * 50 + "value = call(first,\n")
    binary.write_bytes(b"\xff\xfe" * 400)
    assert [context.file for context in suite.cut([("p", broken), ("p", binary), ("p", tmp_path / "gone.py")], 10, seed=0)] == []


def test_cut_is_deterministic_by_seed_and_capped_per_file() -> None:
    first, again, other = (suite.cut(FILES, 8, seed=seed, per_file=2) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 8
    assert max(sum(context.file == one.file for context in first) for one in first) == 2
    assert len({context.id for context in first}) == 8


def test_save_and_load(tmp_path: Path, contexts: list[suite.Context]) -> None:
    path = tmp_path / "suite.jsonl"
    suite.save(contexts[:9], path)
    assert suite.load(path) == contexts[:9]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(GateError, match="line 9 is not a gate context"):
        suite.load(path)
    with pytest.raises(GateError, match="keepgrad suite"):
        suite.load(tmp_path / "nothing.jsonl")


def test_rotation_meets_every_context_before_any_again(contexts: list[suite.Context]) -> None:
    pool = contexts[:100]
    turns = [suite.rotate(pool, 25, turn, seed=3) for turn in range(5)]
    assert sorted(context.id for turn in turns[:4] for context in turn) == sorted(context.id for context in pool)
    assert turns[4] == turns[0]
    assert sorted(context.id for context in suite.rotate(pool, 200, 7, seed=3)) == sorted(context.id for context in pool)


def test_seeds_differ_by_context_and_run_only() -> None:
    assert suite.seed_of(1, "x-1") == suite.seed_of(1, "x-1")
    assert len({suite.seed_of(run, context) for run in (1, 2) for context in ("x-1", "x-2")}) == 4
