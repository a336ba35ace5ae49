"""Secrets out of text, before anything is written or shown to a model (P7).

The gateway redacts a prompt before it is rendered, so the model sees what is recorded and the record stays token-exact (P2). Found are what
detect-secrets knows (tokens of known services, passwords beside a name that says so, passwords in addresses, quoted strings of high
entropy) and what its line-wise rules miss: whole private keys, assignments without quotes as in .env files, tokens of newer services.
`python benchmarks/bench_redaction.py` plants secrets in real code and prints what is found, and how much else is taken for one.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

PLACEHOLDER = "REDACTED"
"""Stands where a secret was. A word, so that code goes on being code."""
_FEWEST = 6
"""Characters of a password below which it is not told from an example."""
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----).*?(-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)", re.DOTALL
)
_TOKENS = re.compile(
    r"""\b(?:
        sk-[A-Za-z0-9_-]{20,} | kg-[A-Za-z0-9_-]{40,} | hf_[A-Za-z0-9]{30,} | github_pat_[A-Za-z0-9_]{50,} | gh[oprsu]_[A-Za-z0-9]{30,}
        | AIza[A-Za-z0-9_-]{35} | ya29\.[A-Za-z0-9_-]{20,} | dop_v1_[a-f0-9]{64} | shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}
        | xox[abeoprs]-[A-Za-z0-9-]{10,} | (?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,} | npm_[A-Za-z0-9]{36} | pypi-[A-Za-z0-9_-]{50,}
        | glpat-[A-Za-z0-9_-]{20,} | (?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16} | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}
    )""",
    re.VERBOSE,
)
_UNQUOTED = re.compile(
    r"^\s*(?:export\s+|set\s+|-\s+)?[A-Z0-9_]*(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIALS?)"
    r"[A-Z0-9_]*\s?[=:]\s?([^\s'\"`$<>(){}\[\]#,;][^\s'\"`<>(){}\[\]#,;]{5,})\s*$"
)
_QUOTED = re.compile(
    r"(?:secret|token|passw(?:or)?d|passwd|pwd|passphrase|api_?key|access_?key|auth_?key|private_?key|credential)s?\w*['\"]?\s*"
    r"(?:[:=]|:=|=>|==|,)\s*[bruf]{0,2}(['\"`])([^'\"`\s]{6,})\1",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"://[^\s:/@'\"{}<>]*:([^\s:/@'\"{}<>]{4,})@")
_ALPHABET = string.digits + string.ascii_lowercase
_WORDS = re.compile(r"^[A-Za-z_ .:/-]*$")
"""What a secret that only its neighbour's name gives away does not look like: words."""


def redact(text: str, last: int = 0) -> tuple[str, int]:
    """`text` with a placeholder for each secret found, and how many there were. Line ends and all else stay.

    With `last`, only the last so many characters are wanted, with the line they begin in: what comes before is looked at for the beginning
    of a private key alone, and left out.
    """
    text, count = _PRIVATE_KEY.subn(lambda match: f"{match[1]}{PLACEHOLDER}{match[2]}", text)
    if last and last < len(text):
        text = text[text.rfind("\n", 0, len(text) - last) + 1 :]
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if len(line) > _FEWEST:
            for secret in sorted(set(_secrets(line)), key=len, reverse=True):
                if secret in line:
                    line = line.replace(secret, PLACEHOLDER)
                    count += 1
            lines[at] = line
    return "\n".join(lines), count


def _secrets(line: str) -> Iterator[str]:
    for match in _TOKENS.finditer(line):
        yield match[0]
    for match in _IN_ADDRESS.finditer(line):
        if PLACEHOLDER not in match[1]:
            yield match[1]
    for match in _QUOTED.finditer(line):
        if not _WORDS.match(match[2]) and PLACEHOLDER not in match[2]:
            yield match[2]
    found = _UNQUOTED.match(line)
    if found and not _WORDS.match(found[1]) and PLACEHOLDER not in found[1]:
        yield found[1]
    for plugin in _plugins():
        for secret in plugin(line):
            if len(secret) >= _FEWEST and PLACEHOLDER not in secret:
                yield secret


@cache
def _plugins() -> list[Callable[[str], Iterable[str]]]:
    """detect-secrets' detectors of known tokens and of high entropy, but not of keywords: that one takes code for passwords."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector
    from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString, HexHighEntropyString

    # An address is no secret; of a private key it sees the first line only; names in braces are no password.
    left_out = ("IPPublicDetector", "PrivateKeyDetector", "BasicAuthDetector")
    kinds: dict[str, Any] = get_mapping_from_secret_type_to_class()
    known = [kind for kind in kinds.values() if issubclass(kind, RegexBasedDetector)]
    plugins: list[Callable[[str], Iterable[str]]] = [kind().analyze_string for kind in known if kind.__name__ not in left_out]
    for entropy in (Base64HighEntropyString(limit=4.5), HexHighEntropyString(limit=3.0)):

        def random(line: str, entropy: Base64HighEntropyString | HexHighEntropyString = entropy) -> Iterator[str]:
            for word in entropy.analyze_string(line):
                if (
                    entropy.calculate_shannon_entropy(word) > entropy.entropy_limit
                    and not _WORDS.match(word)
                    and word.lower() not in _ALPHABET
                ):
                    yield word

        plugins.append(random)
    return plugins
