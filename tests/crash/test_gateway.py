"""The gateway is killed (SIGKILL) at random instants under load: nothing acknowledged is lost, nothing is there twice (P4).

Every other kill is sent by a client the moment it reads an answer, which is when something answered too early would not be on disk yet.
"""

import asyncio
import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from keepgrad.policy import model
from keepgrad.records import Event, TabResponse, uuid7
from tests.gateway.harness import Site, ask, happened, post_until, process, site, start

KILLS = 25
CLIENTS = 8


class Seen:
    """What the clients were told."""

    def __init__(self) -> None:
        self.answers: dict[str, TabResponse] = {}
        self.acknowledged: dict[str, dict[str, Any]] = {}
        self.refused: list[str] = []
        self.trap: subprocess.Popen[bytes] | None = None
        """A gateway to kill when the next answer arrives."""

    def spring(self) -> None:
        """An answer has arrived."""
        if self.trap:
            self.trap.send_signal(signal.SIGKILL)
            self.trap = None


@pytest.mark.slow
def test_a_killed_gateway_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    place = site(tmp_path, model.make_tiny(tmp_path / "model"))
    headers = [place.key(f"dev-{number}") for number in range(CLIENTS)]
    seen = Seen()
    with process(place, "engine", tmp_path / "engine.log"):
        asyncio.run(storm(place, headers, seen, tmp_path / "gateway.log"))
        assert seen.refused == []
    check(place, seen)
    place.ledger.close()


async def storm(place: Site, headers: list[dict[str, str]], seen: Seen, log: Path) -> None:
    """Clients that ask and report, each thing until it is acknowledged, while the gateway is killed again and again."""
    done = asyncio.Event()
    url = f"http://127.0.0.1:{place.config.server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        clients = [asyncio.ensure_future(client(http, number, headers[number], seen, done)) for number in range(CLIENTS)]
        chance = random.Random(7)
        for kill in range(KILLS):
            gateway = start(place, "serve", log)
            # Most kills hit a gateway at work, every fifth one that is just starting.
            if kill % 5:
                await up(http, gateway, log)
            await asyncio.sleep(chance.uniform(0, 1.2))
            if kill % 2:
                seen.trap = gateway
            else:
                gateway.send_signal(signal.SIGKILL)
            await asyncio.to_thread(gateway.wait, 60)
        gateway = start(place, "serve", log)
        await up(http, gateway, log)
        done.set()
        await asyncio.wait_for(asyncio.gather(*clients), 60)
        gateway.send_signal(signal.SIGTERM)
        await asyncio.to_thread(gateway.wait, 30)


async def client(http: httpx.AsyncClient, number: int, headers: dict[str, str], seen: Seen, done: asyncio.Event) -> None:
    """One editor: asks under an id of its own, then reports, each until acknowledged, and now and then twice."""
    turn = 0
    while not done.is_set():
        turn += 1
        body = ask(f"c-{number}", id=uuid7(), at_ms=1_764_400_000_000 + turn)
        answer = await post_until(http, "/v1/keepgrad/tab", body, headers)
        if answer.status_code != 200:
            seen.refused.append(answer.text)
            return
        seen.spring()
        seen.answers[body["id"]] = TabResponse(**answer.json())
        events = [happened(body["id"], "shown"), happened(body["id"], "settled", reason="quiet", text=f"line {turn}")]
        for _ in range(1 + turn % 3 // 2):
            reply = await post_until(http, "/v1/keepgrad/events", {"events": events}, headers)
            seen.spring()
            if reply.status_code != 200 or len(reply.json()["results"]) != 2:
                seen.refused.append(reply.text)
                return
        seen.acknowledged.update({event["id"]: event for event in events})


async def up(http: httpx.AsyncClient, gateway: subprocess.Popen[bytes], log: Path) -> None:
    """Until the gateway answers."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert gateway.poll() is None, log.read_text()
        try:
            if (await http.get("/healthz")).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.02)
    raise AssertionError(f"the gateway does not come up:\n{log.read_text()}")


def check(place: Site, seen: Seen) -> None:
    """The ledger against what the clients were told."""
    assert len(seen.answers) >= KILLS and len(seen.acknowledged) >= KILLS
    rows = place.ledger.generations()
    assert [sequence for sequence, _ in rows] == list(range(1, len(rows) + 1))
    assert max(Counter(generation.id for _, generation in rows).values()) == 1
    kept = {generation.id: generation for _, generation in rows}
    for name, answer in seen.answers.items():
        generation = kept[name]
        assert (generation.version, generation.verdict, generation.show_probability) == (
            answer.version,
            answer.verdict,
            answer.show_probability,
        )
        assert answer.text == (generation.text if answer.verdict == "show" else "")
    tokens = place.ledger.tokens(list(kept))
    assert set(tokens) == set(kept)
    assert all(len(tokens[name].completion_ids) == len(tokens[name].logprobs) == kept[name].completion_tokens for name in kept)
    stored = [event for events in place.ledger.events(list(kept)).values() for event in events]
    assert max(Counter(event.id for event in stored).values()) == 1
    by_id = {event.id: event for event in stored}
    assert [name for name, event in seen.acknowledged.items() if by_id.get(name) != Event(**event)] == []
    assert place.ledger.verify_segments() == []
    with sqlite3.connect(place.config.root / "ledger.sqlite") as raw:
        assert raw.execute("pragma integrity_check").fetchone() == ("ok",)
