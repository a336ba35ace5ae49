"""Tabby's HTTP API, so that its editor extensions can be pointed at keepgrad: its requests to ours, our answers to its.

    POST /v1/completions  {"language", "segments": {"prefix", "suffix", "filepath", ...}}   ->  {"id", "choices": [{"index", "text"}]}
    POST /v1/events       {"type": "view" | "select" | "dismiss", "completion_id", "choice_index", "view_id", "elapsed"}
    GET, POST /v1/health  what its clients ask before anything else

Tabby has no conversations, no clock of its own and no ids of events: a conversation is one file of one user for ten minutes, times are
ours, and an event's id follows from what it says, so that one sent twice counts once. It reports neither partial acceptance nor what became
of accepted text: `settled` and `survival` stay unknown, and text is learned from rewards alone. Fields we have no use for are ignored.
Source: TabbyML/tabby, routes/completions.rs and routes/events.rs.
"""

import hashlib
import platform
import time
from typing import Any

import msgspec

from keepgrad import __version__
from keepgrad.errors import RequestError
from keepgrad.records import Event, EventKind, Key, TabRequest, TabResponse

_CONVERSATION_S = 600
_KINDS: dict[str, EventKind] = {"view": "shown", "select": "accepted", "dismiss": "rejected"}


class Segments(msgspec.Struct, frozen=True):
    """The code around the cursor. Made by Tabby's client, eaten by `to_tab`.

    >>> Segments(prefix="def add(a, b):", filepath="src/add.py")
    """

    prefix: str
    suffix: str | None = None
    filepath: str | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    """`POST /v1/completions` as Tabby's clients send it. Made there, eaten by `to_tab`.

    >>> CompletionRequest(segments=Segments(prefix="def add(a, b):"), language="python")
    """

    segments: Segments | None = None
    language: str | None = None
    seed: int | None = None


class LogEventRequest(msgspec.Struct, frozen=True):
    """`POST /v1/events` as Tabby's clients send it. Made there, eaten by `to_event`.

    >>> LogEventRequest(type="select", completion_id="0190...", choice_index=0, view_id="view-0190...", elapsed=840)
    """

    type: str
    completion_id: str = ""
    choice_index: int | None = None
    view_id: str | None = None
    elapsed: int | None = None


def to_tab(request: CompletionRequest, key: Key) -> TabRequest:
    """Our request. Raises RequestError (400) for one without segments, which is how other APIs use this path."""
    if request.segments is None:
        raise RequestError(
            "this path speaks Tabby's form, {'segments': {'prefix': ...}}: keepgrad's own is /v1/keepgrad/tab, OpenAI's is not there yet"
        )
    now_s, path = time.time(), request.segments.filepath or ""
    place = hashlib.sha256(f"{key.org}\0{key.user}\0{path}".encode()).hexdigest()[:16]
    return TabRequest(
        prefix=request.segments.prefix,
        suffix=request.segments.suffix or "",
        path=path,
        conversation=f"tabby-{place}-{int(now_s) // _CONVERSATION_S}",
        at_ms=int(1000 * now_s),
        seed=request.seed,
    )


def to_completion(answer: TabResponse) -> dict[str, Any]:
    """Tabby's answer; where the policy is silent its one choice is empty, which Tabby's clients do not draw."""
    return {"id": answer.id, "choices": [{"index": 0, "text": answer.text}]}


def to_event(request: LogEventRequest) -> Event | None:
    """Our event, None for a type that we have no kind for."""
    kind = _KINDS.get(request.type)
    if kind is None:
        return None
    return Event(_identity(request), request.completion_id, kind, int(1000 * time.time()))


def health(model: str) -> dict[str, Any]:
    """What Tabby's clients ask for before anything else."""
    return {
        "model": model,
        "device": "cpu",
        "arch": platform.machine(),
        "cpu_info": "",
        "cpu_count": 0,
        "cuda_devices": [],
        "version": {"build_date": "", "build_timestamp": "", "git_sha": "", "git_describe": f"keepgrad {__version__}"},
    }


def _identity(request: LogEventRequest) -> str:
    """A UUIDv7 that the event's content determines; its time is the completion's, whose id begins with it."""
    digest = int.from_bytes(hashlib.sha256(f"{request.completion_id}\0{request.type}\0{request.view_id}".encode()).digest()[:10], "big")
    tail = digest & ((1 << 62) - 1) | 0b10 << 62
    head = request.completion_id[:13]
    return f"{head}-7{digest >> 62 & 0xFFF:03x}-{tail >> 48:04x}-{tail & (1 << 48) - 1:012x}"
