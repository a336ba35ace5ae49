"""What the engine's and the gateway's HTTP servers have in common: a socket that says when its port is taken, uvicorn, bodies, errors."""

import errno
import logging
import socket
from typing import Any, TypeVar

import msgspec
import uvicorn
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException

from keepgrad.errors import ConfigError, ConflictError, EngineError, KeepgradError, LedgerError, RequestError, VersionError

_T = TypeVar("_T")
_RETRY_S = 1
_STATUS: tuple[tuple[type[KeepgradError], int], ...] = (
    (ConflictError, 409),
    (LedgerError, 503),
    (EngineError, 503),
    (VersionError, 422),
)
_log = logging.getLogger(__name__)


def listen(host: str, port: int, key: str) -> socket.socket:
    """A listening TCP socket; `key` names the setting that chose the port. Raises ConfigError if it cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle's delay on
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port} ({error}): set server.host to an address of this machine") from None
    try:
        # Without this a restart would have to wait until the last connections' TIME_WAIT is over.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken: stop what listens there, or set {key} to another port") from None
        raise ConfigError(f"cannot listen on {host} port {port} ({error}): set {key} and server.host to what this machine allows") from None
    listener.set_inheritable(False)
    return listener


def serve(app: Litestar, listener: socket.socket) -> None:
    """Serve `app` on the socket until SIGTERM or SIGINT; requests in flight are answered first (10 s at most)."""
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody in front of us is trusted to say who the client is
        lifespan="on",
        timeout_keep_alive=75,  # longer than clients keep a pooled connection idle
        timeout_graceful_shutdown=10,
    )
    uvicorn.Server(settings).run(sockets=[listener])


def decode(body: bytes, kind: type[_T]) -> _T:
    """A JSON body as a record. Raises RequestError (400) for what is not JSON, not UTF-8, of wrong types or with unknown fields."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise RequestError(f"the body is not what is wanted here: {error}") from None


def refuse(_: Request[Any, Any, Any], error: KeepgradError) -> Response[dict[str, str]]:
    """An error of ours as an HTTP answer: `{"error": "<one sentence>"}`."""
    kinds = [(RequestError, error.status)] if isinstance(error, RequestError) else _STATUS
    status = next((code for kind, code in kinds if isinstance(error, kind)), 500)
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(_RETRY_S)
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="keepgrad"'
    return Response({"error": str(error)}, status_code=status, headers=headers)


def refuse_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, str]]:
    """What the framework refuses (no such route, wrong method, too large a body), in the same form."""
    sentences = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
        413: "the body is larger than server.max_body_bytes: send less at once",
    }
    text = sentences.get(error.status_code, error.detail)
    return Response({"error": text}, status_code=error.status_code, headers=error.headers)


def fail(_: Request[Any, Any, Any], error: Exception) -> Response[dict[str, str]]:
    """A fault of ours: it goes to the log with its trace, and to the client without it."""
    _log.error("request failed", exc_info=error)
    return Response({"error": "something failed here that should not have; the server's log says what"}, status_code=500)


HANDLERS: dict[int | type[Exception], Any] = {KeepgradError: refuse, HTTPException: refuse_http, Exception: fail}
"""Exception handlers for a Litestar app."""
