"""What happens to one opportunity and to one batch of events: version choice, leases, consent, the ledger. No HTTP here."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from keepgrad.config import Config
from keepgrad.errors import ConflictError, EngineError, VersionError
from keepgrad.gateway.measure import Meters
from keepgrad.gateway.writer import Writer
from keepgrad.ledger import Ledger
from keepgrad.policy.client import EngineClient
from keepgrad.policy.prompt import MOST_CHARS, Prompter
from keepgrad.policy.traffic import assign, named, user_hash
from keepgrad.records import Arm, Draft, EngineRequest, Event, Generation, Key, Sampling, TabRequest, TabResponse, Tokens, Traffic, uuid7
from keepgrad.redact import redact

_LEASES = 50_000
"""Conversations whose version is remembered in memory; older ones are looked up in the ledger."""
_REACH = 4000
"""Characters before those that a prompt can hold that are looked at for secrets, for one may begin there: a private key of 4096 bits."""
_BAD_S = 30.0
"""How long a version that the engine could not load is not asked for again."""


class Lease(NamedTuple):
    """The version that a conversation holds, under which arm, and how many forced traffic records there had been (P3)."""

    version: str
    arm: Arm
    forced: int


class Prompt(NamedTuple):
    """One request as the engine sees it."""

    ids: list[int]
    healed: bool
    seed: int
    sampling: Sampling


class Gateway:
    """The front door without its HTTP. All methods belong to one event loop; the writer thread is the only other one.

    `folder` is the model folder whose tokenizer renders prompts; None: the engine is asked for it with the first request.
    """

    def __init__(self, config: Config, ledger: Ledger, engine: EngineClient, writer: Writer, meters: Meters, folder: Path | None) -> None:
        self._config, self._ledger, self._engine, self._writer, self._meters = config, ledger, engine, writer, meters
        self._prompter = Prompter(folder) if folder else None
        self._meeting = asyncio.Lock()
        self._sampling = Sampling(temperature=config.model.temperature, max_tokens=config.model.max_tokens, explore=True)
        self._running: dict[str, tuple[str, TabRequest, asyncio.Task[TabResponse]]] = {}
        self._leases: OrderedDict[tuple[str, str, str], Lease] = OrderedDict()
        self._bad: dict[str, float] = {}
        self._seen: Traffic | None = None
        self._forced: list[int] = []

    async def tab(self, key: Key, request: TabRequest) -> TabResponse:
        """Answer one opportunity. The work goes on if the client leaves; the same id asked again gets the same answer.

        Raises EngineError when nothing can serve just now, ConflictError when the id was used for something else.
        """
        name = request.id or uuid7()
        running = self._running.get(name)
        if running is None:
            task = asyncio.ensure_future(self._answer(key, request, name))
            self._running[name] = (key.id, request, task)
            task.add_done_callback(lambda done: self._finished(name, done))
        else:
            if running[:2] != (key.id, request):
                raise ConflictError(f"generation {name} is being made for another request: use a new id for each opportunity")
            task = running[2]
        return await asyncio.shield(task)

    async def events(self, key: Key, events: Sequence[Event]) -> list[str]:
        """Keep events; what became of each (stored, duplicate, waiting; dropped at consent none) once that is on disk.

        Raises RequestError (403, 429) or ConflictError; then none of them is kept.
        """
        if key.consent == "none":
            self._writer.count("consent_none_events", len(events))
            results = ["dropped"] * len(events)
        else:
            code = key.consent == "code"
            kept = [msgspec.structs.replace(event, text=self._clean(event.text) if code else "") for event in events]
            results = await self._writer.add_events(kept, key.id) if kept else []
        for event, result in zip(events, results, strict=True):
            self._meters.events.labels(event.kind, result).inc()
        return results

    def _clean(self, text: str) -> str:
        clean, found = redact(text)
        self._meters.redacted.inc(found)
        return clean

    def status(self) -> dict[str, Any]:
        """Traffic, the cycle's stage, counters and sizes, as JSON values."""
        traffic = self._ledger.traffic()
        return {
            "stage": self._ledger.current_stage(),
            "traffic": msgspec.to_builtins(traffic) if traffic else None,
            "generations": self._ledger.last_seq(),
            "waiting_events": self._writer.waiting,
            "running": len(self._running),
            "counters": self._ledger.counters(),
        }

    async def drain(self) -> None:
        """Wait until every request in progress is answered."""
        while self._running:
            await asyncio.wait([task for _, _, task in self._running.values()])
            await asyncio.sleep(0)

    def _finished(self, name: str, task: asyncio.Task[TabResponse]) -> None:
        del self._running[name]
        if not task.cancelled():
            task.exception()  # if the client has gone nobody else looks at it

    async def _answer(self, key: Key, request: TabRequest, name: str) -> TabResponse:
        started_s, created_ms = time.perf_counter(), int(time.time() * 1000)
        prompter = self._prompter or await self._meet()
        prefix = request.prefix
        if key.consent == "code":  # before anything is rendered: the model sees what is recorded
            used = self._config.model.context_tokens * MOST_CHARS
            prefix, found = redact(prefix[-_REACH - used :], last=used + 1)
            self._meters.redacted.inc(found)
        ids, healed = prompter.encode(prefix, self._config.model.context_tokens)
        prompt = Prompt(ids, healed, _seed(name) if request.seed is None else request.seed, self._sampling)
        if request.id and (stored := self._ledger.generation(name)):
            return await self._again(key, request, stored, prompt)
        draft, arm = await self._draft(key, request, prompt)
        text = draft.text if draft.verdict == "show" else ""
        answer = TabResponse(name, text, draft.verdict, draft.version, draft.show_probability)
        latency_ms = 1000 * (time.perf_counter() - started_s)
        if key.consent == "none":
            self._writer.count("consent_none")
        else:
            generation, tokens = _record(key, request, name, prompt, draft, arm, created_ms, latency_ms)
            await self._writer.add_generation(generation, tokens)
        self._meters.generations.labels(draft.version, arm, draft.verdict).inc()
        self._meters.tab_s.observe(time.perf_counter() - started_s)
        return answer

    async def _meet(self) -> Prompter:
        """Learn from the engine which model it serves; its tokenizer is ours."""
        async with self._meeting:  # the first requests come together; one of them reads the tokenizer for all
            if self._prompter is None:
                folder = (await self._engine.status()).get("folder")
                if not isinstance(folder, str):
                    raise EngineError("the engine does not say which model folder it serves: start an engine of this release")
                self._prompter = Prompter(Path(folder))
        return self._prompter

    async def _again(self, key: Key, request: TabRequest, stored: Generation, prompt: Prompt) -> TabResponse:
        """The answer to a request that has been served before. Raises ConflictError if it is not the same request."""
        same = stored.key == key.id and stored.conversation == request.conversation and stored.client_ms == request.at_ms
        if same and stored.consent == "code":
            tokens = self._ledger.tokens([stored.id]).get(stored.id)
            same = stored.path == request.path and (tokens is None or tokens.prompt_ids == prompt.ids)
        if not same or request.seed not in (None, stored.seed):
            raise ConflictError(f"generation {stored.id} was made for another request: use a new id for each opportunity")
        self._meters.repeats.inc()
        text = stored.text
        if stored.consent == "metadata" and stored.verdict == "show":  # its text was never kept: the same draw gives it again
            draft = await self._generate(stored.version, msgspec.structs.replace(self._request(prompt), seed=stored.seed))
            text = draft.text
        shown = text if stored.verdict == "show" else ""
        return TabResponse(stored.id, shown, stored.verdict, stored.version, stored.show_probability)

    async def _draft(self, key: Key, request: TabRequest, prompt: Prompt) -> tuple[Draft, Arm]:
        """A draft of the version this conversation is served by; of the incumbent, or the one before it, if that cannot be loaded (P6)."""
        traffic = self._traffic()
        user = user_hash(key.org, key.user)
        version, arm = self._choose(traffic, key.org, user, request.conversation)
        choices: list[tuple[str, Arm]] = [(version, arm), (traffic.incumbent, "incumbent"), (traffic.previous, "incumbent")]
        trouble = "none is named"
        for version, arm in dict.fromkeys(choice for choice in choices if choice[0]):
            if self._bad.get(version, 0.0) > time.monotonic():
                continue
            try:
                draft = await self._generate(version, self._request(prompt))
            except VersionError as error:
                trouble = str(error)
                self._bad[version] = time.monotonic() + _BAD_S
                self._writer.count("version_unusable")
                continue
            self._hold(key.org, user, request.conversation, Lease(version, arm, len(self._forced)))
            return draft, arm
        raise EngineError(f"no version can serve ({trouble}): set traffic to a version that `keepgrad versions` lists as whole")

    def _request(self, prompt: Prompt) -> EngineRequest:
        return EngineRequest(prompt_ids=prompt.ids, versions=[], seed=prompt.seed, sampling=prompt.sampling, healed=prompt.healed)

    async def _generate(self, version: str, request: EngineRequest) -> Draft:
        draft = (await self._engine.generate(msgspec.structs.replace(request, versions=[version])))[0]
        if len(draft.completion_ids) != len(draft.logprobs):
            self._writer.count("length_mismatch")
            raise EngineError(f"the engine gave {len(draft.completion_ids)} tokens but {len(draft.logprobs)} log-probs: nothing was served")
        return draft

    def _traffic(self) -> Traffic:
        """The record in force. Raises EngineError while there is none."""
        traffic = self._ledger.traffic()
        if traffic is None:
            raise EngineError("no version has traffic yet: start `keepgrad cycle run`, or name one with `keepgrad traffic set`")
        if traffic != self._seen:
            self._forced = [record.at_ms for record in self._ledger.traffic_history() if record.force]
            self._seen = traffic
        return traffic

    def _choose(self, traffic: Traffic, org: str, user: str, conversation: str) -> tuple[str, Arm]:
        """The version and arm of a conversation: its lease if that holds, else by the user's hash.

        A lease ends with a forced record made after it (a rollback), and when its version is named no more.
        """
        wanted = assign(traffic, user)
        lease = self._leases.get((org, user, conversation)) or self._stored_lease(org, user, conversation)
        if lease is None or traffic.force or lease.forced < len(self._forced) or lease.version not in named(traffic):
            chosen = wanted
        else:
            chosen = (lease.version, wanted[1] if lease.version == wanted[0] else lease.arm)
        self._hold(org, user, conversation, Lease(*chosen, len(self._forced)))
        return chosen

    def _stored_lease(self, org: str, user: str, conversation: str) -> Lease | None:
        last = self._ledger.last_of_conversation(conversation, org)
        if last is None or last.user != user:
            return None
        return Lease(last.version, last.arm, sum(at_ms < last.created_ms for at_ms in self._forced))

    def _hold(self, org: str, user: str, conversation: str, lease: Lease) -> None:
        self._leases[org, user, conversation] = lease
        self._leases.move_to_end((org, user, conversation))
        if len(self._leases) > _LEASES:
            self._leases.popitem(last=False)


def _seed(name: str) -> int:
    """A sampling seed from a generation's id: asked again, the same draw."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") & 0x7FFF_FFFF


def _record(
    key: Key, request: TabRequest, name: str, prompt: Prompt, draft: Draft, arm: Arm, created_ms: int, latency_ms: float
) -> tuple[Generation, Tokens]:
    """What the ledger keeps of an answer: at consent `metadata` no text, no path and no token (P7)."""
    code = key.consent == "code"
    generation = Generation(
        id=name,
        kind="tab",
        org=key.org,
        user=user_hash(key.org, key.user),
        key=key.id,
        conversation=request.conversation,
        version=draft.version,
        arm=arm,
        consent="code" if code else "metadata",
        seed=prompt.seed,
        sampling=prompt.sampling,
        prompt_tokens=len(prompt.ids),
        completion_tokens=len(draft.completion_ids),
        verdict=draft.verdict,
        verdict_logprob=draft.verdict_logprob,
        show_probability=draft.show_probability,
        finish=draft.finish,
        text=draft.text if code else "",
        path=request.path if code else "",
        client_ms=request.at_ms,
        created_ms=created_ms,
        latency_ms=latency_ms,
        healed=prompt.healed,
        cut=draft.cut if code else 0,
    )
    if not code:
        return generation, Tokens(name, [], [], [], [], [])
    return generation, Tokens(name, prompt.ids, draft.completion_ids, draft.logprobs, draft.cuts, draft.features)
