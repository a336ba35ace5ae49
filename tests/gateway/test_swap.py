"""Versions come, are promoted, rolled back and go, under 16 concurrent clients of real processes: nobody notices (P3, P5)."""

import asyncio
import random
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from keepgrad.policy import model
from keepgrad.policy.client import EngineClient
from keepgrad.policy.traffic import named
from keepgrad.records import EngineRequest, Generation, TabResponse, uuid7
from tests.gateway.harness import PREFIX, Site, ask, process, site

CLIENTS = 16
STEP = 64
"""Answers between two changes."""
TURNS = 3
"""Requests of one conversation."""


@pytest.mark.slow
def test_swaps_under_load_fail_no_request_and_mix_no_versions(tmp_path: Path) -> None:
    place = site(tmp_path, model.make_tiny(tmp_path / "model"))
    headers = [place.key(f"dev-{number}") for number in range(CLIENTS)]
    versions = [place.adapter(seed) for seed in range(1, 6)]
    with process(place, "engine", tmp_path / "engine.log"), process(place, "serve", tmp_path / "gateway.log"):
        answers, failures = asyncio.run(load(place, headers, versions))
        assert failures == []
        assert {answer.version for answer in answers} >= {place.base, *versions}
        replayed = asyncio.run(replay(place, random.Random(0).sample(answers, 64)))
    check(place, answers)
    assert replayed == [], "drafts that their one version does not give again"
    place.ledger.close()


async def load(place: Site, headers: list[dict[str, str]], versions: list[str]) -> tuple[list[TabResponse], list[str]]:
    """Clients ask as fast as they are answered while the versions change; all answers, and what failed."""
    answers: list[TabResponse] = []
    failures: list[str] = []
    done = asyncio.Event()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            body = ask(f"c-{number}-{turn // TURNS}", id=uuid7(), prefix=f"{PREFIX}path.join({number}, {turn}, ")
            try:
                answer = await http.post("/v1/keepgrad/tab", json=body, headers=headers[number])
            except httpx.TransportError as error:
                failures.append(repr(error))
                continue
            if answer.status_code == 200:
                answers.append(TabResponse(**answer.json()))
            else:
                failures.append(answer.text)

    base_url = f"http://127.0.0.1:{place.config.server.port}"
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=httpx.Limits(max_connections=CLIENTS)) as http:
        clients = [asyncio.ensure_future(client(http, number)) for number in range(CLIENTS)]
        await swap(place, versions, answers)
        done.set()
        await asyncio.gather(*clients)
    return answers, failures


async def swap(place: Site, versions: list[str], answers: list[TabResponse]) -> None:
    """Every change of versions there is, one after another; more versions than the engine keeps loaded."""
    engine = EngineClient(f"http://127.0.0.1:{place.config.server.engine_port}")
    incumbent = place.base
    await more(answers)
    for turn, version in enumerate(versions):
        await engine.load(version)
        place.traffic(incumbent, previous=incumbent, canary=version, canary_share=0.5, holdback=place.base, holdback_share=0.1)
        await more(answers)
        if turn % 2:  # the canary is bad
            place.traffic(incumbent, previous=version, holdback=place.base, holdback_share=0.1, force=True)
            await engine.unload(version)
        else:
            place.traffic(version, previous=incumbent, holdback=place.base, holdback_share=0.1)
            incumbent = version
        await more(answers)
    place.traffic(place.base, previous=incumbent, force=True, at_ms=int(time.time() * 1000))
    await more(answers)
    await engine.close()


async def more(answers: list[TabResponse]) -> None:
    """Until the clients have had another STEP answers."""
    wanted = len(answers) + STEP
    async with asyncio.timeout(60):
        while len(answers) < wanted:
            await asyncio.sleep(0.01)


async def replay(place: Site, answers: list[TabResponse]) -> list[str]:
    """Draw each generation again under the one version it names; those that come out otherwise."""
    engine = EngineClient(f"http://127.0.0.1:{place.config.server.engine_port}")
    different = []
    for answer in answers:
        kept, tokens = place.ledger.generation(answer.id), place.ledger.tokens([answer.id])[answer.id]
        assert kept is not None
        request = EngineRequest(tokens.prompt_ids, [kept.version], kept.seed, kept.sampling, healed=True)
        draft = (await engine.generate(request))[0]
        if draft.completion_ids != tokens.completion_ids or max(map(distance, draft.logprobs, tokens.logprobs)) > 1e-3:
            different.append(f"{kept.id} of {kept.version}")
    await engine.close()
    return different


def distance(a: float, b: float) -> float:
    return abs(a - b)


def check(place: Site, answers: list[TabResponse]) -> None:
    """The ledger agrees with what clients saw, and a conversation changed its version only where a record made it."""
    kept = {generation.id: generation for _, generation in place.ledger.generations()}
    assert len(kept) == len(answers) == len({answer.id for answer in answers})
    for answer in answers:
        assert kept[answer.id].version == answer.version
        assert answer.text == (kept[answer.id].text if answer.verdict == "show" else "")
    history = place.ledger.traffic_history()
    conversations: dict[str, list[Generation]] = {}
    for generation in kept.values():
        conversations.setdefault(generation.conversation, []).append(generation)
    changes = [pair for held in conversations.values() for pair in pairwise(held) if pair[0].version != pair[1].version]
    for before, after in changes:
        between = [record for record in history if before.created_ms - 1000 < record.at_ms <= after.created_ms]
        assert any(record.force or before.version not in named(record) for record in between), f"{before} then {after}"
    rolled_back = [generation for generation in kept.values() if generation.created_ms > history[-1].at_ms + 1000]
    assert all(generation.version == place.base for generation in rolled_back)
