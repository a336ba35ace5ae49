"""What a client may send: each field within its bounds, or one sentence that says which is not."""

import re
from collections.abc import Sequence

import msgspec

from keepgrad.errors import RequestError
from keepgrad.records import Event, TabRequest

EVENTS_AT_ONCE = 1000
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.ASCII)
_YEAR_2000_MS, _YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000
_MAX_NAME, _MAX_PATH = 200, 4096
_MAX_SEED = 2**63 - 1
_MAX_COUNT = 10_000_000
_REASONS = {
    "ignored": frozenset(["", "superseded", "typing_disagreed", "expired"]),
    "settled": frozenset(["", "quiet", "timeout"]),
    "closed": frozenset(["", "closed"]),
}


class EventBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/keepgrad/events`: up to 1000 events, all kept or none. Made by an editor, eaten by the gateway.

    >>> EventBatch(events=[Event(id="0190...", generation="0190...", kind="shown", at_ms=1764400000000)])
    """

    events: list[Event]


def check_tab(request: TabRequest) -> None:
    """Raises RequestError (400) for a field out of bounds."""
    _name(request.conversation, "conversation")
    _moment(request.at_ms, "at_ms")
    if request.id:
        _uuid(request.id, "id")
    if len(request.path) > _MAX_PATH or _control(request.path):
        raise RequestError(f"path must be printable and at most {_MAX_PATH} characters long")
    if request.seed is not None and not 0 <= request.seed <= _MAX_SEED:
        raise RequestError(f"seed must lie between 0 and {_MAX_SEED}")


def check_events(events: Sequence[Event]) -> None:
    """Raises RequestError (400) for too many events or a field out of bounds, naming the first event that is wrong."""
    if len(events) > EVENTS_AT_ONCE:
        raise RequestError(f"{len(events)} events at once are too many: send at most {EVENTS_AT_ONCE}")
    for at, event in enumerate(events):
        where = f"events[{at}]."
        _uuid(event.id, where + "id")
        _uuid(event.generation, where + "generation")
        _moment(event.at_ms, where + "at_ms")
        if not 0 <= event.chars <= _MAX_COUNT or not 0 <= event.horizon_s <= _MAX_COUNT:
            raise RequestError(f"{where}chars and horizon_s must lie between 0 and {_MAX_COUNT}")
        allowed = _REASONS.get(event.kind)
        if allowed is not None and event.reason not in allowed:
            raise RequestError(f"{where}reason of {event.kind} is one of {', '.join(sorted(filter(None, allowed)))}, or empty")
        if len(event.reason) > _MAX_NAME or _control(event.reason):
            raise RequestError(f"{where}reason must be printable and at most {_MAX_NAME} characters long")


def _uuid(value: str, where: str) -> None:
    if not _UUID7.fullmatch(value):
        raise RequestError(f"{where} must be a UUIDv7 in lower case, like 0190a5c4-9d2e-7000-8000-000000000001")


def _moment(value: int, where: str) -> None:
    if not _YEAR_2000_MS < value < _YEAR_2100_MS:
        raise RequestError(f"{where} must be milliseconds since 1970 and lie between the years 2000 and 2100")


def _name(value: str, where: str) -> None:
    if not value or len(value) > _MAX_NAME or _control(value):
        raise RequestError(f"{where} must be printable and 1 to {_MAX_NAME} characters long")


def _control(value: str) -> bool:
    return any(ord(character) < 32 or ord(character) == 127 for character in value)
