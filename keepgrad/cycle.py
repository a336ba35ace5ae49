"""The durable loop: collect, score, audit, train, gate, canary, settle, again and again, on DBOS with a SQLite database of its own.

    collect   a window of generations of the incumbent, closed once their outcomes are known
    score     outcome and reward of each generation of the window
    audit     the books balance, or the cycle ends (P1)
    train     one on-policy step from the incumbent to a candidate
    gate      candidate against incumbent on held-out contexts (P6)
    canary    the candidate with a share of the users (P6)
    settle    promote, or put everything back as it was

Each step is finished at most once: DBOS keeps its result, and so does the ledger, in the row that says how long it took. A step that was
cut off runs again from its start, and whatever it had written (window, scores, version, verdicts, traffic) is found by its name and not
written again. What a step cannot do is a reason to end the cycle, kept as its result under `stop`; the incumbent keeps serving.

A step's name carries a version (`train:v1`), which changes with its meaning, so that no stored result is taken for another meaning.
"""

import asyncio
import fcntl
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import sqlalchemy
from dbos import DBOS, DBOSConfig, SetWorkflowID

from keepgrad.audit import audit
from keepgrad.config import Config
from keepgrad.errors import ConfigError, EngineError, KeepgradError, LedgerError
from keepgrad.ledger import Ledger
from keepgrad.outcomes.episode import outcome
from keepgrad.policy.client import EngineClient
from keepgrad.policy.prompt import Prompter
from keepgrad.policy.versions import Store
from keepgrad.records import Draft, EngineRequest, GateVerdict, Generation, Outcome, Sample, Sampling, Score, Traffic, Version, Window
from keepgrad.release import canary, suite
from keepgrad.release.gate import gate
from keepgrad.reward import spec as specs
from keepgrad.reward.score import samples, score

if TYPE_CHECKING:
    from keepgrad.train.worker import Worker

STEPS = {"collect": "v1", "score": "v1", "audit": "v1", "train": "v1", "gate": "v1", "canary": "v1", "settle": "v1"}
"""The seven steps, in order, each with the version of its meaning."""
SUITE = "suite.jsonl"
DATABASE = "dbos.sqlite"
_LOCK = "cycle.lock"
_POLL_S = 0.2
_POLL_COST = 10.0
"""Looking at the books again waits at least so many times as long as looking took: a tenth of one core at most."""
_CARRIED = 2
"""Windows, this one among them, that may give samples to one batch: what a rejected candidate learned from is used again, not for ever."""
_REMEMBERED = 4
"""Windows back that are searched for conversations still under way."""
_T = TypeVar("_T")

Facts = dict[str, Any]
"""What a step found, as JSON values; `stop` says why the cycle ends with it."""


def run(config: Config, cycles: int = 0, tell: Callable[[Facts], None] = lambda _: None, minutes: float = 0.0) -> list[Facts]:
    """Run `cycles` cycles, 0: until interrupted; one that was cut off is finished first and counts. Returns one row per cycle.

    With `minutes`, no cycle begins that would not be over by then if it took as long as those before it did on average; one always begins.
    `tell` hears each row as soon as its cycle is finished. Raises ConfigError if another process runs cycles on this data folder.
    """
    rows: list[Facts] = []
    began = time.monotonic()
    with _durable(config) as (loop, finish):
        while not cycles or len(rows) < cycles:
            spent = time.monotonic() - began
            if minutes and rows and spent * (len(rows) + 1) / len(rows) > 60 * minutes:
                break
            rows.append(finish(loop.unfinished() or loop.next_name()))
            tell(rows[-1])
    return rows


def resume(config: Config) -> list[Facts]:
    """Finish the cycle that was cut off; nothing if there is none."""
    with _durable(config) as (loop, finish):
        name = loop.unfinished()
        return [finish(name)] if name else []


def status(config: Config) -> Facts:
    """Where the loop is, from the ledger alone: the running cycle and stage, traffic, and a row per cycle."""
    ledger = Ledger.open(config.root)
    try:
        loop = Loop(config, ledger)
        traffic = ledger.traffic()
        return {
            "cycle": loop.unfinished(),
            "stage": ledger.current_stage(),
            "running": _running(config.root),
            "traffic": msgspec.to_builtins(traffic) if traffic else None,
            "cycles": [loop.row(name) for name in loop.names()],
        }
    finally:
        ledger.close()


class Interrupted(Exception):
    """The process was told to end: the step is left as it is, for `resume` to take up again. Neither an error nor an end of the cycle."""


class Budget:
    """The seconds that one step may take, and whether the process is to end; asking is cheap."""

    def __init__(self, stage: str, seconds: float, stop: threading.Event) -> None:
        self._stage, self._seconds, self._end, self._stop = stage, seconds, time.monotonic() + seconds, stop

    def check(self, doing: str = "") -> None:
        """Raises KeepgradError once they are used up, Interrupted once the process is to end."""
        if self._stop.is_set():
            raise Interrupted
        if time.monotonic() > self._end:
            raise KeepgradError(
                f"{self._stage} was not done within its budget of {self._seconds:g} s{f' ({doing})' if doing else ''}, so the cycle ends "
                f"and the incumbent keeps serving: raise cycle.{self._stage}_s, or see what held it up"
            )

    def pause(self, seconds: float = _POLL_S) -> None:
        """Sleep, less if the process is to end."""
        self._stop.wait(seconds)

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end, asking now and then. Raises as `check` does, and what the coroutine raises."""

        async def watched() -> _T:
            task = asyncio.ensure_future(work)
            try:
                while not task.done():
                    await asyncio.wait([task], timeout=_POLL_S)
                    self.check("waiting for the engine")
                return task.result()
            finally:
                task.cancel()

        return asyncio.run(watched())


class Loop:
    """The seven steps over one data folder. Every step may be cut off at any instruction and run again."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config, self.ledger = config, ledger
        self.store = Store(config.root)
        self.spec = specs.load(config.reward.spec)
        self.stop = threading.Event()
        self._worker: Worker | None = None

    # ---- names and rows

    def names(self) -> list[str]:
        """All cycles that began, oldest first."""
        return list(dict.fromkeys(row["cycle"] for row in self.ledger.stages()))

    def next_name(self) -> str:
        """The name of the cycle after the last one."""
        return f"c-{_number(self.names()[-1]) + 1 if self.names() else 1:06d}"

    def unfinished(self) -> str:
        """The cycle that was cut off, or an empty string: the last one, if it did not settle."""
        names = self.names()
        return names[-1] if names and self.finished(names[-1], "settle") is None else ""

    def finished(self, cycle: str, stage: str) -> Facts | None:
        """What a finished step found, or None."""
        for row in self.ledger.stages():
            if row["cycle"] == cycle and row["stage"] == stage and row["finished"]:
                found: Facts = row["counts"]
                return found
        return None

    def row(self, cycle: str) -> Facts:
        """One cycle for people: how it ended, why, and seconds and counts by stage."""
        stages = {row["stage"]: row for row in self.ledger.stages() if row["cycle"] == cycle and row["finished"]}
        settled = stages["settle"]["counts"] if "settle" in stages else {}
        return {
            "cycle": cycle,
            "decision": settled.get("decision", "running"),
            "version": settled.get("version", ""),
            "reason": settled.get("reason", ""),
            "seconds": {stage: row["seconds"] for stage, row in stages.items()},
            "counts": {stage: row["counts"] for stage, row in stages.items()},
        }

    # ---- the workflow

    def cycle(self, name: str) -> Facts:
        """One cycle, step by step; the body of the durable workflow, so it does nothing but call steps."""
        facts: Facts = {}
        for stage in list(STEPS)[:-1]:
            facts[stage] = DBOS.run_step({"name": f"{stage}:{STEPS[stage]}"}, self.step, name, stage, facts)
            if "stop" in facts[stage]:
                break
        facts["settle"] = DBOS.run_step({"name": f"settle:{STEPS['settle']}"}, self.step, name, "settle", facts)
        return facts

    def step(self, name: str, stage: str, facts: Facts) -> Facts:
        """One step, unless the ledger has it already. Every reason not to go on becomes `stop`; what the ledger cannot write is raised."""
        done = self.finished(name, stage)
        if done is not None:
            return done
        began = time.monotonic()
        self.ledger.start_stage(name, stage)
        try:
            found: Facts = getattr(self, stage)(name, facts, Budget(stage, getattr(self.config.cycle, f"{stage}_s"), self.stop))
        except (KeepgradError, OSError) as error:
            found = {"stop": str(error)}
        self.ledger.put_stage(name, stage, time.monotonic() - began, found)
        return found

    # ---- the steps

    def collect(self, name: str, facts: Facts, budget: Budget) -> Facts:
        """Close a window: `cycle.window` generations of the incumbent since the last one, and whatever else came in between."""
        window = self._window(f"w-{name[2:]}")
        if window is None:
            self._clear_canary(f"{name}: no cycle in progress owned it")
            first = max((window.last_seq for window in self.ledger.windows()), default=0) + 1
            last = self._fill(first, budget)
            self.ledger.start_stage(name, "mature")  # for whoever watches: the window is full, only its outcomes are waited for
            self._mature([generation for _, generation in self.ledger.generations(first, last)], budget)
            window = Window(id=f"w-{name[2:]}", first_seq=first, last_seq=last, closed_ms=_now_ms())
            self.ledger.put_window(window)
        return {
            "window": window.id,
            "first_seq": window.first_seq,
            "last_seq": window.last_seq,
            "generations": window.last_seq - window.first_seq + 1,
            "incumbent": self.serving().incumbent,
        }

    def score(self, name: str, facts: Facts, budget: Budget) -> Facts:
        """Outcome and reward of each generation of the window, and of the last windows' that had none yet."""
        window = facts["collect"]["window"]
        if not self.ledger.scores(window):
            rows = self.ledger.generations(facts["collect"]["first_seq"], facts["collect"]["last_seq"])
            scored = self._score([generation for _, generation in rows] + self._late(window))
            budget.check(f"{len(rows)} generations")
            self.ledger.put_scores(window, [found for _, _, found in scored])
        places = Counter[str](found.place for found in self.ledger.scores(window))
        return {"scored": places.total(), **places}

    def audit(self, name: str, facts: Facts, budget: Budget) -> Facts:
        """Conservation over the window: every generation in exactly one place."""
        report = audit(self.ledger, self.spec, facts["collect"]["first_seq"], facts["collect"]["last_seq"])
        found: Facts = {"generations": report.generations, "problems": len(report.problems), "balanced": report.balanced}
        if not report.balanced:
            first = report.problems[0] if report.problems else {"generation": "", "problem": "the counts do not add up"}
            found["stop"] = (
                f"the books of {facts['collect']['window']} do not balance ({len(report.problems)} problems, the first: "
                f"{first['generation']} {first['problem']}), so nothing is trained on it: see `keepgrad audit`"
            )
        budget.check()
        return found

    def train(self, name: str, facts: Facts, budget: Budget) -> Facts:
        """One step from the incumbent; the candidate and what it was trained on enter the ledger in one transaction (P4)."""
        window, incumbent = facts["collect"]["window"], facts["collect"]["incumbent"]
        published = next((version for version in self.ledger.versions() if version.window == window), None)
        scratch = self._scratch(name)
        if published is None:
            batch = self._batch(window, incumbent, scratch, budget)
            if not batch:
                raise KeepgradError(
                    f"{window} has no rewarded generation to train on, so the cycle ends: see `keepgrad audit` for where they went"
                )
            published, health = self._learn(incumbent, batch, window, scratch, budget)
            (scratch / "health.json").write_bytes(msgspec.json.encode(health))
            self.ledger.publish(published, [sample.generation for sample in batch])
        health = msgspec.json.decode((scratch / "health.json").read_bytes()) if (scratch / "health.json").exists() else {}
        return {"version": published.id, "parent": published.parent, "samples": len(self.ledger.trained(published.id)), "health": health}

    def gate(self, name: str, facts: Facts, budget: Budget) -> Facts:
        """The offline verdict on the candidate."""
        candidate, incumbent = facts["train"]["version"], facts["collect"]["incumbent"]
        verdict = self._verdict(f"{name}-gate")
        if verdict is None:
            turn, seed = _number(name), self.config.seed + _number(name)
            contexts = suite.rotate(suite.load(self.config.root / SUITE), self.config.release.gate_contexts, turn - 1, self.config.seed)
            drafts = budget.wait(self._drafts(contexts, [candidate, incumbent], seed))
            verdict = gate(contexts, drafts, candidate, incumbent, self.config.release, self.spec.tau, seed, f"{name}-gate", _now_ms())
            self.ledger.put_verdict(verdict)
        found: Facts = {"verdict": verdict.id, "decision": verdict.decision, "contexts": verdict.contexts, "reason": verdict.reason}
        return found if verdict.decision == "pass" else found | {"stop": f"the gate failed {candidate}: {verdict.reason}"}

    def canary(self, name: str, facts: Facts, budget: Budget) -> Facts:
        """The online verdict: the candidate gets its share of users until a look decides."""
        candidate, release = facts["train"]["version"], self.config.release
        traffic = self._open_canary(name, candidate, facts["collect"]["incumbent"], budget)
        before = self._past(facts["collect"]["window"], traffic.incumbent)
        first = facts["collect"]["last_seq"] + 1
        verdict: GateVerdict | None = None
        for look, size in enumerate(_looks(release.canary_min, release.canary_max)):
            verdict = self._verdict(f"{name}-canary-{look}")
            if verdict is None:
                served = self._served(first, traffic, size, budget)
                self._mature(served, budget)
                scored = [(generation, found) for generation, _, found in self._score(served)]
                verdict = canary.decide(scored, before, traffic, release, look, f"{name}-canary-{look}", _now_ms())
                self.ledger.put_verdict(verdict)
            if verdict.decision != "extend":
                break
        assert verdict is not None  # there is always a look
        found: Facts = {"verdict": verdict.id, "decision": verdict.decision, "opportunities": verdict.contexts, "reason": verdict.reason}
        return found if verdict.decision == "pass" else found | {"stop": f"the canary failed {candidate}: {verdict.reason}"}

    def settle(self, name: str, facts: Facts, budget: Budget) -> Facts:
        """Promote the candidate with one traffic record, or end its canary with one; a rejected candidate leaves nothing in service."""
        candidate = facts.get("train", {}).get("version", "")
        reason = next((found["stop"] for found in facts.values() if "stop" in found), "")
        now = self.ledger.traffic()
        if reason or now is None:
            self._clear_canary(f"{name}: {reason}", candidate)
            if candidate:
                self._let_go(candidate, budget)
            decision = "rejected" if candidate else "stopped"
        elif now.incumbent == candidate:
            decision = "promoted"
        elif now.canary == candidate:
            self.ledger.put_traffic(
                Traffic(
                    incumbent=candidate,
                    previous=now.incumbent,
                    canary="",
                    canary_share=0.0,
                    holdback=now.holdback,
                    holdback_share=now.holdback_share,
                    force=False,
                    reason=f"{name}: promoted",
                    at_ms=_now_ms(),
                )
            )
            decision = "promoted"
        else:
            decision, reason = "rejected", f"traffic was set by hand during the canary ({now.reason}), and stays as it was set"
        shutil.rmtree(self._scratch(name), ignore_errors=True)
        return {"decision": decision, "version": candidate, "reason": reason or facts["canary"]["reason"]}

    # ---- collect

    def _fill(self, first: int, budget: Budget) -> int:
        """Wait for `cycle.window` generations of the incumbent from `first` on that may be learned from; the last one's number."""
        incumbent, at, count, wanted = "", first, 0, self.config.cycle.window
        while True:
            serving = self.serving().incumbent
            if serving != incumbent:
                incumbent, at, count = serving, first, 0
            for seq, generation in self.ledger.generations(at):
                at = seq + 1
                count += generation.version == incumbent and generation.consent == "code"
                if count == wanted:
                    return seq
            budget.check(f"{count} of {wanted} generations of {incumbent} came")
            budget.pause()

    def _mature(self, generations: Sequence[Generation], budget: Budget) -> None:
        """Wait until all of them are settled in the books, `cycle.mature_s` at most."""
        end, waiting = time.monotonic() + self.config.cycle.mature_s, list(generations)
        while True:
            began = time.monotonic()
            waiting = [generation for generation, _, found in self._score(waiting) if found.place == "pending"]
            if not waiting or time.monotonic() > end:
                return
            budget.check(f"{len(waiting)} of {len(generations)} outcomes are pending")
            budget.pause(max(_POLL_S, _POLL_COST * (time.monotonic() - began)))

    def _score(self, generations: Sequence[Generation]) -> list[tuple[Generation, Outcome, Score]]:
        """Outcome and score of each as of now, by each user's own clock."""
        events, clocks = self.ledger.events([generation.id for generation in generations]), self.ledger.user_clocks()
        rows = []
        for generation in generations:
            found = outcome(generation, events.get(generation.id, []), clocks.get(generation.user, generation.client_ms))
            rows.append((generation, found, score(generation, found, self.spec)))
        return rows

    def _late(self, window: str) -> list[Generation]:
        """Generations of the windows before that were pending when they were scored, as far back as batches reach."""
        late = {}
        for earlier in self._windows_before(window):
            for found in self.ledger.scores(earlier.id):
                late[found.generation] = found.place == "pending"
        return [generation for name, pending in late.items() if pending and (generation := self.ledger.generation(name))]

    # ---- train

    def _batch(self, window: str, incumbent: str, scratch: Path, budget: Budget) -> list[Sample]:
        """The samples of one step, kept in scratch, so that a killed step goes on with the very same ones.

        They are the rewarded generations of this window and of the one before, without those that the incumbent's lineage has learned from:
        what a rejected candidate was trained on is used again.
        """
        file = scratch / "samples.json"
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=list[Sample])
        used = self.ledger.trained_in_lineage(incumbent)
        books = [*self._windows_before(window), self._window(window)]
        places = {found.generation: found for each in books if each for found in self.ledger.scores(each.id)}
        wanted = [name for name, found in places.items() if found.place == "rewarded" and name not in used]
        generations = {name: generation for name in wanted if (generation := self.ledger.generation(name))}
        tokens, events, clocks = self.ledger.tokens(wanted), self.ledger.events(wanted), self.ledger.user_clocks()
        scored = []
        for name, generation in generations.items():
            found = outcome(generation, events.get(name, []), clocks.get(generation.user, generation.client_ms))
            scored.append((generation, tokens[name], found, places[name]))
        batch = samples(scored, self.spec, self.config.train, budget.wait(self._ask(self._prompter)))
        scratch.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(batch))
        part.replace(file)
        return batch

    def _learn(self, parent: str, batch: Sequence[Sample], window: str, scratch: Path, budget: Budget) -> tuple[Version, Facts]:
        # The only place where the cycle needs torch: a cycle that was cut off elsewhere goes on without waiting for its import.
        from keepgrad.train.worker import Worker

        train = self.config.train
        self._worker = self._worker or Worker(self.config, self.store)
        seed = self.config.seed * 1_000_003 + int(window[2:])
        return self._worker.run(
            parent,
            batch,
            window,
            self.spec,
            seed,
            scratch,
            lambda done, total: budget.check(f"{done} of {total} minibatches"),
            (lambda version: budget.wait(self._ask(lambda engine: self._redraft(engine, version, batch)))) if train.redrafts else None,
        )

    async def _redraft(self, engine: EngineClient, version: str, batch: Sequence[Sample]) -> dict[str, Draft]:
        """Drafts of a version that nobody is served yet, for prompts from all over the batch, with the luck that they were served with."""
        chosen = batch[:: max(len(batch) // self.config.train.redrafts, 1)][: self.config.train.redrafts]
        requests = []
        for sample in chosen:
            served = self.ledger.generation(sample.generation)
            assert served is not None  # its sample was made from it
            sampling = msgspec.structs.replace(served.sampling, explore=False)
            requests.append(EngineRequest(sample.prompt_ids, [version], served.seed, sampling, served.healed))
        try:
            drafts = await engine.generate_all(requests)
        finally:
            with suppress(EngineError):
                await engine.unload(version)
        return {sample.generation: draft for sample, (draft,) in zip(chosen, drafts, strict=True)}

    # ---- gate and canary

    async def _drafts(self, contexts: Sequence[suite.Context], versions: Sequence[str], seed: int) -> dict[str, list[Draft]]:
        """Each version's drafts, served at the cut: what users would get, without the exploration that training traffic has."""
        model = self.config.model
        sampling = Sampling(temperature=model.temperature, max_tokens=model.max_tokens, explore=False)

        async def draft(engine: EngineClient) -> dict[str, list[Draft]]:
            prompter = await self._prompter(engine)
            return await suite.draft(engine, prompter, contexts, versions, sampling, seed, context_tokens=model.context_tokens)

        return await self._ask(draft)

    def _open_canary(self, name: str, candidate: str, incumbent: str, budget: Budget) -> Traffic:
        """The traffic record under which the candidate is tried; put once."""
        now = self.serving()
        if now.canary == candidate:
            return now
        if now.incumbent != incumbent or any(record.canary == candidate for record in self.ledger.traffic_history()):
            raise self._by_hand(now)
        budget.wait(self._ask(lambda engine: engine.load(candidate)))
        share = min(self.config.release.canary_share, 1 - now.holdback_share)
        self.ledger.put_traffic(
            msgspec.structs.replace(now, canary=candidate, canary_share=share, force=False, reason=f"{name}: canary", at_ms=_now_ms())
        )
        return self.serving()

    def _served(self, first: int, traffic: Traffic, size: int, budget: Budget) -> list[Generation]:
        """Wait until the canary has served `size` opportunities; all generations of conversations that began with it or after it.

        A conversation that was under way keeps its version, whatever arm its user is in now: counting it would make the canary's arm look
        too small until every conversation has ended.
        """
        before = self.ledger.generations(max(first - _REMEMBERED * self.config.cycle.window, 1))
        under_way = {generation.conversation for _, generation in before if generation.created_ms < traffic.at_ms}
        served: list[Generation] = []
        at, count = first, 0
        while True:
            for seq, generation in self.ledger.generations(at):
                at = seq + 1
                if generation.created_ms < traffic.at_ms or generation.conversation in under_way:
                    continue
                served.append(generation)
                count += canary.of_canary(generation, traffic)
                if count == size:
                    return served
            now = self.serving()
            if (now.canary, now.incumbent) != (traffic.canary, traffic.incumbent):
                raise self._by_hand(now)
            budget.check(f"the canary served {count} of {size} opportunities")
            budget.pause()

    def _past(self, window: str, incumbent: str) -> dict[str, float]:
        """Mean reward per opportunity of each user under the incumbent in the window before the canary."""
        rows = []
        for found in self.ledger.scores(window):
            generation = self.ledger.generation(found.generation)
            if generation and generation.version == incumbent:
                rows.append((generation, found))
        return canary.user_means(rows)

    def _verdict(self, id: str) -> GateVerdict | None:
        return next((verdict for verdict in self.ledger.verdicts() if verdict.id == id), None)

    def _by_hand(self, now: Traffic) -> KeepgradError:
        return KeepgradError(f"traffic was set by hand during the cycle ({now.reason}), so the cycle ends and traffic stays as it was set")

    # ---- settle

    def _clear_canary(self, reason: str, candidate: str = "") -> None:
        """End a canary (this candidate's, or whichever an unfinished cycle left) with one record; open conversations leave it at once."""
        now = self.ledger.traffic()
        if now and now.canary and candidate in ("", now.canary):
            self.ledger.put_traffic(msgspec.structs.replace(now, canary="", canary_share=0.0, force=True, reason=reason, at_ms=_now_ms()))

    def _let_go(self, candidate: str, budget: Budget) -> None:
        with suppress(EngineError):  # an engine that is away has nothing loaded; one that comes back loads what traffic names
            budget.wait(self._ask(lambda engine: engine.unload(candidate), patience_s=1.0))

    # ---- small things

    def _window(self, id: str) -> Window | None:
        return next((window for window in self.ledger.windows() if window.id == id), None)

    def _windows_before(self, id: str) -> list[Window]:
        """The windows before this one that may still give samples: as far back as batches reach, and only if their books balanced."""
        before = [window for window in self.ledger.windows() if window.id < id][-(_CARRIED - 1) :]
        return [window for window in before if (self.finished(f"c-{window.id[2:]}", "audit") or {}).get("balanced")]

    def serving(self) -> Traffic:
        """The traffic record in force. Raises ConfigError while there is none."""
        traffic = self.ledger.traffic()
        if traffic is None:
            raise ConfigError(f"no version has traffic in {self.config.root}: make the data folder ready with `keepgrad init`")
        return traffic

    def _scratch(self, name: str) -> Path:
        return self.config.root / "scratch" / name

    async def _ask(self, question: Callable[[EngineClient], Coroutine[Any, Any, _T]], patience_s: float = 30.0) -> _T:
        engine = EngineClient(f"http://127.0.0.1:{self.config.server.engine_port}", patience_s=patience_s)
        try:
            return await question(engine)
        finally:
            await engine.close()

    async def _prompter(self, engine: EngineClient) -> Prompter:
        """Of the configured model folder, or of the one where the engine found the model of that name; no torch either way."""
        configured = Path(self.config.model.path).expanduser()
        if (configured / "tokenizer.json").exists():
            return Prompter(configured)
        folder = (await engine.status()).get("folder")
        if not isinstance(folder, str):
            raise EngineError("the engine does not say which model folder it serves: start an engine of this release")
        return Prompter(Path(folder))


def _looks(least: int, most: int) -> list[int]:
    """Opportunities at which the canary is looked at: half of `least` (only harm can end it there), `least`, and on by halves to `most`."""
    step = max(1, least // 2)
    return [*range(step, most, step), most] if most > step else [most]


def _number(cycle: str) -> int:
    return int(cycle[2:])


def _now_ms() -> int:
    return int(time.time() * 1000)


@contextmanager
def _durable(config: Config) -> Iterator[tuple[Loop, Callable[[str], Facts]]]:
    """The loop on a running DBOS, and a function that runs the cycle of a name to its end, from where it was if it had begun."""
    config.root.mkdir(parents=True, exist_ok=True)
    with _alone(config.root):
        ledger = Ledger.open(config.root)
        loop = Loop(config, ledger)
        try:
            loop.serving()
            DBOS(config=_settings(config.root))

            @DBOS.workflow(name="cycle:v1", max_recovery_attempts=None)
            def cycle(name: str) -> Facts:
                return loop.cycle(name)

            def finish(name: str) -> Facts:
                return _finish(loop, cycle, name)

            DBOS.launch()
            yield loop, finish
        finally:
            loop.stop.set()
            DBOS.destroy(destroy_registry=True)
            ledger.close()


def _finish(loop: Loop, cycle: Callable[[str], Facts], name: str) -> Facts:
    known = DBOS.get_workflow_status(name)
    if known is None:
        with SetWorkflowID(name):
            handle = DBOS.start_workflow(cycle, name)
    elif known.status in ("PENDING", "ENQUEUED", "SUCCESS"):  # launching DBOS has set off what was pending
        handle = DBOS.retrieve_workflow(name)
    else:  # it could not write to the ledger; what it had written there is found again
        handle = DBOS.rewind_workflow(name)
    handle.get_result(polling_interval_sec=_POLL_S)
    if loop.finished(name, "settle") is None:
        raise LedgerError(
            f"{loop.config.root / DATABASE} says that {name} is finished and the ledger beside it does not, so one of them is not of this "
            f"folder: put back the one that was replaced, or move {DATABASE} away"
        )
    return loop.row(name)


def _settings(root: Path) -> DBOSConfig:
    """DBOS on a file of its own, silent, with nothing that calls out or listens; the names are fixed so that any process may resume."""
    url = sqlalchemy.URL.create("sqlite", database=str((root / DATABASE).absolute()))
    return DBOSConfig(
        name="keepgrad",
        system_database_url=url.render_as_string(hide_password=False),
        application_version="cycle",
        executor_id="local",
        enable_otlp=False,
        log_level="CRITICAL",
        console_log_level="CRITICAL",
    )


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the data folder's lock; the system lets go of it however the process ends. Raises ConfigError if another has it."""
    with (root / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process runs cycles on {root}: stop that one, or set server.data to another folder") from None
        yield


def _running(root: Path) -> bool:
    try:
        with _alone(root):
            return False
    except ConfigError:
        return True
