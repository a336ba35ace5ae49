"""A data folder with real versions of the tiny model, keys and traffic; gateway and engine in this process or as processes of their own."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import peft
import torch
from litestar import Litestar

from keepgrad.config import Config, Engine, Model, Server, dump
from keepgrad.gateway import app as gateway
from keepgrad.gateway.auth import issue
from keepgrad.gateway.writer import MAX_WAITING
from keepgrad.ledger import Ledger
from keepgrad.policy import model, server
from keepgrad.policy.client import EngineClient
from keepgrad.policy.engine import ADAPTER, base_files
from keepgrad.policy.verdict import FILE, always
from keepgrad.policy.versions import Store
from keepgrad.records import Event, EventKind, TabRequest, Traffic, Version, uuid7

Consent = Literal["none", "metadata", "code"]
PREFIX = "import os\n\n\ndef folder(name):\n    return os."


@dataclass
class Site:
    """One installation: its folder, ledger, versions, and secrets by user."""

    config: Config
    ledger: Ledger
    store: Store
    base: str
    secrets: dict[str, str] = field(default_factory=dict)

    def key(self, user: str, consent: Consent = "code", scopes: tuple[str, ...] = ("serve", "events"), org: str = "acme") -> dict[str, str]:
        """Make a key; its request headers."""
        key, secret = issue(org, user, consent, scopes)
        self.ledger.put_key(key)
        self.secrets[user] = secret
        return {"authorization": f"Bearer {secret}"}

    def traffic(self, incumbent: str = "", **fields: Any) -> Traffic:
        """Put a traffic record in force; the base answers everybody unless told otherwise."""
        wanted = {
            "previous": "", "canary": "", "canary_share": 0.0, "holdback": "", "holdback_share": 0.0, "force": False, "reason": "test",
            "at_ms": int(time.time() * 1000), **fields,
        }  # fmt: skip
        record = Traffic(incumbent=incumbent or self.base, **wanted)
        self.ledger.put_traffic(record)
        return record

    def adapter(self, seed: int) -> str:
        """A version with a randomly initialised LoRA adapter, distinct by seed."""
        folder = Path(self.config.server.data) / f"adapter-{seed}"
        return write_version(self.store, adapter_files(Path(self.config.model.path), folder, seed), self.base, seed).id


def site(folder: Path, tiny: Path, **server_fields: Any) -> Site:
    """A fresh installation on free ports, the base version serving."""
    torch.set_num_threads(1)
    ports = {"port": free_port(), "engine_port": free_port()}
    config = Config(
        model=Model(path=str(tiny), dtype="float32", max_tokens=8, context_tokens=48),
        server=Server(data=str(folder / "data"), **{**ports, **server_fields}),
        engine=Engine(threads=1, loaded_versions=4),
    )
    config.root.mkdir(parents=True, exist_ok=True)
    (folder / "keepgrad.toml").write_text(dump(config))
    store = Store(config.root)
    base = write_version(store, base_files(), "", 0)
    made = Site(config, Ledger.open(config.root), store, base.id)
    made.traffic()
    return made


def write_version(store: Store, files: dict[str, bytes], parent: str, seed: int) -> Version:
    """A stored version with these files."""
    return store.write(files, parent=parent, model="tiny", window="", spec="", seed=seed)


def adapter_files(tiny: Path, folder: Path, seed: int) -> dict[str, bytes]:
    """The files of a version whose adapter changes what the tiny model says."""
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(
        model.load(tiny, torch.float32), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    wrapped.save_pretrained(folder)
    files = {name: (folder / name).read_bytes() for name in ADAPTER}
    return {**files, FILE: always().to_bytes(), "from_last": b""}


def ask(conversation: str = "c-1", **fields: Any) -> dict[str, Any]:
    """The body of a Tab request."""
    request = TabRequest(**{"prefix": PREFIX, "conversation": conversation, "at_ms": 1_764_400_000_000, "path": "src/a.py", **fields})
    return {name: value for name in request.__struct_fields__ if (value := getattr(request, name)) is not None}


def happened(generation: str, kind: EventKind = "shown", **fields: Any) -> dict[str, Any]:
    """One event as JSON."""
    event = Event(**{"id": uuid7(), "generation": generation, "kind": kind, "at_ms": 1_764_400_001_000, **fields})
    return {name: getattr(event, name) for name in event.__struct_fields__}


@contextlib.asynccontextmanager
async def running(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app in this process, within its lifespan."""
    async with app.lifespan(), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://keepgrad") as client:
        yield client


@contextlib.asynccontextmanager
async def door(place: Site, max_waiting: int = MAX_WAITING, patience_s: float = 5.0) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway and, behind it, an engine, all in this process."""
    engine = server.create(place.config)
    async with engine.lifespan():
        client = EngineClient("http://engine", patience_s=patience_s, transport=httpx.ASGITransport(engine))
        async with running(gateway.create(place.config, place.ledger, client, max_waiting=max_waiting)) as http:
            yield http


def free_port() -> int:
    """A port that is free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(place: Site, command: str, log: Path) -> subprocess.Popen[bytes]:
    """`keepgrad <command>` as a process of its own."""
    config = place.config.root.parent / "keepgrad.toml"
    root = str(Path(__file__).parents[2])
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "keepgrad", command, "--config", str(config)],
            stdout=stream, stderr=stream, env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip


@contextlib.contextmanager
def process(place: Site, command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is up when the block begins and gone when it ends."""
    port, path = (place.config.server.engine_port, "/status") if command == "engine" else (place.config.server.port, "/healthz")
    child = start(place, command, log)
    try:
        wait_for(f"http://127.0.0.1:{port}{path}", child, log)
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        child.wait(30)


def wait_for(url: str, child: subprocess.Popen[bytes], log: Path, patience_s: float = 180.0) -> None:
    """Until the URL answers 200."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        assert child.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=10).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"{url} does not answer:\n{log.read_text()}")


async def post_until(client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """Send, as an editor does, again and again while there is no gateway to answer."""
    content = json.dumps(body).encode()
    while True:
        try:
            answer = await client.post(path, content=content, headers=headers)
            if answer.status_code not in (429, 503):
                return answer
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.05)
