"""Simulated developers as HTTP clients: they type real files, ask the gateway for suggestions, and report what became of each.

Every developer has a key, a temperament and a logical client clock that nothing waits for: a pause of two seconds costs no time. What
happens at a later moment of that clock (a suggestion settled after 10 quiet seconds, accepted text looked at again after 600) lies in the
developer's agenda and is reported once the clock has passed it, in order. Ids are made from the seed, so a request or event that has to be
sent again, to a gateway that was away, goes out under the id it had.

A session is one file: 8 to 15 opportunities, one conversation. After it the developer takes a break until the agenda is empty. The sessions
begun and the clocks are kept in a small file, so that a fleet that was killed goes on with new sessions and never turns a clock back.

These developers are a stand-in for people (see developer.py).
"""

import asyncio
import contextlib
import hashlib
import heapq
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import msgspec

from keepgrad.config import Config
from keepgrad.errors import ConfigError, RequestError
from keepgrad.records import Event, EventKind, TabRequest, TabResponse
from keepgrad.release.suite import Context, cut
from keepgrad.simulate.corpus import Split, files, label
from keepgrad.simulate.developer import HORIZONS_S, Draws, Temperament, decide, temperament

_EPOCH_MS = 1_764_400_000_000
"""Where logical clocks start."""
_PLACES_PER_FILE = 40
_SESSION_MIN, _SESSION_MAX = 8, 15
_QUIET_S, _TIMEOUT_S = 10.0, 300.0
_POLL_S = 0.5
_FULL_PACE = frozenset(["collect", "canary"])
_TRICKLE, _TRICKLE_GAP_S = 1, 5.0
"""Developers at work, and the real pause of each after an opportunity, while the machine is needed for something else."""
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_GRACE_S = 10.0
"""How long a fleet that was told to stop goes on trying to hand in its events."""
_AWAY = frozenset([408, 425, 429, 502, 503, 504])
_FAULTS = 10
"""How often a request is sent again after the gateway answered that it has a fault of its own (500)."""
_RESTART_GAP_MS = 86_400_000


class Access(msgspec.Struct, frozen=True):
    """One line of the keys file: a developer and the secret of the key. Made by whoever made the keys, eaten by the fleet.

    >>> Access(user="dev-07", secret="kg-4b1f...")
    """

    user: str
    secret: str


def read_keys(path: Path) -> list[Access]:
    """The keys file: a JSON list of `Access`. Raises ConfigError if it cannot be used."""
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=list[Access])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the developers' keys from {path} ({error}): give a JSON list of {{user, secret}}") from None
    if not keys:
        raise ConfigError(f"no keys in {path}: a fleet needs at least one developer")
    return keys


class Stopped(Exception):
    """The fleet was told to stop while it waited: the way out, not an error."""


class Pace:
    """How many developers may be at work just now, and whether the fleet is to stop."""

    def __init__(self, full: int, limit: int) -> None:
        self.stop = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self._full, self._allowed, self._active, self._left = full, full, 0, limit or -1
        self._changed = asyncio.Condition()

    async def set_stage(self, stage: str) -> None:
        """Full pace or a trickle, by the stage of the cycle."""
        allowed = self._full if stage in _FULL_PACE else min(_TRICKLE, self._full)
        if allowed != self._allowed:
            async with self._changed:
                self._allowed = allowed
                self._changed.notify_all()

    async def begin(self, patient: bool) -> bool:
        """Wait for a turn to take one opportunity; True when it is there.

        Without patience, False as soon as there is only a trickle and no turn free. Raises Stopped when there will be no more turns.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._free() or self._over() or not (patient or self._allowed == self._full))
            if self._over():
                self.stop.set()
                raise Stopped
            if not self._free():
                return False
            self._active += 1
            self._left -= 1
            return True

    async def end(self) -> None:
        """Give the turn back."""
        if self._allowed < self._full:
            await self.wait(_TRICKLE_GAP_S)
        async with self._changed:
            self._active -= 1
            self._changed.notify_all()

    def _free(self) -> bool:
        return self._active < self._allowed

    def _over(self) -> bool:
        return self.stop.is_set() or self._left == 0

    async def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than until the fleet is to stop; whether it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)
        return self.stop.is_set()

    async def halt(self) -> None:
        """Tell everybody to stop."""
        self.stop.set()
        async with self._changed:
            self._changed.notify_all()


class Progress:
    """Sessions begun and clock per developer, kept in a file so that ids are never used twice nor clocks turned back after a kill."""

    def __init__(self, path: Path | None, seed: int, split: str) -> None:
        self._path, self._mark = path, f"{seed}/{split}/"
        self._all: dict[str, tuple[int, int]] = {}
        if path and path.exists():
            try:
                self._all = msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[int, int]])
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path} is not a fleet's progress file ({error}): move it away and use another seed") from None

    def resume(self, user: str) -> tuple[int, int]:
        """(next session, clock in ms) of a developer."""
        clocks = [clock for name, (_, clock) in self._all.items() if name.rsplit("/", 1)[-1] == user]
        session = self._all.get(self._mark + user, (-1, 0))[0] + 1
        return session, max(clocks) + _RESTART_GAP_MS if clocks else _EPOCH_MS

    def begin(self, user: str, session: int, clock_ms: int) -> None:
        """Note a session before its first request goes out."""
        self._all[self._mark + user] = (session, clock_ms)
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            with part.open("wb") as file:
                file.write(msgspec.json.encode(self._all))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._path)


class Wire:
    """HTTP to the gateway, again and again until it answers."""

    def __init__(self, client: httpx.AsyncClient, pace: Pace) -> None:
        self._client, self._pace = client, pace

    async def tab(self, access: Access, request: TabRequest) -> TabResponse:
        """Ask for a suggestion. Raises Stopped if the fleet is told to stop before a gateway that is away comes back."""
        body = await self._post("/v1/keepgrad/tab", access, msgspec.json.encode(request))
        return msgspec.json.decode(body, type=TabResponse)

    async def events(self, access: Access, events: list[Event]) -> None:
        """Hand in events; returns once they are acknowledged."""
        await self._post("/v1/keepgrad/events", access, msgspec.json.encode({"events": events}))

    async def stage(self, access: Access) -> str:
        """The cycle's stage, or an empty string while the gateway is away."""
        try:
            answer = await self._client.get("/v1/keepgrad/status", headers={"authorization": f"Bearer {access.secret}"}, timeout=5)
            return str(answer.json().get("stage", "")) if answer.status_code == 200 else ""
        except (httpx.TransportError, ValueError):
            return ""

    async def _post(self, path: str, access: Access, body: bytes) -> bytes:
        headers = {"authorization": f"Bearer {access.secret}", "content-type": "application/json"}
        attempt, patience_s = 0, _GRACE_S
        while True:
            status, content = await self._once(path, headers, body)
            if 200 <= status < 300:
                return content
            if status and status not in _AWAY and not (status == 500 and attempt < _FAULTS):
                said = content.decode(errors="replace")[:300]
                raise RequestError(f"the gateway refused {path} of {access.user} with status {status}: {said}", status)
            self._pace.counts["retries"] += 1
            delay_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
            attempt += 1
            if await self._pace.wait(delay_s):
                if patience_s <= 0 or path.endswith("/tab"):
                    raise Stopped
                patience_s -= delay_s
                await asyncio.sleep(delay_s)

    async def _once(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        try:
            answer = await self._client.post(path, content=body, headers=headers)
        except httpx.TransportError:
            return 0, b""
        return answer.status_code, answer.content


class Developer:
    """One developer at work. All times of the agenda are of this developer's clock."""

    def __init__(self, access: Access, seed: int, split: Split, wire: Wire, pace: Pace, progress: Progress) -> None:
        self.access, self.wire, self.pace, self.progress = access, wire, pace, progress
        self.who: Temperament = temperament(seed, access.user)
        self._seed, self._split = seed, split
        self.session, self.clock_ms = progress.resume(access.user)
        self._agenda: list[tuple[int, int, Event]] = []
        self._noted = 0

    async def work(self) -> None:
        """File after file until the fleet stops; what is on the agenda is handed in before leaving."""
        shelf = files(self._split)
        try:
            while not self.pace.stop.is_set():
                self.progress.begin(self.access.user, self.session, self.clock_ms)
                draws = Draws(self._seed, self.access.user, f"session {self.session}")
                project, path = shelf[int(draws.uniform("file") * len(shelf))]
                await self._type(label(project, path), self._places(project, path, draws))
                await self._break()
                self.session += 1
        except Stopped:
            with contextlib.suppress(Stopped):
                await self._break()

    def _places(self, project: str, path: Path, draws: Draws) -> list[Context]:
        """Neighbouring places of one file, from a random one on."""
        places = cut([(project, path)], _PLACES_PER_FILE, int(draws.uniform("places") * 2**31), per_file=_PLACES_PER_FILE)
        wanted = _SESSION_MIN + int(draws.uniform("length") * (_SESSION_MAX - _SESSION_MIN + 1))
        start = int(draws.uniform("start") * max(len(places) - wanted + 1, 1))
        return places[start : start + wanted]

    async def _type(self, path: str, places: list[Context]) -> None:
        conversation = _uuid(self.clock_ms, self._seed, self.access.user, self.session, "conversation")
        before: Context | None = None
        taken = 0
        for index, place in enumerate(places):
            gap = _gap(before, place) if before else len(place.prefix)
            if before and gap < taken:  # the accepted text reaches beyond this place: nobody stops there
                continue
            draws = Draws(self._seed, self.access.user, place.id)
            self._pass(min(gap - taken, 400) / self.who.typing_cps + self.who.pause_s * (0.5 + draws.exponential("pause")))
            if not await self.pace.begin(patient=False):
                await self._break()  # there will be time: what has been asked so far settles
                await self.pace.begin(patient=True)
            try:
                ended = await self._opportunity(path, place, index, conversation, draws)
            finally:
                await self.pace.end()
            if ended < 0:
                return
            before, taken = place, ended

    async def _opportunity(self, path: str, place: Context, index: int, conversation: str, draws: Draws) -> int:
        """One request and what becomes of it. Returns the characters taken, or -1 when the editor closed."""
        await self._report()
        asked_ms = self.clock_ms
        name = _uuid(asked_ms, self._seed, self.access.user, self.session, index, "tab")
        luck = int(draws.uniform(f"sampling {self.session}") * 2**31)
        request = TabRequest(prefix=place.prefix, conversation=conversation, at_ms=asked_ms, path=path, id=name, seed=luck)
        answer = await self.wire.tab(self.access, request)
        self.pace.counts["opportunities"] += 1
        if answer.verdict == "silent" or not answer.text:
            self.pace.counts["silent"] += 1
            return 0
        if draws.uniform("cancel") < self.who.cancels:  # they typed on while the answer was on its way
            return self._cancelled(answer.id)
        self._pass(0.3)
        if draws.uniform("close") < self.who.closes:
            return self._closed(answer.id, draws.uniform("close quietly") < 0.5)
        return self._shown(answer, place, draws)

    def _cancelled(self, generation: str) -> int:
        self._note(generation, "not_drawn", self.clock_ms + 150)
        self._pass(0.3)
        self.pace.counts["not_drawn"] += 1
        return 0

    def _closed(self, generation: str, quietly: bool) -> int:
        if not quietly:
            self._note(generation, "shown", self.clock_ms)
            self._note(generation, "closed", self.clock_ms + 900, reason="closed")
        self.pace.counts["closed"] += 1
        return -1

    def _shown(self, answer: TabResponse, place: Context, draws: Draws) -> int:
        shown_ms = self.clock_ms
        decision = decide(answer.text, place.truth, self.who, draws)
        self._note(answer.id, "shown", shown_ms)
        self._pass(min(decision.after_s, _TIMEOUT_S / 2))
        chars = decision.chars if decision.end == "partial" else 0
        self._note(answer.id, decision.end, self.clock_ms, chars=chars, reason=decision.reason)
        quiet = draws.uniform("settle") < 0.85
        rest_s = max(len(place.truth) - decision.chars, 0) / self.who.typing_cps
        settled_ms = self.clock_ms + int(1000 * (rest_s + _QUIET_S)) if quiet else shown_ms + int(1000 * _TIMEOUT_S)
        self._note(answer.id, "settled", settled_ms, reason="quiet" if quiet else "timeout", text=place.truth)
        for horizon in HORIZONS_S:
            if horizon in decision.survival:
                changed = round(1000 * decision.survival[horizon])
                self._note(answer.id, "survival", self.clock_ms + 1000 * horizon, chars=changed, horizon_s=horizon)
        self.pace.counts["shown"] += 1
        self.pace.counts[decision.end] += 1
        return decision.chars if decision.taken and not decision.undone else 0

    def _note(
        self, generation: str, kind: EventKind, at_ms: int, chars: int = 0, reason: str = "", text: str = "", horizon_s: int = 0
    ) -> None:
        """Put an event on the agenda for its moment."""
        name = _uuid(at_ms, self._seed, generation, kind, horizon_s)
        event = Event(id=name, generation=generation, kind=kind, at_ms=at_ms, chars=chars, reason=reason, text=text, horizon_s=horizon_s)
        self._noted += 1
        heapq.heappush(self._agenda, (at_ms, self._noted, event))

    def _pass(self, seconds: float) -> None:
        self.clock_ms += int(1000 * seconds)

    async def _report(self) -> None:
        """Hand in what the clock has passed."""
        due = []
        while self._agenda and self._agenda[0][0] <= self.clock_ms:
            due.append(heapq.heappop(self._agenda)[2])
        if due:
            await self.wire.events(self.access, due)
            self.pace.counts["events"] += len(due)

    async def _break(self) -> None:
        """Time passes until nothing is left on the agenda."""
        if self._agenda:
            self.clock_ms = max(self.clock_ms, max(self._agenda)[0])
        await self._report()
        self._pass(60 + 600 * Draws(self._seed, self.access.user, f"session {self.session}").uniform("break"))


async def run(
    config: Config,
    keys: Path,
    split: Split = "train",
    seed: int = 0,
    concurrency: int = 16,
    limit: int = 0,
    stop: asyncio.Event | None = None,
    progress: Path | None = None,
) -> dict[str, int]:
    """Let the developers of the keys file work until `stop` is set (or `limit` opportunities are done), `concurrency` at a time.

    `progress` is where begun sessions are noted (default: fleet.json in the data folder). Returns counts of opportunities, ends, events and
    retries. Raises ConfigError for keys or a progress file that cannot be used, RequestError when the gateway refuses a request for good.
    """
    accesses = read_keys(keys)
    pace = Pace(min(concurrency, len(accesses)), limit)
    base = f"http://{config.server.host}:{config.server.port}"
    limits = httpx.Limits(max_connections=concurrency + 4, max_keepalive_connections=concurrency + 4)
    async with httpx.AsyncClient(base_url=base, limits=limits, timeout=httpx.Timeout(60, connect=5), trust_env=False) as client:
        wire, noted = Wire(client, pace), Progress(progress or config.root / "fleet.json", seed, split)
        workers = [asyncio.ensure_future(Developer(access, seed, split, wire, pace, noted).work()) for access in accesses]
        watcher = asyncio.ensure_future(_watch(wire, accesses[0], pace, stop))
        try:
            await asyncio.gather(*workers)
        finally:
            for task in (*workers, watcher):
                task.cancel()
            await asyncio.gather(*workers, watcher, return_exceptions=True)
    return dict(pace.counts)


def main(config: Config, keys: Path, split: Split = "train", seed: int = 0, concurrency: int = 16, limit: int = 0) -> dict[str, int]:
    """`run` as a process: SIGTERM and SIGINT end it cleanly, with every event handed in."""

    async def until_signalled() -> dict[str, int]:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return await run(config, keys, split, seed, concurrency, limit, stop)

    return asyncio.run(until_signalled())


async def _watch(wire: Wire, access: Access, pace: Pace, stop: asyncio.Event | None) -> None:
    """Follow the cycle's stage and the wish to stop."""
    while not pace.stop.is_set() and not (stop and stop.is_set()):
        stage = await wire.stage(access)
        if stage:
            await pace.set_stage(stage)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for((stop or pace.stop).wait(), _POLL_S)
    await pace.halt()


def _gap(before: Context, place: Context) -> int:
    """Characters from one place to a later one of the same file (at most what the later prefix holds)."""
    tail = before.prefix[-400:]
    found = place.prefix.rfind(tail)
    return len(place.prefix) - found - len(tail) if found >= 0 else len(place.prefix)


def _uuid(at_ms: int, *parts: object) -> str:
    """A UUIDv7 whose random bits come from the parts: the same event made again has the same id."""
    digest = int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=10).digest(), "big")
    value = at_ms << 80 | 0x7 << 76 | (digest >> 62 & 0xFFF) << 64 | 0b10 << 62 | digest & (1 << 62) - 1
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
