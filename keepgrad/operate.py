"""What an operator does by hand: make a data folder ready, add keys, cut a gate suite, look at versions, steer traffic."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from keepgrad.config import Config
from keepgrad.doctor import require_disk
from keepgrad.errors import ConfigError, VersionError
from keepgrad.gateway.auth import issue
from keepgrad.ledger import Ledger
from keepgrad.policy.versions import Store
from keepgrad.records import Revocation, Traffic, Version
from keepgrad.release import suite
from keepgrad.simulate import corpus

SUITE = "suite.jsonl"
"""The gate's contexts, in the data folder."""
_GATES_PER_SUITE = 8
_SCOPES = ("serve", "events")
_SKIPPED = frozenset(["node_modules", "site-packages", "__pycache__", "build", "dist", "venv"])


@contextmanager
def opened(config: Config) -> Iterator[Ledger]:
    """The ledger of the data folder, closed at the end."""
    ledger = Ledger.open(config.root)
    try:
        yield ledger
    finally:
        ledger.close()


def prepare(
    config: Config, fingerprint: str, files: dict[str, bytes], users: Sequence[str], org: str, repository: Path | None = None
) -> dict[str, Any]:
    """Make the data folder ready: base version, gate suite, traffic, one key per user. What is there already stays as it is.

    `fingerprint` is that of the model folder, `files` are those of a base version (policy/engine.py). Returns {data, base, contexts,
    keys: [{id, org, user, consent, secret}]}; a secret is shown this once. Raises ConfigError (no disk, an unusable name), VersionError
    (the folder was made for another model).
    """
    config.root.mkdir(parents=True, exist_ok=True)
    require_disk(config.root)
    with opened(config) as ledger:
        base = _base(config, ledger, fingerprint, files)
        if ledger.traffic() is None:
            share = config.release.holdback_share
            ledger.put_traffic(Traffic(base, base, "", 0.0, base, share, False, "the base, to begin with", _now_ms()))
        path = config.root / SUITE
        count = len(suite.load(path)) if path.exists() and repository is None else write_suite(config, repository)[1]
        keys = [_create_key(ledger, user, org, "code") for user in users]
    return {"data": str(config.root), "base": base, "contexts": count, "keys": keys}


def create_key(
    config: Config, user: str, org: str, consent: Literal["none", "metadata", "code"], scopes: Sequence[str] = _SCOPES
) -> dict[str, str]:
    """A new key with its secret, which is stored nowhere. A running gateway takes it within a second. Raises ConfigError."""
    with opened(config) as ledger:
        return _create_key(ledger, user, org, consent, scopes)


def list_keys(config: Config) -> list[dict[str, Any]]:
    """Every key without its hash, and whether it was revoked."""
    with opened(config) as ledger:
        revoked, keys = ledger.revoked(), ledger.keys()
    rows = [msgspec.to_builtins(key) | {"scopes": " ".join(key.scopes), "revoked": key.id in revoked} for key in keys]
    return [{name: value for name, value in row.items() if name != "secret_hash"} for row in rows]


def revoke_key(config: Config, key: str, reason: str) -> dict[str, str]:
    """End a key; a running gateway refuses it within a second. What its user did stays in the books. Raises LedgerError if unknown."""
    with opened(config) as ledger:
        ledger.revoke(Revocation(key, reason, _now_ms()))
    return {"id": key, "state": "revoked", "reason": reason}


def write_suite(config: Config, repository: Path | None = None, count: int = 0) -> tuple[Path, int]:
    """Cut the gate's contexts into the data folder, from `repository` or from the installed Python files kept apart for the gate.

    Returns the file and how many contexts it holds. Raises ConfigError if the code does not hold enough for one gate.
    """
    wanted = count or _GATES_PER_SUITE * config.release.gate_contexts
    files = _repository_files(repository) if repository else corpus.files("gate")
    contexts = suite.cut(files, wanted, config.seed)
    if len(contexts) < config.release.gate_min_contexts:
        raise ConfigError(
            f"{repository or 'the installed Python code'} gives {len(contexts)} gate contexts and a gate needs "
            f"{config.release.gate_min_contexts}: name a folder with more Python code, or lower release.gate_min_contexts"
        )
    path = config.root / SUITE
    suite.save(contexts, path)
    return path, len(contexts)


def versions(config: Config, verify: bool = False) -> list[dict[str, Any]]:
    """Every version in the ledger, oldest first: manifest, gate and canary decisions, and its part in the traffic.

    With `verify` every file is read and compared with its checksum. Raises VersionError if one differs.
    """
    with opened(config) as ledger:
        listed, verdicts, traffic = ledger.versions(), ledger.verdicts(), ledger.traffic()
    if verify:
        store = Store(config.root)
        for version in listed:
            store.verify(version.id)
    rows = []
    for version in listed:
        decisions = {verdict.stage: verdict.decision for verdict in verdicts if verdict.candidate == version.id}
        rows.append(
            {
                "version": version.id,
                **{name: value for name, value in msgspec.to_builtins(version).items() if name != "id"},
                "gate": decisions.get("gate", ""),
                "canary": decisions.get("canary", ""),
                "traffic": ", ".join(_parts(traffic, version.id)) if traffic else "",
            }
        )
    return rows


def show_traffic(config: Config) -> dict[str, Any]:
    """The record in force. Raises ConfigError if there is none."""
    with opened(config) as ledger:
        return dict(msgspec.to_builtins(_traffic(ledger, config)))


def set_traffic(config: Config, version: str, share: float, unjudged: bool, reason: str) -> dict[str, Any]:
    """Give a version all traffic (share 1) or a share of it as canary. Raises VersionError for a version that may not have it (P6)."""
    with opened(config) as ledger:
        known = {each.id: each for each in ledger.versions()}
        if version not in known:
            raise VersionError(f"there is no version {version}: `keepgrad versions` lists them")
        passed = any(
            verdict.candidate == version and verdict.stage == "gate" and verdict.decision == "pass" for verdict in ledger.verdicts()
        )
        if known[version].parent and not passed and not unjudged:
            raise VersionError(f"version {version} has not passed the gate: choose one that has (`keepgrad versions`), or add --unjudged")
        Store(config.root).verify(version)
        now = _traffic(ledger, config)
        if share < 1:
            new = msgspec.structs.replace(now, canary=version, canary_share=share, force=False, reason=reason, at_ms=_now_ms())
        else:
            previous = now.incumbent if now.incumbent != version else now.previous
            new = msgspec.structs.replace(
                now, incumbent=version, previous=previous, canary="", canary_share=0.0, force=False, reason=reason, at_ms=_now_ms()
            )
        ledger.put_traffic(new)
        return dict(msgspec.to_builtins(new))


def rollback(config: Config, reason: str) -> dict[str, Any]:
    """End the canary if one runs; else go back to the version before the incumbent. Open conversations move at once.

    Raises VersionError if there is nothing to go back to.
    """
    with opened(config) as ledger:
        now = _traffic(ledger, config)
        if now.canary:
            new = msgspec.structs.replace(now, canary="", canary_share=0.0, force=True, reason=reason, at_ms=_now_ms())
        else:
            if not now.previous or now.previous == now.incumbent:
                raise VersionError(f"there is no version before {now.incumbent}: name one with `keepgrad traffic set VERSION`")
            parents = {version.id: version.parent for version in ledger.versions()}
            before = parents.get(now.previous, "") or now.previous
            new = msgspec.structs.replace(now, incumbent=now.previous, previous=before, force=True, reason=reason, at_ms=_now_ms())
        ledger.put_traffic(new)
        return dict(msgspec.to_builtins(new))


def _base(config: Config, ledger: Ledger, fingerprint: str, files: dict[str, bytes]) -> str:
    """The base version's id: the stored one, or a new one."""
    for version in ledger.versions():
        if not version.parent:
            if version.model != fingerprint:
                raise VersionError(
                    f"the data in {config.root} was made with another model than {config.model.path}: set server.data to a new folder"
                )
            return version.id
    made: Version = Store(config.root).write(files, parent="", model=fingerprint, window="", spec="", seed=config.seed)
    ledger.put_version(made)
    return made.id


def _create_key(
    ledger: Ledger, user: str, org: str, consent: Literal["none", "metadata", "code"], scopes: Sequence[str] = _SCOPES
) -> dict[str, str]:
    key, secret = issue(org, user, consent, scopes)
    ledger.put_key(key)
    return {"id": key.id, "org": org, "user": user, "consent": consent, "secret": secret}


def _repository_files(repository: Path) -> list[tuple[str, Path]]:
    """(project, file) of each Python file, in an order that looks shuffled, so that the first so many are a sample."""
    root = repository.expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}: give the folder of a repository with Python files")
    found = [
        path for path in root.rglob("*.py") if not any(part.startswith(".") or part in _SKIPPED for part in path.relative_to(root).parts)
    ]
    return [(root.name, path) for path in sorted(found, key=lambda path: hashlib.blake2b(str(path.relative_to(root)).encode()).digest())]


def _traffic(ledger: Ledger, config: Config) -> Traffic:
    traffic = ledger.traffic()
    if traffic is None:
        raise ConfigError(f"no version has traffic in {config.root}: make the folder ready with `keepgrad init`")
    return traffic


def _parts(traffic: Traffic, version: str) -> Iterator[str]:
    if version == traffic.incumbent:
        yield "incumbent"
    if version == traffic.canary:
        yield f"canary {traffic.canary_share:.0%}"
    if version == traffic.holdback and traffic.holdback_share:
        yield f"holdback {traffic.holdback_share:.0%}"


def _now_ms() -> int:
    return int(time.time() * 1000)
