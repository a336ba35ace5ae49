"""A reward spec: a small TOML file of terms, weights and caps, known by the hash of its values. Shipped: tab.toml beside this file."""

import hashlib
import tomllib
from pathlib import Path

import msgspec

from keepgrad.errors import ConfigError


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The numbers of one reward (tab.toml says what each does and why). Made by `load`, eaten by terms and score.

    >>> Spec(name="tab", tau=0.25, size_gain=1.0, size_typical=30.0, user_cap=0.1, settled_chars=200)
    """

    name: str
    tau: float
    size_gain: float
    size_typical: float
    user_cap: float
    settled_chars: int

    def __post_init__(self) -> None:
        bounds = {
            "tau": 0 < self.tau < 1,
            "size_gain": 0 <= self.size_gain <= 1,
            "size_typical": 1 <= self.size_typical <= 1000,
            "user_cap": 0 < self.user_cap <= 1,
            "settled_chars": 0 <= self.settled_chars <= 10_000,
        }
        wrong = [name for name, good in bounds.items() if not good]
        if wrong:
            raise ValueError(f"`{wrong[0]}` is {getattr(self, wrong[0])}, which is outside of what tab.toml says about it")

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the values, not of the file: comments and order do not make a new reward."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]


def load(name: str | Path = "tab") -> Spec:
    """The shipped spec of that name, or the one in that TOML file. Raises ConfigError if it is not there or says something unknown."""
    file = Path(name).expanduser()
    if str(name).isidentifier():
        file = Path(__file__).with_name(f"{name}.toml")
    if not file.is_file():
        raise ConfigError(f"no reward spec {name}: give `tab` or the path of a TOML file as reward.spec in keepgrad.toml")
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), Spec)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}; keepgrad/reward/tab.toml shows every key") from None
