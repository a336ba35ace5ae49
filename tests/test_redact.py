"""Secrets planted in real code are found, real code stays as it is, and nothing is redacted twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_redaction as redaction
from keepgrad.redact import PLACEHOLDER, redact

GAP = "password of plain words"


@pytest.mark.parametrize("kind", sorted(set(redaction.KINDS) - {GAP}))
def test_planted_secrets_are_found(kind: str) -> None:
    assert redaction.recall(kind, count=60, seed=1) >= 0.98


def test_the_known_gap_is_still_one() -> None:
    """A word as a password cannot be told from code by its looks; should this ever fail, say so in the benchmark."""
    assert redaction.recall(GAP, count=20, seed=1) < 0.5


def test_real_code_stays_as_it_is() -> None:
    share, _ = redaction.mistaken(files=80)
    assert share < 0.0005


@pytest.mark.parametrize(
    "line",
    [
        "password = get_password()",
        'if token_type == "identifier":',
        'API_KEY = os.environ["API_KEY"]',
        "PASSWORD=$DB_PASSWORD",
        'HEX = "0123456789abcdef"',
        "from secrets import token_urlsafe",
        'url = f"postgres://{user}:{password}@{host}/app"',
        'TOKEN = re.compile(r"[a-z]+")',
    ],
)
def test_code_about_secrets_is_no_secret(line: str) -> None:
    assert redact(line) == (line, 0)


@given(st.lists(st.sampled_from(["x = 1", "-----BEGIN PRIVATE KEY-----", "MIIB" * 12, "-----END PRIVATE KEY-----", 'password = "a1b2c3d4"',
                                 "key: sk-" + "a1B2" * 9, f'token = "{PLACEHOLDER}"', "", "export DB_PASSWORD=q1w2e3r4"])))  # fmt: skip
def test_redacting_again_changes_nothing(lines: list[str]) -> None:
    clean, found = redact("\n".join(lines))
    assert redact(clean)[0] == clean
    assert "a1b2c3d4" not in clean and "a1B2" not in clean and "q1w2e3r4" not in clean
    assert found or clean == "\n".join(lines)


def test_the_last_characters_alone_are_redacted_as_the_whole_is() -> None:
    text = "x = 1\n-----BEGIN RSA PRIVATE KEY-----\n" + "q1W2e3R4" * 200 + "\nzz"
    clean, found = redact(text, last=700)
    assert found == 1 and "q1W2" not in clean and redact(text)[0].endswith(clean)
    code = "\n".join(f'password = "a1b2c3d4{at}"' for at in range(100))
    assert redact(code)[0].endswith(redact(code, last=500)[0]) and redact(code, last=500)[1] == 21
