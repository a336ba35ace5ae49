"""A client that speaks Tabby's form: what it sends is recorded as ours, once, and comes back as it expects."""

import asyncio
from typing import Any

import httpx
import pytest

from keepgrad.outcomes.episode import outcome
from tests.gateway.harness import PREFIX, Site, door

COMPLETION = {
    "language": "python",
    "segments": {
        "prefix": PREFIX, "suffix": "\n", "filepath": "src/a.py", "git_url": "https://example.org/a.git",
        "declarations": [{"filepath": "src/b.py", "body": "def b(): ..."}],
    },
    "mode": "standard",
}  # fmt: skip
"""As tabby-agent's buildRequest.ts makes them, extra context included."""


def event(kind: str, completion: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "completion_id": completion, "choice_index": 0, "view_id": f"view-{completion}", "elapsed": 412, **more}


@pytest.mark.parametrize(("kind", "end"), [("select", "accepted"), ("dismiss", "rejected")])
def test_a_completion_and_its_events_become_a_generation_and_its_outcome(place: Site, kind: str, end: str) -> None:
    async def scene() -> dict[str, Any]:
        headers = place.key("ann")
        async with door(place) as client:
            answer = (await client.post("/v1/completions", json=COMPLETION, headers=headers)).json()
            for body in (event("view", answer["id"]), event(kind, answer["id"]), event(kind, answer["id"], elapsed=9999)):
                told = await client.post("/v1/events?select_kind=line", json=body, headers=headers)
                assert told.status_code == 200, told.text
            return dict(answer)

    answer = asyncio.run(scene())
    kept = place.ledger.generation(answer["id"])
    assert kept is not None and kept.path == "src/a.py" and kept.conversation.startswith("tabby-")
    assert answer["choices"] == [{"index": 0, "text": kept.text if kept.verdict == "show" else ""}]
    events = place.ledger.events([kept.id])[kept.id]
    assert sorted(one.kind for one in events) == sorted(["shown", end]), "the same again counts once"
    assert outcome(kept, events, kept.client_ms + 3_600_000).end == end


def test_completions_of_one_file_share_a_conversation_and_those_of_others_do_not(place: Site) -> None:
    async def scene() -> list[str]:
        ann, bob = place.key("ann"), place.key("bob")
        other = {"segments": {"prefix": PREFIX, "filepath": "src/c.py"}}
        async with door(place) as client:
            sent = [(COMPLETION, ann), (COMPLETION, ann), (other, ann), (COMPLETION, bob)]
            return [(await client.post("/v1/completions", json=body, headers=headers)).json()["id"] for body, headers in sent]

    first, again, elsewhere, another = (place.ledger.generation(name).conversation for name in asyncio.run(scene()))  # type: ignore[union-attr]
    assert len({first, elsewhere, another}) == 3
    assert first == again or int(again.rsplit("-")[-1]) == int(first.rsplit("-")[-1]) + 1, "unless ten minutes ended just then"


def test_refusals_and_what_is_not_known(place: Site) -> None:
    async def scene() -> list[httpx.Response]:
        ann, bob = place.key("ann"), place.key("bob")
        async with door(place) as client:
            name = (await client.post("/v1/completions", json=COMPLETION, headers=ann)).json()["id"]
            return [
                await client.post("/v1/completions", json={"model": "m", "prompt": "def "}, headers=ann),
                await client.post("/v1/completions", json={"segments": {"suffix": ""}}, headers=ann),
                await client.post("/v1/events", json=event("select", "cmpl-1"), headers=ann),
                await client.post("/v1/events", json=event("select", name), headers=bob),
                await client.post("/v1/events", json=event("hover", name), headers=ann),
                await client.post("/v1/health", headers=ann),
            ]

    openai, no_prefix, no_uuid, not_his, unknown, health = asyncio.run(scene())
    assert [one.status_code for one in (openai, no_prefix, no_uuid, not_his, unknown, health)] == [400, 400, 400, 403, 200, 200]
    assert "segments" in openai.json()["error"] and health.json()["model"]
    assert place.ledger.counters()["unknown_event"] == 1
