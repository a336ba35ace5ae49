"""The manual that the program writes about itself: every configuration key and every command's help, as text for people.

docs/config.md and docs/cli.md are this module's output; a test compares them. `python -m keepgrad.manual` writes them anew.
"""

import argparse
import ast
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
    """Write docs/ in the working folder."""
    folder = Path("docs")
    folder.mkdir(exist_ok=True)
    (folder / "config.md").write_text(config_page())
    (folder / "cli.md").write_text(cli_page())


if __name__ == "__main__":
    main()
