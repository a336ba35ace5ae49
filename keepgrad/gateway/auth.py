"""Keys: made once, shown once, stored only as a hash; checked at every request. There is no default key anywhere."""

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Iterable
from typing import Literal

from keepgrad.errors import ConfigError, RequestError
from keepgrad.ledger import Ledger
from keepgrad.records import Key

Scope = Literal["serve", "events", "admin"]
SCOPES: tuple[Scope, ...] = ("serve", "events", "admin")
"""What a key may be for: ask for suggestions, hand in events, read metrics. Any key may read the status."""
_PREFIX = "kg-"
_MAX_SECRET = 200
_BUCKET = 8
_REREAD_S = 0.2
_REVOKED_S = 0.5
"""A revoked key opens nothing after this long."""


def issue(org: str, user: str, consent: Literal["none", "metadata", "code"], scopes: Iterable[str]) -> tuple[Key, str]:
    """A new key and its secret. The secret exists only in what this returns: show it once, store the key. Raises ConfigError."""
    wanted = list(scopes)
    if not org or not user or not wanted or not set(wanted) <= set(SCOPES):
        raise ConfigError(f"a key needs an organisation, a user and scopes out of {', '.join(SCOPES)}: got {org!r}, {user!r}, {wanted}")
    if consent not in ("none", "metadata", "code"):
        raise ConfigError(f"a key's consent is none, metadata or code, not {consent!r}")
    secret = _PREFIX + secrets.token_urlsafe(32)
    key = Key(
        id=f"k-{secrets.token_hex(8)}", secret_hash=hash_secret(secret), org=org, user=user, consent=consent, scopes=wanted,
        created_ms=int(time.time() * 1000),
    )  # fmt: skip
    return key, secret


def hash_secret(secret: str) -> str:
    """SHA-256 of a secret. A secret has 256 random bits, so there is nothing to guess and a slow hash would protect nothing."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Keys:
    """The ledger's keys, by hash. A key that is made or revoked while the gateway runs is taken as such within a second."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._buckets: dict[str, list[Key]] = {}
        self._read_s = -1.0
        self._revoked: set[str] = set()
        self._revoked_s = -1.0

    def check(self, authorization: str, scopes: frozenset[Scope]) -> Key:
        """The key of an Authorization header, if it has one of `scopes`. Raises RequestError: 401 for no or an unknown key, 403 else."""
        scheme, _, secret = authorization.strip().partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret.startswith(_PREFIX) or len(secret) > _MAX_SECRET:
            raise RequestError("a key is needed: send the header `Authorization: Bearer kg-...` (`keepgrad key create` makes one)", 401)
        key = self._find(hash_secret(secret))
        if key is None:
            raise RequestError("this key is not known here: check that it was copied whole and made for this ledger", 401)
        if self._is_revoked(key.id):
            raise RequestError(f"key {key.id} was revoked: ask for a new one (`keepgrad key create`)", 401)
        if not scopes & set(key.scopes):
            raise RequestError(f"key {key.id} is not for this: it needs the scope {' or '.join(sorted(scopes))}", 403)
        return key

    def _is_revoked(self, key: str) -> bool:
        if time.monotonic() - self._revoked_s > _REVOKED_S:
            self._revoked, self._revoked_s = self._ledger.revoked(), time.monotonic()
        return key in self._revoked

    def _find(self, digest: str) -> Key | None:
        found = self._match(digest)
        if found is None and time.monotonic() - self._read_s > _REREAD_S:
            self._read()
            found = self._match(digest)
        return found

    def _match(self, digest: str) -> Key | None:
        # The bucket is chosen by a part of a hash, which says nothing about a secret; within it every key is compared, in constant time.
        found = None
        for key in self._buckets.get(digest[:_BUCKET], ()):
            if hmac.compare_digest(key.secret_hash, digest):
                found = key
        return found

    def _read(self) -> None:
        with self._lock:
            buckets: dict[str, list[Key]] = {}
            stored = self._ledger.keys()
            for key in stored:
                buckets.setdefault(key.secret_hash[:_BUCKET], []).append(key)
            self._buckets, self._read_s = buckets, time.monotonic()
