"""Contexts with known answers: places in real source where a developer pauses, and what really stands there.

A suite is cut from files once, kept as JSON lines, and answered by two versions at a time under the same seeds, so that they can be paired.
"""

import hashlib
import io
import keyword
import random
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from keepgrad.errors import GateError
from keepgrad.policy.client import EngineClient
from keepgrad.policy.prompt import Prompter
from keepgrad.records import Draft, EngineRequest, Sampling

_KEPT_PREFIX = 4_000
"""Characters of prefix kept per context: more than any prompt of the sizes we serve needs."""
_MIN_PREFIX, _MIN_REST = 200, 4
_START_SHARE = 0.4
"""Share of cursors at the start of a line's code; the others stand inside a line."""
_PAUSE_AFTER = frozenset(["(", "[", "{", ",", "=", ".", ":", "+", "-", "*", "/", "%", "==", "!=", "<", ">", "<=", ">=", "+=", "->", "|"])
_LAYOUT = frozenset(
    [tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER]
)


class Context(msgspec.Struct, frozen=True):
    """One Tab opportunity with its answer. Made by `cut`, eaten by the gate and the evaluation.

    `truth` is the rest of the line after the cursor, without the newline. `file` is the cluster that intervals resample by.

    >>> Context(id="x-91ab", file="python/json/decoder.py", project="python", prefix="def add(a, b):\\n    return ", truth="a + b")
    """

    id: str
    file: str
    project: str
    prefix: str
    truth: str


def cut(files: Iterable[tuple[str, Path]], count: int, seed: int, per_file: int = 3) -> list[Context]:
    """`count` contexts from (project, file) pairs in their order, at most `per_file` of a file; fewer if the files do not hold more.

    A cursor stands after the indentation of a code line, or inside it after an opening bracket, comma, operator, dot or keyword; at least
    200 characters stand before it and 4 other than blanks after it. Never inside a string, a docstring or a comment.
    """
    contexts: list[Context] = []
    for project, path in files:
        if len(contexts) >= count:
            break
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        name = _name(project, path)
        draw = random.Random(f"{seed}:{name}")
        for offset in _choose(list(_cursors(source)), per_file, draw):
            contexts.append(_context(source, offset, name, project))
    return contexts[:count]


def save(contexts: Sequence[Context], path: Path) -> None:
    """Write JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_bytes(b"".join(msgspec.json.encode(context) + b"\n" for context in contexts))
    temporary.replace(path)


def load(path: Path) -> list[Context]:
    """Read JSON lines. Raises GateError if there is no such file or a line is not a context."""
    if not path.exists():
        raise GateError(f"no gate contexts at {path}: write them with `keepgrad suite`, from files that nothing trains on")
    contexts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            contexts.append(msgspec.json.decode(line, type=Context))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise GateError(f"{path} line {number} is not a gate context ({error}): write the file again with `keepgrad suite`") from None
    return contexts


def rotate(pool: Sequence[Context], count: int, turn: int, seed: int) -> list[Context]:
    """`count` contexts of the pool for the turn-th gate (from 0): successive turns take successive slices of one shuffled order.

    So no context is met again before the whole pool has been used, and candidates are not selected for one fixed set.
    """
    order = sorted(pool, key=lambda context: _hash("rotate", str(seed), context.id))
    if len(order) <= count:
        return order
    start = turn * count % len(order)
    return (order + order)[start : start + count]


async def draft(
    engine: EngineClient,
    prompter: Prompter,
    contexts: Sequence[Context],
    versions: Sequence[str],
    sampling: Sampling,
    seed: int,
    concurrency: int = 64,
    context_tokens: int = 128,
) -> dict[str, list[Draft]]:
    """Each version's draft for each context, in the order of `contexts`.

    All versions of a context go in one request: they share its prefill and its seed. Raises EngineError if the engine stays away,
    VersionError for a version it cannot load.
    """
    names, requests = list(dict.fromkeys(versions)), []
    for context in contexts:
        prompt_ids, healed = prompter.encode(context.prefix, context_tokens)
        requests.append(
            EngineRequest(prompt_ids=prompt_ids, versions=names, seed=seed_of(seed, context.id), sampling=sampling, healed=healed)
        )
    answers = await engine.generate_all(requests, concurrency)
    return {name: [answer[index] for answer in answers] for index, name in enumerate(names)}


def seed_of(seed: int, context: str) -> int:
    """The sampling seed of a context: the same for every version, different between contexts and runs."""
    return _hash("seed", str(seed), context) & 0x7FFFFFFF


def _choose(cursors: list[tuple[int, bool]], most: int, draw: random.Random) -> list[int]:
    """At most `most` offsets in file order, in the wanted mix of line starts and others."""
    starts = [offset for offset, at_start in cursors if at_start]
    inside = [offset for offset, at_start in cursors if not at_start]
    draw.shuffle(starts)
    draw.shuffle(inside)
    chosen: list[int] = []
    while len(chosen) < most and (starts or inside):
        first, second = (starts, inside) if draw.random() < _START_SHARE else (inside, starts)
        chosen.append((first or second).pop())
    return sorted(chosen)


def _cursors(source: str) -> Iterator[tuple[int, bool]]:
    """(offset, whether it is the start of the line's code) of every place where a developer might pause."""
    lines = io.StringIO(source).readlines()
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    previous: tokenize.TokenInfo | None = None
    inside_string = 0
    for token in _tokens(source):
        # From Python 3.12 on an f-string comes in pieces; no cursor goes into one.
        inside_string += (tokenize.tok_name[token.type] == "FSTRING_START") - (tokenize.tok_name[token.type] == "FSTRING_END")
        if token.type in _LAYOUT:
            previous = None if token.type in (tokenize.NEWLINE, tokenize.NL) else previous
            continue
        at_start = previous is None or previous.end[0] != token.start[0]
        row, column = token.start
        offset = offsets[row - 1] + column
        wanted = at_start or (previous is not None and (previous.string in _PAUSE_AFTER or keyword.iskeyword(previous.string)))
        previous = token
        if not wanted or inside_string or offset < _MIN_PREFIX or token.type == tokenize.STRING and token.start[0] != token.end[0]:
            continue
        rest = lines[row - 1][column:].rstrip()
        docstring = at_start and token.type == tokenize.STRING
        if not docstring and sum(not character.isspace() for character in rest) >= _MIN_REST:
            yield offset, at_start


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    """All tokens, or none if the source is not Python to its end."""
    try:
        return list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return []


def _context(source: str, offset: int, name: str, project: str) -> Context:
    begin = max(0, offset - _KEPT_PREFIX)
    if begin:
        newline = source.find("\n", begin, offset)
        begin = newline + 1 if newline >= 0 else begin
    end = source.find("\n", offset)
    truth = source[offset : end if end >= 0 else len(source)]
    return Context(id=f"x-{_hash('context', name, str(offset)):016x}", file=name, project=project, prefix=source[begin:offset], truth=truth)


def _name(project: str, path: Path) -> str:
    parts = path.parts
    inside = parts[parts.index(project) + 1 :] if project in parts else parts[-3:]
    return "/".join((project, *inside))


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big")
