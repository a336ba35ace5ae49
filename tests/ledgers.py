"""Records for tests of the ledger: what each holds follows from its number alone, so a test knows what must be stored under an id."""

import random
from typing import Any

from keepgrad.ledger import Ledger
from keepgrad.records import Event, GateVerdict, Generation, Key, Revocation, Sampling, Score, Tokens, Traffic, Version, Window

USERS = 4
CLOCK = 1_764_400_000_000


def generation(number: int, **fields: Any) -> Generation:
    """The generation with this number, some fields changed. Every USERS-th is the same user's and has that user's key."""
    user = number % USERS
    wanted: dict[str, Any] = {
        "id": f"g-{number:06d}", "kind": "tab", "org": "acme", "user": f"u-{user}", "key": f"k-{user}", "conversation": f"c-{number // 3}",
        "version": "v-base", "arm": "incumbent", "consent": "code", "seed": number, "sampling": Sampling(), "prompt_tokens": 12,
        "completion_tokens": 4, "verdict": "show", "verdict_logprob": -0.01, "show_probability": 0.99, "finish": "stop", "text": "null + b",
        "path": "src/a.py", "client_ms": CLOCK + number, "created_ms": CLOCK + 7 + number, "latency_ms": 85.125,
    }  # fmt: skip
    return Generation(**{**wanted, **fields})


def tokens(number: int, **fields: Any) -> Tokens:
    """The arrays of the generation with this number, with floats that use all of their 53 bits."""
    draw = random.Random(number)
    wanted: dict[str, Any] = {
        "generation": f"g-{number:06d}",
        "prompt_ids": [draw.randrange(50_000) for _ in range(12)],
        "completion_ids": [draw.randrange(50_000) for _ in range(4)],
        "logprobs": [-draw.expovariate(1.0) for _ in range(4)],
        "cuts": [1, 4],
        "features": [[draw.gauss(0, 1) for _ in range(3)] for _ in range(2)],
    }
    return Tokens(**{**wanted, **fields})


def event(number: int, about: int, **fields: Any) -> Event:
    """The event with this number, about the generation with that number."""
    wanted: dict[str, Any] = {"id": f"e-{number:06d}", "generation": f"g-{about:06d}", "kind": "shown", "at_ms": CLOCK + 1_000 + number}
    return Event(**{**wanted, **fields})


def key_of(about: int) -> str:
    """The key that the generation with this number was served to."""
    return f"k-{about % USERS}"


def version(name: str, parent: str = "", **fields: Any) -> Version:
    """A version's manifest."""
    wanted: dict[str, Any] = {"model": "m", "window": "w-1", "spec": "s", "code": "0", "seed": 0, "files": {"a": "00"}, "created_ms": CLOCK}
    return Version(**{"id": name, "parent": parent, **wanted, **fields})


def traffic(incumbent: str, **fields: Any) -> Traffic:
    """A traffic record."""
    wanted: dict[str, Any] = {
        "previous": "v-base", "canary": "", "canary_share": 0.0, "holdback": "v-base", "holdback_share": 0.1, "force": False,
        "reason": "test", "at_ms": CLOCK,
    }  # fmt: skip
    return Traffic(**{"incumbent": incumbent, **wanted, **fields})


def score(number: int, **fields: Any) -> Score:
    """The score of the generation with this number."""
    wanted: dict[str, Any] = {"place": "rewarded", "reason": "accepted", "reward": 0.75, "terms": {"accept": 0.75}, "spec": "s"}
    return Score(**{"generation": f"g-{number:06d}", **wanted, **fields})


def verdict(name: str, **fields: Any) -> GateVerdict:
    """A verdict with a number that there is none of."""
    wanted: dict[str, Any] = {
        "stage": "gate", "candidate": "v-1", "incumbent": "v-base", "decision": "pass", "reason": "ok", "metrics": {"x": {"low": None}},
        "contexts": 64, "at_ms": CLOCK,
    }  # fmt: skip
    return GateVerdict(**{"id": name, **wanted, **fields})


def key(name: str, **fields: Any) -> Key:
    """An access key."""
    wanted: dict[str, Any] = {
        "secret_hash": "00",
        "org": "acme",
        "user": "ann",
        "consent": "code",
        "scopes": ["serve"],
        "created_ms": CLOCK,
    }
    return Key(**{"id": name, **wanted, **fields})


def fill(ledger: Ledger, count: int = 6) -> None:
    """At least one row in every table: the first half of the generations sealed, the others in the spool."""
    ledger.add_generations([(generation(n), tokens(n)) for n in range(count // 2)])
    ledger.seal()
    ledger.add_generations([(generation(n), tokens(n)) for n in range(count // 2, count)])
    ledger.add_events([(event(n, n), key_of(n)) for n in range(count)])
    ledger.put_version(version("v-base"))
    ledger.publish(version("v-1", "v-base"), ["g-000000", "g-000001"])
    for incumbent in ("v-base", "v-1"):
        ledger.put_traffic(traffic(incumbent))
    ledger.put_window(Window("w-1", 1, count, CLOCK))
    ledger.put_scores("w-1", [score(n) for n in range(count)])
    ledger.put_verdict(verdict("x-1"))
    ledger.start_stage("c-1", "collect")
    ledger.put_stage("c-1", "collect", 1.5, {"generations": count})
    ledger.put_key(key("k-0"))
    ledger.revoke(Revocation("k-0", "laptop lost", CLOCK))
    ledger.count("forbidden_event", 2)
