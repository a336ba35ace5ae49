"""The fleet against the real gateway and engine, each a process of its own, with a tiny real model; the gateway is killed on the way."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from pathlib import Path

from keepgrad.outcomes.episode import outcome
from keepgrad.policy import model
from keepgrad.simulate import fleet
from tests.gateway.harness import process, site, start

DEVELOPERS, LIMIT = 6, 120


def test_nothing_is_lost_or_refused_when_the_gateway_is_killed_under_the_fleet(tmp_path: Path) -> None:
    place = site(tmp_path, model.make_tiny(tmp_path / "tiny"))
    users = [f"dev-{n:02}" for n in range(DEVELOPERS)]
    for user in users:
        place.key(user)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"user": user, "secret": place.secrets[user]} for user in users]))
    ledger = place.ledger
    ledger.start_stage("c-1", "collect")
    log = tmp_path / "log"
    with process(place, "engine", log), process(place, "serve", log) as first, contextlib.ExitStack() as later:

        async def go() -> dict[str, int]:
            run = asyncio.ensure_future(fleet.run(place.config, keys, "train", 0, DEVELOPERS, LIMIT))
            deadline = time.monotonic() + 60
            while ledger.last_seq() < LIMIT // 3 and not run.done() and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            first.kill()
            first.wait()
            second = start(place, "serve", log)
            later.callback(second.wait)
            later.callback(second.terminate)
            return await asyncio.wait_for(run, 90)

        counts = asyncio.run(go())
    generations = [generation for _, generation in ledger.generations()]
    events = ledger.events([generation.id for generation in generations])
    assert counts["retries"] > 0 and counts["opportunities"] == LIMIT == len(generations)
    assert counts["events"] == sum(map(len, events.values()))
    assert len({generation.user for generation in generations}) == DEVELOPERS
    clocks = ledger.user_clocks()
    ends: Counter[str] = Counter()
    for generation in generations:
        found = outcome(generation, events.get(generation.id, []), clocks[generation.user])
        ends[found.end or f"{found.state} {found.reason}"] += 1
        if found.end in ("accepted", "partial"):
            assert len(found.survival) == 5
    assert {"rejected", "ignored"} <= set(ends)
    # Only an editor that closed leaves a suggestion without an end; its user's clock may not be far enough yet to say so.
    assert ends["pending waiting"] + ends["censored closed"] == counts.get("closed", 0)
    assert ends["not_drawn"] == counts.get("not_drawn", 0)
    assert ends["abstained"] == counts.get("silent", 0)
    ledger.close()
