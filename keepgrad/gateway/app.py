"""The gateway's HTTP: routes, keys, error bodies, start and stop.

POST /v1/keepgrad/tab       scope serve      one opportunity, answered once it is durable
POST /v1/keepgrad/events    scope events     up to 1000 events, all or none, acknowledged once they are durable
POST /v1/completions        scope serve      the same in Tabby's form
POST /v1/events             scope events     one event in Tabby's form
GET  /v1/health, POST too   any key          what Tabby's clients ask first
GET  /v1/keepgrad/status    any key          traffic, stage, counters
GET  /metrics               scope admin      Prometheus
GET  /healthz               no key           the process answers
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from litestar import Litestar, MediaType, Request, Response, get, post, route
from litestar.types import Message
from litestar.types import Scope as AsgiScope

from keepgrad.config import Config
from keepgrad.errors import ConfigError, ConflictError
from keepgrad.gateway import tabby
from keepgrad.gateway.auth import SCOPES, Keys, Scope
from keepgrad.gateway.checks import EventBatch, check_events, check_tab
from keepgrad.gateway.measure import Meters
from keepgrad.gateway.service import Gateway
from keepgrad.gateway.writer import MAX_WAITING, Writer
from keepgrad.ledger import Ledger
from keepgrad.policy.client import EngineClient
from keepgrad.policy.http import HANDLERS, decode, listen, serve
from keepgrad.records import Key, TabRequest, TabResponse

_Request = Request[Any, Any, Any]
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Door:
    """What the routes need, kept in the app's state."""

    def __init__(self, gateway: Gateway, keys: Keys, writer: Writer, meters: Meters, model: str) -> None:
        self.gateway, self.keys, self.writer, self.meters, self.model = gateway, keys, writer, meters, model


@post("/v1/keepgrad/tab", status_code=200)
async def tab(request: _Request) -> TabResponse:
    """One Tab opportunity: TabRequest in, TabResponse out."""
    door, key = _enter(request, "serve")
    wanted = decode(await request.body(), TabRequest)
    check_tab(wanted)
    return await door.gateway.tab(key, wanted)


@post("/v1/keepgrad/events", status_code=200)
async def events(request: _Request) -> dict[str, list[str]]:
    """A batch of events; says of each what became of it: stored, duplicate, waiting (for its generation), dropped (no consent)."""
    door, key = _enter(request, "events")
    batch = decode(await request.body(), EventBatch)
    check_events(batch.events)
    return {"results": await door.gateway.events(key, batch.events)}


@post("/v1/completions", status_code=200)
async def completions(request: _Request) -> dict[str, Any]:
    """One Tab opportunity of a client that speaks Tabby's form."""
    door, key = _enter(request, "serve")
    wanted = tabby.to_tab(decode(await request.body(), tabby.CompletionRequest), key)
    check_tab(wanted)
    return tabby.to_completion(await door.gateway.tab(key, wanted))


@post("/v1/events", status_code=200)
async def tabby_events(request: _Request) -> None:
    """One event of a client that speaks Tabby's form. The first of several that say the same counts; other types are only counted."""
    door, key = _enter(request, "events")
    event = tabby.to_event(decode(await request.body(), tabby.LogEventRequest))
    if event is None:
        door.writer.count("unknown_event")
        return
    check_events([event])
    with suppress(ConflictError):
        await door.gateway.events(key, [event])


@route("/v1/health", http_method=["GET", "POST"], status_code=200)
async def health(request: _Request) -> dict[str, Any]:
    """What Tabby's clients ask before anything else."""
    door, _ = _enter(request, *SCOPES)
    return tabby.health(door.model)


@get("/v1/keepgrad/status")
async def status(request: _Request) -> dict[str, Any]:
    """Traffic, the cycle's stage, counters."""
    door, _ = _enter(request, *SCOPES)
    return door.gateway.status()


@get("/metrics", media_type=MediaType.TEXT)
async def metrics(request: _Request) -> Response[bytes]:
    """Prometheus text format."""
    door, _ = _enter(request, "admin")
    door.meters.waiting.set(door.writer.waiting)
    return Response(door.meters.render(), media_type=_EXPOSITION)


@get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers; says nothing about the engine."""
    return {"status": "ok"}


def create(config: Config, ledger: Ledger, engine: EngineClient, folder: Path | None = None, max_waiting: int = MAX_WAITING) -> Litestar:
    """The app. Its lifespan runs the writer and closes the engine's client; the ledger is the caller's to close."""
    meters = Meters()
    writer = Writer(ledger, meters.commit, max_waiting)
    gateway = Gateway(config, ledger, engine, writer, meters, folder)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        writer.start()
        try:
            yield
        finally:
            await gateway.drain()
            await asyncio.to_thread(writer.stop)
            await engine.close()

    async def note(message: Message, scope: AsgiScope) -> None:
        if message["type"] == "http.response.start":
            known = scope.get("path_template", "") if message["status"] != 404 else ""
            meters.requests.labels(known or "other", str(message["status"])).inc()

    app = Litestar(
        route_handlers=[tab, events, completions, tabby_events, health, status, metrics, healthz],
        lifespan=[lifespan],
        exception_handlers=HANDLERS,
        before_send=[note],
        request_max_body_size=config.server.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )
    app.state["door"] = Door(gateway, Keys(ledger), writer, meters, Path(config.model.path).name)
    return app


def main(config: Config, folder: Path | None = None) -> None:
    """`keepgrad serve`: answer until told to stop. Raises ConfigError (port taken, no keys where they are needed), LedgerError."""
    ledger = Ledger.open(config.root)
    try:
        if not _loopback(config.server.host) and not ledger.keys():
            raise ConfigError(
                f"server.host {config.server.host} is open to others and there is no key: make one, `keepgrad key create`, or use 127.0.0.1"
            )
        listener = listen(config.server.host, config.server.port, "server.port")
        engine = EngineClient(f"http://127.0.0.1:{config.server.engine_port}")
        serve(create(config, ledger, engine, folder), listener)
    finally:
        ledger.close()


def _enter(request: _Request, *scopes: Scope) -> tuple[Door, Key]:
    """The door and the key that opens it. Raises RequestError (401, 403) before the body is looked at."""
    door = cast(Door, request.app.state["door"])
    return door, door.keys.check(request.headers.get("authorization", ""), frozenset(scopes))


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
