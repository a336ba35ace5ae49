"""A whole loop on the tiny model: engine and gateway as processes, clients that keep asking, and a gate suite the base can answer."""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from keepgrad.config import Cycle, Release, Reward, Train, dump
from keepgrad.policy.client import EngineClient
from keepgrad.policy.prompt import Prompter
from keepgrad.policy.traffic import unit_interval, user_hash
from keepgrad.records import Sampling
from keepgrad.release import suite
from keepgrad.reward import spec as specs
from tests.gateway.harness import Site, happened, process, site
from tests.release.test_suite import FILES

GATE = 16
TURNS = 16
SHARE = 0.4
_PREFIXES = suite.cut(FILES, 200, seed=5, per_file=50)


@dataclass
class Place:
    """A site with its processes running and its clients asking."""

    site: Site
    clients: "Clients"


class Clients(threading.Thread):
    """Eight users of the gateway, each with a clock of its own, who see, take or reject what they get, until told to stop.

    Like the fleet, they are busy while the cycle collects or tries a candidate, and ask only now and then otherwise.
    """

    def __init__(self, place: Site, headers: list[dict[str, str]], pause_s: float = 0.1) -> None:
        super().__init__(daemon=True)
        self._url, self._headers, self._pause_s = f"http://127.0.0.1:{place.config.server.port}", headers, pause_s
        self._done, self._ledger, self._busy = threading.Event(), place.ledger, True
        self.refused: list[str] = []
        self.served = 0

    def run(self) -> None:
        """The thread."""
        asyncio.run(self._all())

    def stop(self) -> None:
        """End after what is under way."""
        self._done.set()
        self.join(30)

    async def _all(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=300, trust_env=False) as http:
            await asyncio.gather(self._watch(), *(self._one(http, number) for number in range(len(self._headers))))

    async def _watch(self) -> None:
        while not self._done.is_set():
            self._busy = self._ledger.current_stage() in ("idle", "collect", "mature", "canary")
            await asyncio.sleep(0.2)

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        clock = 1_764_400_000_000 + 1_000 * number
        for turn in itertools.count():
            if self._done.is_set():
                return
            clock += 20_000
            body = {"prefix": chance.choice(_PREFIXES).prefix, "conversation": f"c-{number}-{turn}", "at_ms": clock, "path": "a.py"}
            answer = await http.post("/v1/keepgrad/tab", json=body, headers=self._headers[number])
            if answer.status_code != 200:
                self.refused.append(answer.text)
                return
            self.served += 1
            if answer.json()["verdict"] == "show":
                await self._report(http, answer.json(), clock, chance.random(), number)
            await asyncio.sleep(self._pause_s if self._busy else 2.0)

    async def _report(self, http: httpx.AsyncClient, answer: dict[str, Any], clock: int, luck: float, number: int) -> None:
        end = "accepted" if luck < 0.5 else "rejected"
        events = [happened(answer["id"], "shown", at_ms=clock + 10), happened(answer["id"], end, at_ms=clock + 900)]
        events.append(
            happened(answer["id"], "settled", at_ms=clock + 12_000, reason="quiet", text=answer["text"] if luck < 0.5 else "other")
        )
        reply = await http.post("/v1/keepgrad/events", json={"events": events}, headers=self._headers[number])
        if reply.status_code != 200:
            self.refused.append(reply.text)


@contextlib.contextmanager
def place(folder: Path, tiny: Path, **cycle_fields: Any) -> Iterator[Place]:
    """Everything up: engine, gateway, eight users (some of them in the canary's share), suite."""
    made = site(folder, tiny)
    base = made.store.read(made.base)
    made.ledger.put_version(base)
    made.config = msgspec.structs.replace(
        made.config,
        train=Train(rank=4, alpha=8, layers=2, lr=1e-6, minibatch=8, coverage=0.95, cuts=False, redrafts=8),
        release=Release(gate_contexts=GATE, gate_min_contexts=8, margin=0.6, canary_share=SHARE, canary_min=8, canary_max=16),
        cycle=Cycle(
            **{"window": 32, "mature_s": 5.0, "collect_s": 60.0, "canary_s": 60.0, "gate_s": 60.0, "train_s": 120.0, **cycle_fields}
        ),
    )
    shipped = (Path(specs.__file__).with_name("tab.toml")).read_text()
    # These users take whatever they get or nothing, by chance: were long texts worth more, chance would weigh more than it need.
    (folder / "flat.toml").write_text(shipped.replace("size_gain = 1.0", "size_gain = 0.0"))
    made.config = msgspec.structs.replace(made.config, reward=Reward(spec=str(folder / "flat.toml")))
    (folder / "keepgrad.toml").write_text(dump(made.config))
    with process(made, "engine", folder / "engine.log"), process(made, "serve", folder / "gateway.log"):
        asyncio.run(write_suite(made))
        clients = Clients(made, [made.key(user) for user in _users()])
        clients.start()
        try:
            yield Place(made, clients)
        finally:
            clients.stop()
            made.ledger.close()


def _users() -> list[str]:
    """Three users in the canary's share and five outside, whatever the hash."""
    names = [f"dev-{number}" for number in range(200)]
    inside = [name for name in names if unit_interval(user_hash("acme", name)) < SHARE]
    return [*inside[:3], *[name for name in names if name not in inside][:5]]


async def write_suite(made: Site) -> None:
    """A suite whose truths are what the base says at the seeds of the gate's first turns: a random model knows no better answer."""
    prompter = Prompter(Path(made.config.model.path))
    pool = [context for context in suite.cut(FILES, 400, seed=9, per_file=100)][: GATE * TURNS]
    engine = EngineClient(f"http://127.0.0.1:{made.config.server.engine_port}")
    sampling = Sampling(temperature=made.config.model.temperature, max_tokens=made.config.model.max_tokens, explore=False)
    answered = []
    try:
        for turn in range(TURNS):
            chosen = suite.rotate(pool, GATE, turn, made.config.seed)
            seed = made.config.seed + turn + 1
            drafts = await suite.draft(
                engine, prompter, chosen, [made.base], sampling, seed, context_tokens=made.config.model.context_tokens
            )
            answered += [
                msgspec.structs.replace(context, truth=draft.text, file=context.id)
                for context, draft in zip(chosen, drafts[made.base], strict=True)
            ]
    finally:
        await engine.close()
    suite.save(answered, made.config.root / "suite.jsonl")


def wait_until(what: Any, patience_s: float = 60.0) -> None:
    """Until a function of nothing says yes."""
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
