"""The fleet over real HTTP against a small front door that keeps what it is sent and can be told to fail.

The front door here knows no model: it answers with the line that really follows, or a wrong one. The fleet against the real gateway and
engine is in test_fleet_gateway.py.
"""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn

from keepgrad.config import Config, Server
from keepgrad.errors import ConfigError, RequestError
from keepgrad.records import Event, TabRequest, TabResponse
from keepgrad.simulate import fleet
from keepgrad.simulate.corpus import files, label
from keepgrad.simulate.developer import HORIZONS_S

ENDS = {"accepted", "partial", "typed_through", "rejected", "ignored"}
Fails = Callable[[int], str]


class Door:
    """An ASGI app with the gateway's three routes. `fails(n)` says what happens to the n-th POST: "", "refuse" or "lose the answer"."""

    def __init__(self, fails: Fails = lambda n: "", stage: str = "collect") -> None:
        self.fails, self.stage, self.posts, self.polls = fails, stage, 0, 0
        self.requests: dict[str, TabRequest] = {}
        self.keys: dict[str, str] = {}
        self.events: dict[str, Event] = {}
        self.conflicts = 0
        self._sources = {label(project, path): path for project, path in files("train")}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        key = dict(scope["headers"]).get(b"authorization", b"").decode()
        status, answer = (401, b"{}") if not key.startswith("Bearer kg-") else self._answer(scope["path"], key, body)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": answer})

    def _answer(self, path: str, key: str, body: bytes) -> tuple[int, bytes]:
        if path == "/v1/keepgrad/status":
            self.polls += 1
            return 200, json.dumps({"stage": self.stage}).encode()
        self.posts += 1
        how = self.fails(self.posts)
        if how == "refuse":
            return 503, b"{}"
        answer = self._tab(key, body) if path == "/v1/keepgrad/tab" else self._events(key, body)
        return (503, b"{}") if how else answer

    def _tab(self, key: str, body: bytes) -> tuple[int, bytes]:
        request = msgspec.json.decode(body, type=TabRequest)
        self.conflicts += self.requests.setdefault(request.id, request) != request
        self.keys[request.id] = key
        kind = int(request.id[-4:], 16) % 10
        text = self._line(request) if kind < 4 else "" if kind == 9 else "raise NotImplementedError(kind)"
        return 200, msgspec.json.encode(TabResponse(request.id, text, "show" if text else "silent", "v-x", 0.5))

    def _line(self, request: TabRequest) -> str:
        source = self._sources[request.path].read_text(encoding="utf-8")
        return source[source.index(request.prefix) + len(request.prefix) :].split("\n", 1)[0]

    def _events(self, key: str, body: bytes) -> tuple[int, bytes]:
        for event in msgspec.json.decode(json.dumps(json.loads(body)["events"]).encode(), type=list[Event]):
            assert self.keys[event.generation] == key
            self.conflicts += self.events.setdefault(event.id, event) != event
        return 200, b"{}"

    def by_generation(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.events.values():
            found[event.generation].append(event)
        return found


@contextlib.asynccontextmanager
async def at(door: Door, tmp_path: Path, developers: int) -> AsyncIterator[tuple[Config, Path]]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # with the protocol named, asyncio turns Nagle off
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(door, log_level="warning", lifespan="off"))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"user": f"dev-{n:02}", "secret": f"kg-{n}", "org": "acme"} for n in range(developers)]))
    try:
        yield Config(server=Server(data=str(tmp_path / "data"), port=listener.getsockname()[1])), keys
    finally:
        server.should_exit = True
        await serving
        listener.close()


def run(door: Door, tmp_path: Path, developers: int = 1, seed: int = 0, concurrency: int = 4, limit: int = 60) -> dict[str, int]:
    async def go() -> dict[str, int]:
        async with at(door, tmp_path, developers) as (config, keys):
            return await asyncio.wait_for(fleet.run(config, keys, "train", seed, concurrency, limit), 60)

    return asyncio.run(go())


def test_every_shown_suggestion_comes_to_an_end_and_settles(tmp_path: Path) -> None:
    door = Door()
    counts = run(door, tmp_path, developers=6, limit=300)
    assert counts["opportunities"] == 300 == len(door.requests) and door.conflicts == 0
    ends: Counter[str] = Counter()
    for events in door.by_generation().values():
        kinds = Counter(event.kind for event in events)
        if kinds["not_drawn"]:
            assert kinds == {"not_drawn": 1}
            continue
        assert kinds["shown"] == 1
        shown_ms = next(event.at_ms for event in events if event.kind == "shown")
        assert all(event.at_ms >= shown_ms for event in events)
        end = [event.kind for event in events if event.kind in ENDS]
        assert (len(end), kinds["settled"]) == ((0, 0) if kinds["closed"] else (1, 1))
        taken = bool(end) and end[0] in ("accepted", "partial")
        assert sorted(event.horizon_s for event in events if event.kind == "survival") == (list(HORIZONS_S) if taken else [])
        ends.update(end)
    assert set(ends) == ENDS - {"partial"} or set(ends) == ENDS
    assert counts["shown"] == sum(ends.values()) and counts["silent"] > 0 and counts["not_drawn"] > 0
    assert counts["events"] == len(door.events)


def test_settled_text_is_what_stands_in_the_file(tmp_path: Path) -> None:
    door = Door()
    run(door, tmp_path)
    settled = [event for event in door.events.values() if event.kind == "settled"]
    assert settled and {event.reason for event in settled} == {"quiet", "timeout"}
    for event in settled:
        assert event.text == door._line(door.requests[event.generation])


def test_same_seed_and_answers_make_the_same_traffic(tmp_path: Path) -> None:
    doors = [Door(), Door(), Door()]
    for door, seed in zip(doors, (5, 5, 6), strict=True):
        folder = tmp_path / str(doors.index(door))
        folder.mkdir()
        run(door, folder, seed=seed, concurrency=1, limit=40)
    assert doors[0].requests == doors[1].requests and doors[0].events == doors[1].events
    assert not set(doors[0].requests) & set(doors[2].requests)


def test_a_gateway_that_fails_gets_everything_once_under_the_same_ids(tmp_path: Path) -> None:
    steady, shaky = Door(), Door(lambda n: ("", "refuse", "lose the answer")[n % 3])
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(steady, tmp_path / "a", limit=25)
    counts = run(shaky, tmp_path / "b", limit=25)
    assert counts["retries"] > 20 and shaky.conflicts == 0
    assert shaky.requests == steady.requests and shaky.events == steady.events


def test_a_restarted_fleet_goes_on_with_new_sessions_and_later_clocks(tmp_path: Path) -> None:
    first, second = Door(), Door()
    run(first, tmp_path)
    run(second, tmp_path)
    assert not set(first.requests) & set(second.requests)
    assert not {r.conversation for r in first.requests.values()} & {r.conversation for r in second.requests.values()}
    assert max(event.at_ms for event in first.events.values()) < min(request.at_ms for request in second.requests.values())


def test_conversations_are_one_file_of_a_few_opportunities_with_a_clock_that_goes_forward(tmp_path: Path) -> None:
    door = Door()
    run(door, tmp_path, limit=120)
    sessions: dict[str, list[TabRequest]] = defaultdict(list)
    for request in door.requests.values():
        sessions[request.conversation].append(request)
    assert len(sessions) >= 8
    for requests in sessions.values():
        assert len({request.path for request in requests}) == 1 and len(requests) <= 15
        assert [request.at_ms for request in requests] == sorted({request.at_ms for request in requests})


def test_outside_collect_and_canary_there_is_only_a_trickle_and_what_was_asked_matures(tmp_path: Path) -> None:
    door = Door()

    async def go() -> tuple[int, int, set[str]]:
        async with at(door, tmp_path, 8) as (config, keys):
            stop = asyncio.Event()
            fleet_run = asyncio.ensure_future(fleet.run(config, keys, "train", 0, 8, 0, stop))
            await asyncio.sleep(1.5)
            door.stage = "train"
            await asyncio.sleep(1.2)
            before = len(door.requests)
            open_ends = {r for r in list(door.requests)[:-4] if r in door.by_generation()}
            await asyncio.sleep(6.0)  # longer than the pause between two requests of the trickle
            after = len(door.requests)
            stop.set()
            await asyncio.wait_for(fleet_run, 20)
            return before, after, open_ends

    before, after, known = asyncio.run(go())
    assert before > 30 and 1 <= after - before <= 8
    assert door.polls <= 2 * (1.5 + 1.2 + 6.0) + 6
    whole = {"settled", "not_drawn", "closed"}
    assert all(whole & {event.kind for event in door.by_generation()[generation]} for generation in known)


def test_sigterm_hands_everything_in_and_exits_clean(tmp_path: Path) -> None:
    door = Door()
    code = (
        "import sys; from pathlib import Path; from keepgrad.config import load; from keepgrad.simulate import fleet\n"
        "print(fleet.main(load(sys.argv[1]), Path(sys.argv[2]), concurrency=4))"
    )

    async def go() -> int:
        async with at(door, tmp_path, 4) as (config, keys):
            file = tmp_path / "keepgrad.toml"
            file.write_text(f'[server]\ndata = "{config.server.data}"\nport = {config.server.port}\n')
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(file), str(keys), stdout=subprocess.DEVNULL)
            try:
                while len(door.requests) < 20:
                    await asyncio.sleep(0.1)
                process.send_signal(signal.SIGTERM)
                return await asyncio.wait_for(process.wait(), 20)
            finally:
                if process.returncode is None:
                    process.kill()

    assert asyncio.run(go()) == 0
    for events in door.by_generation().values():
        assert {"settled", "not_drawn", "closed"} & {event.kind for event in events}


def test_a_refused_key_stops_the_fleet_with_one_sentence(tmp_path: Path) -> None:
    door = Door()

    async def go() -> None:
        async with at(door, tmp_path, 1) as (config, keys):
            keys.write_text('[{"user": "dev-00", "secret": "wrong"}]')
            await fleet.run(config, keys, limit=5)

    with pytest.raises(RequestError, match="the gateway refused /v1/keepgrad/tab of dev-00 with status 401"):
        asyncio.run(go())


@pytest.mark.parametrize("content", ["", "{}", "[]", '[{"user": 3}]'])
def test_a_keys_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="keys"):
        fleet.read_keys(file)


def test_a_broken_progress_file_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="not a fleet's progress file"):
        fleet.Progress(file, 0, "train")
