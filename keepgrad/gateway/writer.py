"""Group commit: one thread writes what many requests bring, so that all who wait at the same time share one transaction (P4).

A request is answered only after the transaction that holds its rows is on disk. While one transaction is being flushed, the next group
gathers; the busier the gateway, the larger the groups.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from keepgrad.errors import LedgerError, RequestError
from keepgrad.ledger import Ledger
from keepgrad.records import Event, Generation, Tokens

MAX_WAITING = 10_000
"""Events that may wait for the disk before clients are told to come back later."""
SEAL_ROWS = 256
"""Token rows in the spool before they are sealed into a segment."""
_COUNTERS_S = 1.0
_log = logging.getLogger(__name__)


class _Job:
    """What one request wants written, and the future it waits on."""

    def __init__(self, payload: Any, size: int) -> None:
        self.payload, self.size = payload, size
        self.done: Future[Any] = Future()


class Writer:
    """The ledger's one writer of generations, events and tokens. `observe(rows, seconds)` hears about each transaction."""

    def __init__(self, ledger: Ledger, observe: Callable[[int, float], None], max_waiting: int = MAX_WAITING) -> None:
        self._ledger, self._observe, self._max_waiting = ledger, observe, max_waiting
        self._changed = threading.Condition()
        self._generations: list[_Job] = []
        self._events: list[_Job] = []
        self._counts: Counter[str] = Counter()
        self._waiting = 0
        self._stopping = False
        self._unsealed = SEAL_ROWS  # what an earlier process left in the spool is looked at with the first group
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write all that waits, seal the spool, and end. Blocks until done."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Events that are not on disk yet."""
        return self._waiting

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter; on disk within a second."""
        with self._changed:
            self._counts[name] += number
            self._changed.notify()

    async def add_generation(self, generation: Generation, tokens: Tokens) -> None:
        """Returns once both are on disk. Never refused for want of room: serving goes on. Raises ConflictError, LedgerError."""
        job = _Job((generation, tokens), 1)
        self._put(job, events=False)
        await asyncio.wrap_future(job.done)

    async def add_events(self, events: Sequence[Event], key: str) -> list[str]:
        """What became of each event, once all are on disk: stored, duplicate or waiting (for its generation).

        Raises RequestError (429) when too much waits already, RequestError (403) if one belongs to another key's generation (P8),
        ConflictError if an id came with other content before; then none of them is written.
        """
        waiting = self._waiting
        if waiting and waiting + len(events) > self._max_waiting:
            raise RequestError(f"{waiting} events wait for the disk already: send these again in a second", 429)
        job = _Job((tuple(events), key), len(events))
        self._put(job, events=True)
        results: list[str] = await asyncio.wrap_future(job.done)
        return results

    def _put(self, job: _Job, events: bool) -> None:
        with self._changed:
            if self._stopping:
                raise LedgerError("the gateway is shutting down and takes no more: send this again to the next one")
            # Which list it is may only be asked under the lock: the writer takes the whole list away and leaves a new one.
            (self._events if events else self._generations).append(job)
            if events:
                self._waiting += job.size
            self._changed.notify()

    def _run(self) -> None:
        counted_s = time.monotonic()
        while True:
            with self._changed:
                while not (self._generations or self._events or self._stopping):
                    if self._counts and time.monotonic() - counted_s >= _COUNTERS_S:
                        break
                    self._changed.wait(_COUNTERS_S if self._counts else None)
                generations, self._generations = self._generations, []
                events, self._events = self._events, []
                stopping = self._stopping
            self._together(generations, self._write_generations)
            self._together(events, self._write_events)
            if stopping or time.monotonic() - counted_s >= _COUNTERS_S:
                self._write_counts()
                counted_s = time.monotonic()
            if stopping and not generations and not events:
                self._seal(1)
                return
            if self._unsealed >= SEAL_ROWS:
                self._seal(SEAL_ROWS)

    def _together(self, jobs: list[_Job], write: Callable[[list[_Job]], list[Any]]) -> None:
        """All jobs in one transaction; if the ledger refuses it, each in its own, so that only those at fault fail."""
        if not jobs:
            return
        started_s = time.monotonic()
        try:
            results = write(jobs)
        except Exception as error:  # whatever it is, it belongs to those who wait, and they raise it
            if len(jobs) > 1 and isinstance(error, LedgerError):
                for job in jobs:
                    self._together([job], write)
                return
            results = [error] * len(jobs)
        self._observe(sum(job.size for job in jobs), time.monotonic() - started_s)
        for job, result in zip(jobs, results, strict=True):
            if not job.done.set_running_or_notify_cancel():
                continue  # nobody waits any more
            if isinstance(result, Exception):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)

    def _write_generations(self, jobs: list[_Job]) -> list[Any]:
        self._ledger.add_generations([job.payload for job in jobs])
        self._unsealed += len(jobs)
        return [None] * len(jobs)

    def _write_events(self, jobs: list[_Job]) -> list[Any]:
        try:
            owners = self._ledger.generation_keys([event.generation for job in jobs for event in job.payload[0]])
            mine = [job for job in jobs if all(owners.get(event.generation, job.payload[1]) == job.payload[1] for event in job.payload[0])]
            kept = iter(self._ledger.add_events([(event, job.payload[1]) for job in mine for event in job.payload[0]]) if mine else [])
            allowed = set(mine)
            return [[next(kept) for _ in job.payload[0]] if job in allowed else self._foreign(job, owners) for job in jobs]
        finally:
            with self._changed:
                self._waiting = sum(job.size for job in self._events)

    def _foreign(self, job: _Job, owners: dict[str, str]) -> RequestError:
        events, key = job.payload
        foreign = [event for event in events if owners.get(event.generation, key) != key]
        self.count("forbidden_event", len(foreign))
        return RequestError(f"event {foreign[0].id} is about a generation that was served to another key: none of the batch is kept", 403)

    def _write_counts(self) -> None:
        with self._changed:
            counts, self._counts = self._counts, Counter()
        for name, number in counts.items():
            try:
                self._ledger.count(name, number)
            except LedgerError:
                _log.exception("counter %s is kept until the ledger takes it", name)
                with self._changed:
                    self._counts[name] += number

    def _seal(self, min_rows: int) -> None:
        self._unsealed = 0
        try:
            self._ledger.seal(min_rows)
        except LedgerError:  # the rows are safe in the spool; the next group of this size tries again
            _log.exception("the token spool could not be sealed")
