"""The engine as a process of its own: Litestar on loopback around `Engine`. The gateway and the gate talk to it with policy/client.py.

POST /generate   EngineRequest -> list of Draft, one per version, same order
POST /load       {"version": "v-..."}: bring a version into memory
POST /unload     {"version": "v-..."}: let it go once no draft runs under it
GET  /status     versions, rows under way, counts, and the model folder that is served
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
from litestar import Litestar, Request, Response, get, post

from keepgrad.config import Config
from keepgrad.errors import RequestError
from keepgrad.policy import model
from keepgrad.policy.engine import Engine
from keepgrad.policy.http import HANDLERS, decode, listen, serve
from keepgrad.policy.versions import Store
from keepgrad.records import EngineRequest

_Request = Request[Any, Any, Any]
_HOST = "127.0.0.1"  # there are no keys here: the front door is the gateway
_MAX_TOKENS = 4096
_MAX_VERSIONS = 16


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /load and /unload.

    >>> Named(version="v-3f2a...")
    """

    version: str


@post("/generate", status_code=200)
async def generate(request: _Request) -> Response[bytes]:
    """One draft per version of the request."""
    wanted = decode(await request.body(), EngineRequest)
    _check(wanted, request.app.state["vocabulary"])
    drafts = await _engine(request).generate(wanted)
    return Response(msgspec.json.encode(drafts), media_type="application/json")


@post("/load", status_code=200)
async def load(request: _Request) -> dict[str, str]:
    """Bring a version into memory; harmless if it is there."""
    version = decode(await request.body(), Named).version
    await _engine(request).load(version)
    return {"loaded": version}


@post("/unload", status_code=200)
async def unload(request: _Request) -> dict[str, str]:
    """Take a version out of memory once no draft runs under it; harmless if it is not there."""
    version = decode(await request.body(), Named).version
    await _engine(request).unload(version)
    return {"unloaded": version}


@get("/status")
async def status(request: _Request) -> dict[str, Any]:
    """What the engine says about itself, and the model folder it serves."""
    return {**_engine(request).status(), "folder": request.app.state["folder"]}


def create(config: Config) -> Litestar:
    """The app. Loads the model. Raises ModelError if there is none that can be used."""
    folder = model.resolve(config.model.path).absolute()
    # A process without its model thread is of no use: it ends, and whoever supervises it starts a new one.
    engine = Engine(config, Store(config.root), on_broken=lambda: os.kill(os.getpid(), signal.SIGTERM))

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.stop)

    app = Litestar(
        route_handlers=[generate, load, unload, status],
        lifespan=[lifespan],
        exception_handlers=HANDLERS,
        openapi_config=None,
        logging_config=None,
    )
    app.state["engine"], app.state["folder"], app.state["vocabulary"] = engine, str(folder), engine.prompter.stops()[1]
    return app


def main(config: Config) -> None:
    """`keepgrad engine`: answer until told to stop. Raises ConfigError (port taken), ModelError.

    The port is ours before the model is loaded: whoever asks meanwhile waits in the socket's queue instead of being refused.
    """
    listener = listen(_HOST, config.server.engine_port, "server.engine_port")
    serve(create(config), listener)


def _engine(request: _Request) -> Engine:
    return cast(Engine, request.app.state["engine"])


def _check(request: EngineRequest, vocabulary: int) -> None:
    """Raises RequestError for what the model cannot compute, before it reaches the thread that all requests share."""
    sampling = request.sampling
    if not 2 <= len(request.prompt_ids) <= _MAX_TOKENS or not all(0 <= token < vocabulary for token in request.prompt_ids):
        raise RequestError(f"prompt_ids must be 2 to {_MAX_TOKENS} ids between 0 and {vocabulary - 1}")
    if not 1 <= len(set(request.versions)) == len(request.versions) <= _MAX_VERSIONS:
        raise RequestError(f"versions must be 1 to {_MAX_VERSIONS} different ones")
    if not 1 <= sampling.max_tokens <= _MAX_TOKENS or not 0 < sampling.temperature <= 100 or not 0 <= request.seed < 2**64:
        raise RequestError(f"max_tokens must be 1 to {_MAX_TOKENS}, temperature above 0 and at most 100, seed 0 to 2**64 - 1")
