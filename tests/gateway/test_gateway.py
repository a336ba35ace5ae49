"""The front door in this process over the tiny real model: what it keeps, what it refuses, and who is answered by which version."""

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from keepgrad.errors import ConfigError
from keepgrad.gateway import app as gateway
from keepgrad.policy import server
from keepgrad.policy.client import EngineClient
from keepgrad.policy.http import listen
from keepgrad.policy.prompt import Prompter
from keepgrad.policy.traffic import assign, user_hash
from keepgrad.records import Revocation, uuid7
from keepgrad.redact import PLACEHOLDER
from tests.gateway.harness import PREFIX, Site, ask, door, free_port, happened, running, site

TAB, EVENTS, STATUS, METRICS = "/v1/keepgrad/tab", "/v1/keepgrad/events", "/v1/keepgrad/status", "/metrics"
COMPLETIONS, TABBY_EVENTS, HEALTH = "/v1/completions", "/v1/events", "/v1/health"
ROUTES = {TAB, EVENTS, STATUS, METRICS, COMPLETIONS, TABBY_EVENTS, HEALTH}
JSON = {"content-type": "application/json"}


# What it keeps


def test_an_answer_is_in_the_ledger_token_for_token(place: Site) -> None:
    async def scene() -> dict[str, Any]:
        async with door(place) as client:
            answer = await client.post(TAB, json=ask(), headers=place.key("ann"))
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

    answer = asyncio.run(scene())
    kept = place.ledger.generation(answer["id"])
    assert kept is not None
    assert (kept.version, kept.arm, kept.user) == (place.base, "incumbent", user_hash("acme", "ann"))
    assert answer == {
        "id": kept.id, "text": kept.text if kept.verdict == "show" else "", "verdict": kept.verdict, "version": place.base,
        "show_probability": kept.show_probability,
    }  # fmt: skip
    tokens = place.ledger.tokens([kept.id])[kept.id]
    assert len(tokens.completion_ids) == len(tokens.logprobs) == kept.completion_tokens > 0
    assert len(tokens.prompt_ids) == kept.prompt_tokens > 0
    assert all(logprob <= 0 for logprob in tokens.logprobs)


def test_the_same_request_again_gets_the_same_answer_even_from_another_process(place: Site) -> None:
    headers, body = place.key("ann"), ask(id=uuid7())

    async def scene() -> list[dict[str, Any]]:
        async with door(place) as client:
            together = await asyncio.gather(*(client.post(TAB, json=body, headers=headers) for _ in range(5)))
            later = await client.post(TAB, json=body, headers=headers)
        async with door(place) as client:
            restarted = await client.post(TAB, json=body, headers=headers)
        return [dict(answer.json()) for answer in (*together, later, restarted)]

    answers = asyncio.run(scene())
    assert all(answer == answers[0] for answer in answers)
    assert place.ledger.last_seq() == 1


def test_an_id_is_for_one_request_of_one_key(place: Site) -> None:
    ann, bob, name = place.key("ann"), place.key("bob"), uuid7()

    async def scene() -> list[int]:
        async with door(place) as client:
            sent = [
                await client.post(TAB, json=ask(id=name), headers=ann),
                await client.post(TAB, json=ask(id=name, prefix=PREFIX + "path."), headers=ann),
                await client.post(TAB, json=ask("c-2", id=name), headers=ann),
                await client.post(TAB, json=ask(id=name, at_ms=1_764_400_000_001), headers=ann),
                await client.post(TAB, json=ask(id=name), headers=bob),
            ]
            return [answer.status_code for answer in sent]

    assert asyncio.run(scene()) == [200, 409, 409, 409, 409]
    assert place.ledger.last_seq() == 1


def test_a_client_that_leaves_before_the_answer_leaves_a_generation_and_no_event(place: Site) -> None:
    headers, body = place.key("ann"), ask(id=uuid7())

    async def scene() -> None:
        async with door(place) as client:
            with disk_that_hangs(place):
                request = asyncio.ensure_future(client.post(TAB, json=body, headers=headers))
                await asyncio.sleep(0.3)
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
                assert place.ledger.generation(body["id"]) is None

    asyncio.run(scene())
    assert place.ledger.generation(body["id"]) is not None
    assert place.ledger.events([body["id"]]).get(body["id"], []) == []


def test_many_requests_share_a_transaction_and_all_are_sealed_at_the_end(place: Site) -> None:
    headers, admin, names = place.key("ann"), place.key("root", scopes=("admin",)), [uuid7() for _ in range(300)]

    async def scene() -> str:
        async with door(place) as client:
            batches = [{"events": [happened(name)]} for name in names]
            answers = await asyncio.gather(*(client.post(EVENTS, json=batch, headers=headers) for batch in batches))
            assert {answer.status_code for answer in answers} == {200}
            assert all(answer.json() == {"results": ["waiting"]} for answer in answers)
            metrics = (await client.get(METRICS, headers=admin)).text
            await asyncio.gather(*(client.post(TAB, json=ask(f"c-{name}", id=name), headers=headers) for name in names))
            return metrics

    transactions = float(
        next(line for line in asyncio.run(scene()).splitlines() if line.startswith("keepgrad_commit_seconds_count")).split()[1]
    )
    assert transactions < 100
    assert place.ledger.last_seq() == 300
    assert len(place.ledger.tokens(names)) == 300
    assert list(place.config.root.rglob("*.parquet"))
    assert place.ledger.seal(1) == 0, "the gateway left tokens in the spool"


# Consent (P7)


def test_at_consent_none_nothing_is_kept_but_a_count(place: Site) -> None:
    headers, body = place.key("eve", "none"), ask(id=uuid7(), path="secret/path.py")

    async def scene() -> tuple[dict[str, Any], dict[str, Any]]:
        async with door(place) as client:
            answer = await client.post(TAB, json=body, headers=headers)
            events = {"events": [happened(body["id"], "settled", text="hunter2")]}
            return dict(answer.json()), dict((await client.post(EVENTS, json=events, headers=headers)).json())

    answer, events = asyncio.run(scene())
    assert answer["id"] == body["id"] and answer["version"] == place.base
    assert events == {"results": ["dropped"]}
    assert place.ledger.last_seq() == 0
    assert place.ledger.events([body["id"]]).get(body["id"], []) == []
    assert place.ledger.counters() == {"consent_none": 1, "consent_none_events": 1}
    assert not found(place, b"hunter2", b"secret/path", body["id"].encode(), user_hash("acme", "eve").encode())


def test_at_consent_metadata_no_text_no_path_no_token_is_kept(place: Site) -> None:
    headers, body = place.key("ann", "metadata"), ask(id=uuid7(), path="secret/path.py")

    async def scene() -> tuple[dict[str, Any], dict[str, Any]]:
        async with door(place) as client:
            answer = await client.post(TAB, json=body, headers=headers)
            await client.post(EVENTS, json={"events": [happened(body["id"], "settled", text="hunter2", reason="quiet")]}, headers=headers)
            return dict(answer.json()), dict((await client.post(TAB, json=body, headers=headers)).json())

    answer, again = asyncio.run(scene())
    assert answer == again
    kept = place.ledger.generation(body["id"])
    assert kept is not None and (kept.text, kept.path, kept.consent) == ("", "", "metadata")
    assert kept.completion_tokens > 0
    tokens = place.ledger.tokens([kept.id]).get(kept.id)
    assert tokens is None or not (tokens.prompt_ids or tokens.completion_ids or tokens.logprobs or tokens.features)
    assert [(event.kind, event.reason, event.text) for event in place.ledger.events([kept.id])[kept.id]] == [("settled", "quiet", "")]
    assert not found(place, b"hunter2", b"secret/path")


def test_at_consent_code_secrets_are_redacted_before_the_model_sees_them_and_before_anything_is_written(place: Site) -> None:
    token, password = "ghp_" + "Zq7" * 12, "hK3$wqL9pz"
    body = ask(id=uuid7(), prefix=f'API = "{token}"\ndb = connect(password="{password}")\nreturn db.')

    async def scene() -> tuple[dict[str, Any], dict[str, Any], str]:
        headers, admin = place.key("ann"), place.key("root", scopes=("admin",))
        async with door(place) as client:
            answer = await client.post(TAB, json=body, headers=headers)
            settled = [happened(body["id"], "shown"), happened(body["id"], "settled", text=f'login("{token}")', reason="quiet")]
            await client.post(EVENTS, json={"events": settled}, headers=headers)
            again = await client.post(TAB, json=body, headers=headers)
            metrics = await client.get(METRICS, headers=admin)
            return dict(answer.json()), dict(again.json()), metrics.text

    answer, again, metrics = asyncio.run(scene())
    assert answer == again
    prompt = Prompter(Path(place.config.model.path)).decode(place.ledger.tokens([body["id"]])[body["id"]].prompt_ids)
    assert prompt.count(PLACEHOLDER) == 2 and prompt.endswith("return db.")
    assert [event.text for event in place.ledger.events([body["id"]])[body["id"]] if event.kind == "settled"] == [f'login("{PLACEHOLDER}")']
    assert not found(place, token.encode(), password.encode())
    assert "keepgrad_redacted_secrets_total 5.0" in metrics  # the prompt came twice


def test_a_secret_is_nowhere_on_disk(place: Site) -> None:
    async def scene() -> None:
        async with door(place) as client:
            await client.post(TAB, json=ask(), headers=place.key("ann"))

    asyncio.run(scene())
    assert not found(place, place.secrets["ann"].encode())


def found(place: Site, *needles: bytes) -> list[bytes]:
    """The needles that stand in any file of the data folder."""
    everything = b"".join(file.read_bytes() for file in place.config.root.rglob("*") if file.is_file())
    return [needle for needle in needles if needle in everything]


# Keys


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("nobody", set()),
        ("stranger", set()),
        ("serve", {TAB, STATUS, COMPLETIONS, HEALTH}),
        ("events", {EVENTS, STATUS, TABBY_EVENTS, HEALTH}),
        ("admin", {STATUS, METRICS, HEALTH}),
        ("all", ROUTES),
    ],
)
def test_every_route_asks_for_its_scope(place: Site, role: str, allowed: set[str]) -> None:
    scopes = ("serve", "events", "admin") if role == "all" else (role,)
    headers = {"nobody": {}, "stranger": {"authorization": "Bearer kg-" + "x" * 43}}.get(role)
    if headers is None:
        headers = place.key(role, scopes=scopes)

    async def scene() -> dict[str, int]:
        async with door(place) as client:
            assert (await client.get("/healthz")).status_code == 200
            sent = {
                TAB: await client.post(TAB, json=ask(), headers=headers),
                EVENTS: await client.post(EVENTS, json={"events": []}, headers=headers),
                STATUS: await client.get(STATUS, headers=headers),
                METRICS: await client.get(METRICS, headers=headers),
                COMPLETIONS: await client.post(COMPLETIONS, json={"segments": {"prefix": PREFIX}}, headers=headers),
                TABBY_EVENTS: await client.post(TABBY_EVENTS, json={"type": "other"}, headers=headers),
                HEALTH: await client.get(HEALTH, headers=headers),
            }
            for answer in sent.values():
                assert answer.status_code != 401 or answer.headers["www-authenticate"].startswith("Bearer")
            return {route: answer.status_code for route, answer in sent.items()}

    refused = 401 if role in ("nobody", "stranger") else 403
    assert asyncio.run(scene()) == {route: 200 if route in allowed else refused for route in ROUTES}


@pytest.mark.parametrize(
    "header", ["kg-abc", "Basic a2c6YQ==", "Bearer", "Bearer ", "Bearer abc", "Bearer kg-" + "x" * 5000, "Bearer kg-\xe4"]
)
def test_a_header_that_holds_no_key_is_refused_before_the_body_is_read(place: Site, header: str) -> None:
    async def scene() -> httpx.Response:
        async with door(place) as client:
            return await client.post(TAB, content=b"not json", headers={"authorization": header.encode("latin-1")})  # type: ignore[dict-item]

    answer = asyncio.run(scene())
    assert answer.status_code == 401 and "key" in answer.json()["error"]


def test_a_key_revoked_while_the_gateway_runs_opens_nothing_more(place: Site) -> None:
    async def scene() -> list[int]:
        async with door(place) as client:
            ann, bob = place.key("ann"), place.key("bob")
            first = await client.post(TAB, json=ask(), headers=ann)
            hers = next(key.id for key in place.ledger.keys() if key.user == "ann")  # noqa: SIM118
            place.ledger.revoke(Revocation(hers, "laptop lost", 1_764_400_000_000))
            await asyncio.sleep(0.6)
            tab, events = await client.post(TAB, json=ask(), headers=ann), await client.post(EVENTS, json={"events": []}, headers=ann)
            assert "revoked" in tab.json()["error"]
            return [first.status_code, tab.status_code, events.status_code, (await client.post(TAB, json=ask(), headers=bob)).status_code]

    assert asyncio.run(scene()) == [200, 401, 401, 200]


def test_a_key_made_while_the_gateway_runs_opens_it(place: Site) -> None:
    async def scene() -> list[int]:
        async with door(place) as client:
            first = await client.post(TAB, json=ask(), headers={"authorization": "Bearer kg-unknown"})
            headers = place.key("late")
            await asyncio.sleep(0.25)
            return [first.status_code, (await client.post(TAB, json=ask(), headers=headers)).status_code]

    assert asyncio.run(scene()) == [401, 200]


# Bad input


def bad_tabs() -> dict[str, tuple[bytes, int]]:
    good = ask()
    changed: dict[str, dict[str, Any]] = {
        "a date in 1970": {"at_ms": 1}, "a date in 2100": {"at_ms": 4_102_444_800_000}, "a date far away": {"at_ms": 10**30},
        "a negative date": {"at_ms": -1}, "a date as text": {"at_ms": "1764400000000"}, "a date with a fraction": {"at_ms": 1.5},
        "a prefix that is a number": {"prefix": 7}, "no conversation": {"conversation": ""},
        "a long conversation": {"conversation": "c" * 201},
        "a conversation with a newline": {"conversation": "a\nb"}, "an unknown field": {"colour": "red"},
        "an id that is no UUID": {"id": "g-1"},
        "an id of version 4": {"id": "9b2f1a9e-7f0a-4c59-8f4e-0d1e2f3a4b5c"}, "an id in upper case": {"id": uuid7().upper()},
        "a negative seed": {"seed": -1}, "a huge seed": {"seed": 2**64}, "a path with a NUL": {"path": "a\0b"},
        "a long path": {"path": "p" * 5000},
    }  # fmt: skip
    table = {name: (json.dumps({**good, **fields}).encode(), 400) for name, fields in changed.items()}
    table |= {
        f"without {name}": (json.dumps({k: v for k, v in good.items() if k != name}).encode(), 400)
        for name in ("prefix", "at_ms", "conversation")
    }
    return {
        **table, **bad_json(), "too large": (json.dumps({**good, "prefix": "x" * 1_100_000}).encode(), 413),
        "invalid UTF-8": (json.dumps(good).encode().replace(b"src/a.py", b"src/\xff.py"), 400),
        "half a surrogate pair": (json.dumps(good).encode().replace(b"src/a.py", b"\\ud800"), 400),
    }  # fmt: skip


def bad_events() -> dict[str, tuple[bytes, int]]:
    good = happened(uuid7())
    changed: dict[str, dict[str, Any]] = {
        "an event of 1970": {"at_ms": 1000}, "an event of 2100": {"at_ms": 4_102_444_800_000}, "an unknown kind": {"kind": "loved"},
        "an unknown field": {"mood": "good"}, "negative chars": {"chars": -1},
        "huge chars": {"chars": 2**63}, "chars as text": {"chars": "5"},
        "an id that is no UUID": {"id": "e-1"}, "a generation that is no UUID": {"generation": "g"},
        "a reason of its own": {"kind": "ignored", "reason": "bored"},
        "a long reason": {"reason": "r" * 300}, "a text that is a list": {"text": []}, "a negative horizon": {"horizon_s": -1},
    }  # fmt: skip
    table = {name: (json.dumps({"events": [happened(uuid7()), {**good, **fields}]}).encode(), 400) for name, fields in changed.items()}
    return {
        **table, **bad_json(), "events that are no list": (b'{"events": {}}', 400), "an event that is null": (b'{"events": [null]}', 400),
        "a field beside the events": (b'{"events": [], "more": 1}', 400), "no events": (b"{}", 400),
        "1001 events": (json.dumps({"events": [happened(uuid7()) for _ in range(1001)]}).encode(), 400),
        "too large": (json.dumps({"events": [happened(uuid7(), "settled", text="x" * 1_100_000)]}).encode(), 413),
        "invalid UTF-8": (json.dumps({"events": [{**good, "text": "Q"}]}).encode().replace(b'"Q"', b'"\xc3\x28"'), 400),
    }  # fmt: skip


def bad_json() -> dict[str, tuple[bytes, int]]:
    return {
        "nothing": (b"", 400), "null": (b"null", 400), "a list": (b"[]", 400), "half an object": (b'{"prefix": "a', 400),
        "two objects": (b"{}{}", 400), "NaN": (b'{"at_ms": NaN}', 400), "deep lists": (b"[" * 200_000, 400),
        "deep lists in a field": (b'{"prefix":' + b"[" * 200_000, 400), "deep objects": (b'{"events":' + b'[{"id":' * 50_000, 400),
        "not UTF-8 at all": (b"\xff\xfe\x00", 400), "a byte order mark": (b"\xef\xbb\xbf{}", 400),
    }  # fmt: skip


@pytest.mark.parametrize(("path", "table"), [(TAB, bad_tabs()), (EVENTS, bad_events())], ids=["tab", "events"])
def test_bad_input_gets_one_sentence_and_writes_nothing(place: Site, path: str, table: dict[str, tuple[bytes, int]]) -> None:
    headers = {**place.key("ann"), **JSON}

    async def scene() -> dict[str, httpx.Response]:
        async with door(place) as client:
            return {name: await client.post(path, content=body, headers=headers) for name, (body, _) in table.items()}

    for name, answer in asyncio.run(scene()).items():
        assert answer.status_code == table[name][1], f"{name}: {answer.status_code} {answer.text[:200]}"
        assert list(answer.json()) == ["error"] and 10 < len(answer.json()["error"]) < 400, name
    assert place.ledger.last_seq() == 0
    with sqlite3.connect(database(place)) as raw:
        assert raw.execute("select count(*) from events").fetchone() == (0,)


def test_what_the_framework_refuses_has_the_same_form(place: Site) -> None:
    async def scene() -> list[httpx.Response]:
        async with door(place) as client:
            return [await client.get("/v1/other"), await client.get(TAB), await client.delete(EVENTS)]

    answers = asyncio.run(scene())
    assert [answer.status_code for answer in answers] == [404, 405, 405]
    assert all(list(answer.json()) == ["error"] for answer in answers)


# Events (P4, P8)


def test_events_are_kept_once_and_never_changed(place: Site) -> None:
    headers = place.key("ann")

    async def scene() -> list[tuple[int, Any]]:
        async with door(place) as client:
            name = (await client.post(TAB, json=ask(), headers=headers)).json()["id"]
            shown, other = happened(name), happened(name, "accepted")
            changed = {**shown, "at_ms": shown["at_ms"] + 1}
            sent = [[shown], [shown, other], [shown], [changed], [happened(name, "rejected"), changed], [other, other]]
            answers = [await client.post(EVENTS, json={"events": batch}, headers=headers) for batch in sent]
            assert [event.kind for event in place.ledger.events([name])[name]] == ["shown", "accepted"]
            return [(answer.status_code, answer.json().get("results")) for answer in answers]

    assert asyncio.run(scene()) == [
        (200, ["stored"]), (200, ["duplicate", "stored"]), (200, ["duplicate"]), (409, None), (409, None),
        (200, ["duplicate", "duplicate"]),
    ]  # fmt: skip


def test_an_event_may_come_before_its_generation(place: Site) -> None:
    headers, name = place.key("ann"), uuid7()

    async def scene() -> Any:
        async with door(place) as client:
            first = await client.post(EVENTS, json={"events": [happened(name)]}, headers=headers)
            await client.post(TAB, json=ask(id=name), headers=headers)
            return first.json()

    assert asyncio.run(scene()) == {"results": ["waiting"]}
    assert [event.kind for event in place.ledger.events([name])[name]] == ["shown"]


def test_events_about_another_keys_generation_are_refused_whole_and_counted(place: Site) -> None:
    ann, bob = place.key("ann"), place.key("bob")

    async def scene() -> tuple[int, str, str]:
        async with door(place) as client:
            hers = (await client.post(TAB, json=ask(), headers=ann)).json()["id"]
            his = (await client.post(TAB, json=ask("c-2"), headers=bob)).json()["id"]
            answer = await client.post(EVENTS, json={"events": [happened(his), happened(hers, "accepted")]}, headers=bob)
            return answer.status_code, hers, his

    status, hers, his = asyncio.run(scene())
    assert status == 403
    assert not any(place.ledger.events([hers, his]).values())
    assert place.ledger.counters()["forbidden_event"] == 1


def test_one_bad_batch_does_not_spoil_those_that_share_its_transaction(place: Site) -> None:
    headers = place.key("ann")

    async def scene() -> list[int]:
        async with door(place) as client:
            name = (await client.post(TAB, json=ask(), headers=headers)).json()["id"]
            first = happened(name)
            await client.post(EVENTS, json={"events": [first]}, headers=headers)
            batches = [[happened(name, "survival", horizon_s=at)] for at in range(20)]
            batches.insert(7, [{**first, "chars": 3}])
            return [
                a.status_code for a in await asyncio.gather(*(client.post(EVENTS, json={"events": b}, headers=headers) for b in batches))
            ]

    assert asyncio.run(scene()) == [200] * 7 + [409] + [200] * 13


def test_when_the_disk_lags_events_are_sent_back_and_serving_goes_on(place: Site) -> None:
    headers, name = place.key("ann"), uuid7()

    async def scene() -> tuple[list[int], httpx.Response, int]:
        async with door(place, max_waiting=10) as client:
            await client.post(TAB, json=ask("warm"), headers=headers)
            with disk_that_hangs(place):
                batches = [{"events": [happened(name, "survival", horizon_s=at)]} for at in range(10)]
                early = [asyncio.ensure_future(client.post(EVENTS, json=batch, headers=headers)) for batch in batches]
                await asyncio.sleep(0.2)
                late = await client.post(EVENTS, json={"events": [happened(name)]}, headers=headers)
                tab = asyncio.ensure_future(client.post(TAB, json=ask("c-2"), headers=headers))
                await asyncio.sleep(0.2)
                assert not tab.done() and not any(one.done() for one in early), "answered before it was durable"
            return [answer.status_code for answer in await asyncio.gather(*early)], late, (await tab).status_code

    early, late, tab = asyncio.run(scene())
    assert early == [200] * 10 and tab == 200
    assert late.status_code == 429 and late.headers["retry-after"] == "1"


# Version choice (P3, P5, P6)


def test_a_conversation_keeps_its_version_until_a_rollback(place: Site) -> None:
    headers, one, two = place.key("ann"), place.adapter(1), place.adapter(2)

    async def version(client: httpx.AsyncClient, conversation: str) -> str:
        answer = await client.post(TAB, json=ask(conversation), headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["version"])

    async def scene() -> list[str]:
        async with door(place) as client:
            seen = [await version(client, "old")]
            place.traffic(one, previous=place.base)  # promoted
            seen += [await version(client, "old"), await version(client, "new")]
        async with door(place) as client:  # restarted: the ledger knows who holds what
            seen += [await version(client, "old"), await version(client, "new")]
            place.traffic(two, previous=one)  # the base is named no more
            seen += [await version(client, "old"), await version(client, "new"), await version(client, "newer")]
            place.traffic(one, previous=two, force=True, at_ms=int(time.time() * 1000) + 1)  # rolled back
            seen += [await version(client, "newer"), await version(client, "old")]
            await asyncio.sleep(0.01)
            place.traffic(one, previous=two, reason="quiet again")
            seen += [await version(client, "newer")]
        return seen

    base = place.base
    assert asyncio.run(scene()) == [base, base, one, base, one, two, one, two, one, one, one]


def test_a_lease_from_before_a_rollback_is_over_even_if_the_gateway_slept_through_it(place: Site) -> None:
    headers, bad = place.key("ann"), place.adapter(1)
    place.traffic(bad, previous=place.base)

    async def scene() -> list[str]:
        async with door(place) as client:
            first = await client.post(TAB, json=ask(), headers=headers)
        await asyncio.sleep(0.01)
        place.traffic(place.base, previous=bad, force=True)
        await asyncio.sleep(0.01)
        place.traffic(place.base, previous=bad, reason="next cycle")
        async with door(place) as client:
            second = await client.post(TAB, json=ask(), headers=headers)
        return [first.json()["version"], second.json()["version"]]

    assert asyncio.run(scene()) == [bad, place.base]


def test_arms_follow_the_users_hash(place: Site) -> None:
    canary = place.adapter(1)
    place.traffic(canary=canary, canary_share=0.5, holdback=place.base, holdback_share=0.2)
    keys = {f"dev-{number}": place.key(f"dev-{number}") for number in range(24)}

    async def scene() -> dict[str, str]:
        async with door(place) as client:
            answers = await asyncio.gather(*(client.post(TAB, json=ask(f"c-{user}"), headers=headers) for user, headers in keys.items()))
            return {user: answer.json()["id"] for user, answer in zip(keys, answers, strict=True)}

    arms = set()
    for user, name in asyncio.run(scene()).items():
        kept = place.ledger.generation(name)
        assert kept is not None and (kept.version, kept.arm) == assigned(place, user)
        arms.add(kept.arm)
    assert arms == {"incumbent", "canary", "holdback"}


def assigned(place: Site, user: str) -> tuple[str, str]:
    traffic = place.ledger.traffic()
    assert traffic is not None
    return assign(traffic, user_hash("acme", user))


def test_a_version_that_is_corrupt_on_disk_costs_no_request(place: Site) -> None:
    headers, broken = place.key("ann"), place.adapter(1)
    weights = place.store.path(broken) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-7])
    place.traffic(canary=broken, canary_share=1.0)

    async def scene() -> httpx.Response:
        async with door(place) as client:
            return await client.post(TAB, json=ask(), headers=headers)

    answer = asyncio.run(scene())
    assert answer.status_code == 200 and answer.json()["version"] == place.base
    kept = place.ledger.generation(answer.json()["id"])
    assert kept is not None and kept.arm == "incumbent"
    assert place.ledger.counters()["version_unusable"] == 1


# Engine and traffic away


def test_without_an_engine_tabs_are_sent_back_and_events_are_kept(place: Site, tiny: Path) -> None:
    headers = place.key("ann")

    async def scene() -> tuple[httpx.Response, httpx.Response]:
        client = EngineClient(f"http://127.0.0.1:{free_port()}", patience_s=0.3)
        async with running(gateway.create(place.config, place.ledger, client, folder=tiny)) as http:
            return (
                await http.post(TAB, json=ask(), headers=headers),
                await http.post(EVENTS, json={"events": [happened(uuid7())]}, headers=headers),
            )

    tab, events = asyncio.run(scene())
    assert tab.status_code == 503 and tab.headers["retry-after"] and "keepgrad engine" in tab.json()["error"]
    assert events.status_code == 200
    assert place.ledger.last_seq() == 0


def test_status_says_who_serves_and_what_the_cycle_does(place: Site) -> None:
    headers = place.key("ann")

    async def scene() -> tuple[dict[str, Any], dict[str, Any]]:
        async with door(place) as client:
            before = dict((await client.get(STATUS, headers=headers)).json())
            await client.post(TAB, json=ask(), headers=headers)
            return before, dict((await client.get(STATUS, headers=headers)).json())

    before, after = asyncio.run(scene())
    assert before["traffic"]["incumbent"] == place.base and before["generations"] == 0 and before["stage"] == "idle"
    assert after["generations"] == 1


# Start


def test_a_host_open_to_others_needs_a_key_first(tmp_path: Path, tiny: Path) -> None:
    place = site(tmp_path, tiny, host="0.0.0.0")
    with pytest.raises(ConfigError, match="there is no key"):
        gateway.main(place.config)
    place.ledger.close()


def test_a_taken_port_is_one_sentence_and_exit_2(place: Site, tmp_path: Path) -> None:
    port, engine_port = place.config.server.port, place.config.server.engine_port
    with listen("127.0.0.1", port, "server.port"), listen("127.0.0.1", engine_port, "server.engine_port"):
        done = subprocess.run(
            [sys.executable, "-m", "keepgrad", "serve", "--config", str(tmp_path / "keepgrad.toml")],
            capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60,
        )  # fmt: skip
        with pytest.raises(ConfigError, match=f"port {engine_port} on 127.0.0.1 is taken: .* set server.engine_port to another port"):
            server.main(place.config)
    assert done.returncode == 2
    wanted = f"keepgrad: port {port} on 127.0.0.1 is taken: stop what listens there, or set server.port to another port"
    assert done.stderr.splitlines() == [wanted]


def test_the_engine_refuses_what_the_model_cannot_compute(place: Site) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt_ids": [0, 10**6]}, {"prompt_ids": [0, -1]}, {"prompt_ids": [0]}, {"versions": []}, {"versions": [place.base] * 2},
        {"sampling": {"temperature": 0.0}}, {"sampling": {"max_tokens": 0}}, {"seed": -1}, {"prompt_ids": "abc"},
    ]  # fmt: skip
    good = {"prompt_ids": [0, 40, 41], "versions": [place.base], "seed": 1}

    async def scene() -> list[int]:
        async with running(server.create(place.config)) as client:
            answers = [await client.post("/generate", json={**good, **fields}) for fields in bad]
            missing = await client.post("/load", json={"version": "v-0000000000000000"})
            fine = await client.post("/generate", json=good)
            return [answer.status_code for answer in (*answers, missing, fine)]

    assert asyncio.run(scene()) == [400] * len(bad) + [422, 200]


def database(place: Site) -> Path:
    """The ledger's SQLite file."""
    return place.config.root / "ledger.sqlite"


@contextlib.contextmanager
def disk_that_hangs(place: Site) -> Iterator[None]:
    """No transaction can be committed within the block: another connection holds the write lock."""
    with contextlib.closing(sqlite3.connect(database(place), isolation_level=None)) as blocker:
        blocker.execute("begin immediate")
        yield
        blocker.execute("rollback")
