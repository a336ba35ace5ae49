"""Plants secrets in real code and prints what `keepgrad.redact` finds, what else it takes for a secret, and how fast it is.

python benchmarks/bench_redaction.py
"""

import base64
import random
import string
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from keepgrad.redact import redact
from keepgrad.simulate import corpus

_WORD = string.ascii_letters + string.digits
_ANYWHERE = ('client = Client("{}")', "TOKEN={}", "# use {} for now", 'headers = {{"Authorization": "Bearer {}"}}', "  token: {}", "{}")


def _some(letters: str, count: int) -> Callable[[random.Random], str]:
    return lambda draw: "".join(draw.choice(letters) for _ in range(count))


def _after(prefix: str, letters: str, count: int) -> Callable[[random.Random], str]:
    return lambda draw: prefix + _some(letters, count)(draw)


def _jwt(draw: random.Random) -> str:
    part = base64.urlsafe_b64encode(f'{{"sub": "{_some(_WORD, 12)(draw)}"}}'.encode()).decode().rstrip("=")
    return f"eyJhbGciOiJIUzI1NiJ9.{part}.{_some(_WORD, 43)(draw)}"


def _password(draw: random.Random) -> str:
    return _some(_WORD, 9)(draw) + draw.choice(string.digits) + draw.choice("!$%+-_")


KINDS: dict[str, tuple[Callable[[random.Random], str], tuple[str, ...]]] = {
    "AWS access key": (_after("AKIA", string.ascii_uppercase + string.digits, 16), _ANYWHERE),
    "AWS secret key": (_some(_WORD + "/+", 40), ('aws_secret_access_key = "{}"', "AWS_SECRET_ACCESS_KEY={}", 'secret = "{}"')),
    "GitHub token": (_after("ghp_", _WORD, 36), _ANYWHERE),
    "GitHub fine-grained": (_after("github_pat_", _WORD, 70), _ANYWHERE),
    "GitLab token": (_after("glpat-", _WORD, 20), _ANYWHERE),
    "OpenAI key": (_after("sk-proj-", _WORD, 48), _ANYWHERE),
    "Anthropic key": (_after("sk-ant-api03-", _WORD + "-_", 90), _ANYWHERE),
    "Hugging Face token": (_after("hf_", _WORD, 34), _ANYWHERE),
    "Google API key": (_after("AIza", _WORD + "-_", 35), _ANYWHERE),
    "Slack token": (lambda draw: f"xoxb-{_some(string.digits, 12)(draw)}-{_some(_WORD, 24)(draw)}", _ANYWHERE),
    "Stripe key": (_after("sk_live_", _WORD, 24), _ANYWHERE),
    "JSON web token": (_jwt, _ANYWHERE),
    "keepgrad key": (_after("kg-", _WORD + "-_", 43), _ANYWHERE),
    "hexadecimal secret": (_some("0123456789abcdef", 40), ('digest_key = "{}"', "SECRET={}", 'Session("{}")')),
    "password in an address": (_password, ("postgres://app:{}@db.internal/app", 'url = "https://ann:{}@example.org/"')),
    "password beside its name": (
        _password,
        ('password = "{}"', "connect(password='{}')", '"db_password": "{}",', "DB_PASSWORD={}", "export API_TOKEN={}"),
    ),
    "private key": (
        lambda draw: "\n".join(_some(_WORD + "/+", 64)(draw) for _ in range(12)),
        ("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----", "-----BEGIN OPENSSH PRIVATE KEY-----\n{}"),
    ),
    "password of plain words": (lambda draw: draw.choice(["letmein", "opensesame", "swordfish"]), ('password = "{}"', "PASSWORD={}")),
}
"""Kind to how one is made and where it stands. The last is a known gap: told from ordinary code by its meaning only."""
PLACES = 200


def recall(kind: str, count: int = PLACES, seed: int = 0) -> float:
    """Share of planted secrets of a kind of which not even half is left."""
    make, forms = KINDS[kind]
    draw, gone = random.Random(f"{seed} {kind}"), 0
    code = [line for _, path in corpus.files("train")[:20] for line in path.read_text(encoding="utf-8", errors="replace").split("\n")]
    for number in range(count):
        secret, at = make(draw), draw.randrange(len(code) - 10)
        before, after = "\n".join(code[at : at + 5]), "\n".join(code[at + 5 : at + 10])
        clean, _ = redact(f"{before}\n{forms[number % len(forms)].format(secret)}\n{after}")
        half = len(secret) // 2
        gone += secret[:half] not in clean and secret[half:] not in clean
    return gone / count


def mistaken(files: int = 150) -> tuple[float, float]:
    """Share of lines of real code that are changed, and megabytes a second."""
    lines = changed = size = 0
    spent = 0.0
    for _, path in corpus.files("train")[:files]:
        text = path.read_text(encoding="utf-8", errors="replace")
        began = time.perf_counter()
        clean, _ = redact(text)
        spent += time.perf_counter() - began
        size += len(text)
        for old, new in zip(text.split("\n"), clean.split("\n"), strict=False):
            lines, changed = lines + 1, changed + (old != new)
    return changed / lines, size / 1e6 / spent


if __name__ == "__main__":
    table = Table("planted", "found")
    for kind in KINDS:
        table.add_row(kind, f"{100 * recall(kind):.1f} %")
    Console().print(table)
    share, speed = mistaken()
    print(f"of lines of the Python standard library and packages, {100 * share:.3f} % are taken for a secret; {speed:.2f} MB a second")
