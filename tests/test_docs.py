"""Documents that cannot rot: the file map equals the tree, every key and command is described, the manual is what the program prints."""

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from keepgrad import manual
from keepgrad.cli import parser

ROOT = Path(__file__).parents[1]
_UNMAPPED = ("__init__.py", "py.typed")


def tree() -> set[str]:
    """Every file of the package, and every folder and file at the top, as the file map has to name them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    paths = [Path(line) for line in listed if (ROOT / line).exists()]
    package = {str(path) for path in paths if path.parts[0] == "keepgrad" and path.name not in _UNMAPPED}
    folders = {f"{path.parts[0]}/" for path in paths if len(path.parts) > 1 and path.parts[0] not in ("keepgrad", ".ci")}
    return package | folders


def mapped() -> set[str]:
    """The paths that README's file map names: two spaces of indentation per level, a folder ends in a slash."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"## Files\n.*?```text\n(.*?)```", text, re.DOTALL)
    assert block, "README.md has no section `## Files` with a block ```text"
    paths, parents = set(), [""]
    for line in block[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        full = parents[depth] + name
        del parents[depth + 1 :]
        parents.append(full)
        if not name.endswith("/") or depth == 0:
            paths.add(full)
    return paths - {"keepgrad/"}


def commands(each: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    children = [child for action in each._actions if isinstance(action, argparse._SubParsersAction) for child in action.choices.values()]
    return [each, *(found for child in children for found in commands(child))]


def test_the_file_map_equals_the_tree() -> None:
    assert sorted(mapped() - tree()) == [], "in the map but not there"
    assert sorted(tree() - mapped()) == [], "there but not in the map"
    readme = (ROOT / "README.md").read_text()
    assert manual.with_map(readme, ROOT) == readme, "run: python -m keepgrad.manual"


def test_every_key_has_a_meaning() -> None:
    assert [key for key, text in manual.meanings().items() if not text] == []


@pytest.mark.parametrize(("name", "text"), [("config.md", manual.config_page()), ("cli.md", manual.cli_page())])
def test_the_manual_is_what_the_program_prints(name: str, text: str) -> None:
    assert (ROOT / "docs" / name).read_text() == text, "run: python -m keepgrad.manual"


@pytest.mark.parametrize("each", commands(parser()), ids=lambda each: each.prog)
def test_every_command_and_option_is_described(each: argparse.ArgumentParser) -> None:
    assert each.description
    for action in each._actions:
        if action.option_strings and action.help is not argparse.SUPPRESS:
            assert action.help, f"{each.prog} {action.option_strings}"


def test_readme_shows_the_demo_before_line_30() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()[:30]
    assert any("![" in line for line in lines) and any("make demo" in line for line in lines)


def test_commands_named_in_documents_and_messages_exist() -> None:
    known = {" ".join(each.prog.split()[1:]) for each in commands(parser())}
    sources = [ROOT / "README.md", *(ROOT / "keepgrad").rglob("*.py")]
    for path in sources:
        for said in re.findall(r"`keepgrad ([a-z]+(?: [a-z]+)?)[^`]*`", path.read_text()):
            first = said.split()[0]
            assert said in known or first in known, f"{path.name} names `keepgrad {said}`"


def test_no_address_of_this_machine_is_in_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    forbidden = re.compile(r"(?<![\w.])/(?:work|root|tmp/exp)/")
    for line in listed:
        path = ROOT / line
        if path.suffix in (".py", ".md", ".toml", ".txt", "") and path.is_file():
            assert not forbidden.search(path.read_text(errors="ignore").replace('"/(?:work|root|tmp/exp)/"', "")), line
