"""The engine over HTTP, for the gateway and the gate: no torch here."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from keepgrad.errors import EngineError, VersionError
from keepgrad.records import Draft, EngineRequest

_T = TypeVar("_T")
_BACKOFF_S = (0.02, 0.05, 0.1, 0.25, 0.5)
_AWAY = frozenset([502, 503, 504])


class EngineClient:
    """The engine's four routes. A request that finds no engine is sent again until `patience_s` has passed: a restart is a hiccup.

    `transport`: another way than sockets, e.g. httpx.ASGITransport to an engine in this process.
    Sending again is harmless: a draft is a function of prompt, version and seed, and loading a version twice loads it once.
    """

    def __init__(
        self,
        base_url: str,
        patience_s: float = 30.0,
        timeout_s: float = 120.0,
        connections: int = 256,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base, self._patience_s = base_url.rstrip("/"), patience_s
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=30.0)
        # trust_env off: a proxy named in the environment is for the world outside, never for loopback.
        timeout = httpx.Timeout(timeout_s, connect=5.0, pool=timeout_s)
        self._http = httpx.AsyncClient(base_url=self._base, limits=limits, timeout=timeout, trust_env=False, transport=transport)

    async def generate(self, request: EngineRequest) -> list[Draft]:
        """One draft per version of the request, in its order. Raises EngineError, or VersionError for a version that cannot be loaded."""
        drafts = self._decode(await self._send("POST", "/generate", msgspec.json.encode(request)), list[Draft])
        if [draft.version for draft in drafts] != list(request.versions):
            raise EngineError(f"the engine at {self._base} answered for other versions than asked: it needs a restart")
        return drafts

    async def generate_all(self, requests: Sequence[EngineRequest], concurrency: int = 64) -> list[list[Draft]]:
        """`generate` for each request, so many at a time; the first error ends them all."""
        limit = asyncio.Semaphore(concurrency)

        async def one(request: EngineRequest) -> list[Draft]:
            async with limit:
                return await self.generate(request)

        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def load(self, version: str) -> None:
        """Have a version loaded. Raises VersionError if it is missing or corrupt, EngineError if there is no engine."""
        await self._send("POST", "/load", msgspec.json.encode({"version": version}))

    async def unload(self, version: str) -> None:
        """Let a version go once nothing runs under it. Raises EngineError if there is no engine."""
        await self._send("POST", "/unload", msgspec.json.encode({"version": version}))

    async def status(self) -> dict[str, Any]:
        """What the engine says about itself. Raises EngineError."""
        return self._decode(await self._send("GET", "/status", None), dict[str, Any])

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _decode(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"the engine at {self._base} answered something else ({error}): is another program there?") from None

    async def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        deadline, attempt = time.monotonic() + self._patience_s, 0
        while True:
            try:
                answer = await self._http.request(method, path, content=body, headers={"content-type": "application/json"})
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:  # it is there, but has more than it can do
                raise EngineError(f"the engine at {self._base} did not answer {path} in time ({type(error).__name__})") from None
            except httpx.TransportError as error:  # refused, or it went away with the request in hand
                trouble = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code < 300:
                    return answer.content
                trouble = _sentence(answer)
                if answer.status_code in (404, 422):
                    raise VersionError(trouble)
                if answer.status_code not in _AWAY:
                    raise EngineError(f"the engine at {self._base} refused {path} ({answer.status_code}): {trouble}")
            delay_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
            attempt += 1
            if time.monotonic() + delay_s > deadline:
                raise EngineError(f"no engine at {self._base} for {self._patience_s:g} s ({trouble}): start it with `keepgrad engine`")
            await asyncio.sleep(delay_s)


def _sentence(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]
