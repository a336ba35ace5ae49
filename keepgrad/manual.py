"""The manual that the program writes about itself: every configuration key, every command's help, the map of its files.

docs/config.md, docs/cli.md and the file map in README.md are this module's output; a test compares them. `python -m keepgrad.manual`, run
in a clone, writes them anew.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepgrad import cli, config
from keepgrad.config import Config

_CONFIG_HEAD = """\
# Configuration

One file, `keepgrad.toml`, read from the working folder or named with `--config`. Every key is optional; an unknown key is an error.
`keepgrad config` prints what is in force, with each key's meaning. Defaults:

```toml
"""
_CLI_HEAD = """\
# Command line

Exit codes: 0 done; 1 the answer is no (audit not balanced, doctor found something missing); 2 it could not be done, and one sentence on
standard error says why; 130 interrupted.
"""

_MAP_COLUMN, _MAP_WORDS = 26, 110
_BESIDE = {
    "benchmarks/": "what costs how much, as programs",
    "docs/": "configuration and command line, written by keepgrad/manual.py",
    "tests/": "by part",
}


def meanings() -> dict[str, str]:
    """Each key (`table.key`, or `key` at the top) and the sentence under its field in config.py; an empty one if it has none."""
    tree = ast.parse(Path(config.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {}
    for field, value in msgspec.to_builtins(Config()).items():
        if isinstance(value, dict):
            texts = _field_texts(classes[type(getattr(Config(), field)).__name__])
            found.update({f"{field}.{key}": texts.get(key, "") for key in value})
        else:
            found[field] = _field_texts(classes["Config"]).get(field, "")
    return found


def config_text(values: Config) -> str:
    """The whole configuration as TOML that can be read back, each key under a comment that says what it is."""
    texts, lines, table = meanings(), [], ""
    for line in config.dump(values).splitlines():
        key = line.split(" = ", 1)[0]
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif " = " in line and texts.get(table + key):
            lines.append(f"# {texts[table + key]}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def config_page() -> str:
    """docs/config.md."""
    return _CONFIG_HEAD + config_text(Config()) + "```\n"


def cli_page() -> str:
    """docs/cli.md: the help of every command."""
    parts = [_CLI_HEAD]
    for parser in _parsers(cli.parser()):
        parts.append(f"\n## {parser.prog}\n\n```text\n{parser.format_help()}```\n")
    return "".join(parts)


def file_map(root: Path) -> str:
    """The tree of the package below `root`, one line per file with the first words of its docstring, then the folders beside it."""
    lines = ["keepgrad/"]
    package = root / "keepgrad"
    files = [path.relative_to(package) for pattern in ("*.py", "*.toml") for path in package.rglob(pattern) if path.name != "__init__.py"]
    folder = Path(".")
    for file in sorted(files, key=lambda file: (file.parent.as_posix() if file.parent != Path(".") else "", file.name)):
        if file.parent != folder:
            folder = file.parent
            lines.append(_mapped(f"  {folder.as_posix()}/", _first_words(package / folder / "__init__.py")))
        depth = "  " * len(file.parts)
        lines.append(_mapped(depth + file.name, _first_words(package / file)))
    lines += [_mapped(name, what) for name, what in _BESIDE.items() if any((root / name).glob("*"))]
    return "\n".join(lines) + "\n"


def with_map(readme: str, root: Path) -> str:
    """README text with its file map as `file_map` has it now."""
    return re.sub(r"(## Files\n.*?```text\n).*?(```)", lambda found: found[1] + file_map(root) + found[2], readme, count=1, flags=re.DOTALL)


def _mapped(name: str, what: str) -> str:
    return f"{name:<{_MAP_COLUMN}}{what}".rstrip()


def _first_words(path: Path) -> str:
    """The first sentence, or a good part of it, of a module's docstring, or of a TOML file's first comment."""
    if not path.exists():
        return ""
    text = path.read_text()
    said = text.lstrip("# ").split("\n", 1)[0] if path.suffix == ".toml" else ast.get_docstring(ast.parse(text)) or ""
    sentence = re.split(r"[;.](?:\s|$)", " ".join(said.split("\n\n")[0].split()), maxsplit=1)[0].replace("`", "")
    if len(sentence) > _MAP_WORDS:
        cut = max(sentence.rfind(mark, 0, _MAP_WORDS) for mark in (", ", ": ", " and "))
        sentence = sentence[:cut]
        if sentence.count("(") > sentence.count(")"):
            sentence = sentence[: sentence.rindex("(")]
    return sentence.rstrip(" ,:")


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def _field_texts(node: ast.ClassDef) -> dict[str, str]:
    """Field name to the string that stands right under it."""
    texts = {}
    for first, second in zip(node.body, node.body[1:], strict=False):
        if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name) and isinstance(second, ast.Expr):
            constant = second.value
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                texts[first.target.id] = " ".join(constant.value.split())
    return texts


def main() -> None:
    """Write docs/ and README's file map in the working folder."""
    folder = Path("docs")
    folder.mkdir(exist_ok=True)
    (folder / "config.md").write_text(config_page())
    (folder / "cli.md").write_text(cli_page())
    readme = Path("README.md")
    readme.write_text(with_map(readme.read_text(), Path(".")))


if __name__ == "__main__":
    main()
