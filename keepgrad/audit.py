"""Do the books balance (P1)? Every generation served is in exactly one place, and nothing that the ledger once held has been taken out.

    a generation row       its sequence number leaves a gap; its arrays, score, training or events name it
    a token row            every generation has one, as long as it was served
    a score row            a scored window has one for each of its generations
    an event               its number leaves a gap; a score says how many it knew, and an outcome only gets stronger with more of them
    a score's content      outcomes and rewards are replayed from the ledger and must come out the same
    a training row         a generation is trained on once per lineage, and only with a reward
    a reason               one that the policy itself can bring about may not exclude or censor

The audit reads and never writes. Each generation in trouble is one problem, however many things tell of it.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from keepgrad.errors import AuditError, LedgerError
from keepgrad.ledger import Ledger
from keepgrad.outcomes.episode import REASONS, outcome
from keepgrad.records import Event, Generation, Score, Window
from keepgrad.reward.score import score
from keepgrad.reward.spec import Spec

_CHUNK = 2_000
"""Generations whose arrays and events are held at a time."""
_NAMED = 20
"""Missing events that are named one by one: there may be thousands."""
_NEVER = 2**62
"""A time, in ms, that every clock reaches before it."""
_SAME = 1e-9
"""Rewards closer than this are the same: sums may be taken in another order on another machine."""


class Problems:
    """What is wrong, by generation id, "" where none can be named."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, generation: str, what: Sequence[str]) -> None:
        """Note each of `what`, once."""
        for one in what:
            noted = self._found.setdefault(generation, [])
            if one not in noted:
                noted.append(one)

    def rows(self) -> list[dict[str, str]]:
        """One row per generation, by id."""
        return [{"generation": name, "problem": "; ".join(what)} for name, what in sorted(self._found.items())]


class Report(msgspec.Struct, frozen=True):
    """The books of a range of generations. Made by `audit`, read by the cycle, the command line and the report.

    >>> Report(generations=512, rewarded=498, pending=3, censored={"closed": 2}, excluded={"not_drawn": 9}, balanced=True, problems=[])
    """

    generations: int
    """Served in the range, by sequence numbers given, also those whose row is missing."""
    rewarded: int
    pending: int
    censored: dict[str, int]
    """By reason."""
    excluded: dict[str, int]
    balanced: bool
    """The places add up to the generations, and there is no problem."""
    problems: list[dict[str, str]]
    """{"generation": id or "", "problem": what is wrong with it}, one per generation, by id."""

    @property
    def exit_code(self) -> int:
        """0 if balanced, else that of AuditError."""
        return 0 if self.balanced else AuditError.exit_code


def audit(ledger: Ledger, spec: Spec, first_seq: int = 1, last_seq: int | None = None) -> Report:
    """Audit the generations from `first_seq` to `last_seq` (default: the last one served), both included."""
    served = ledger.last_seq()
    last = served if last_seq is None else min(last_seq, served)
    rows = ledger.generations(first_seq, last)
    expected = max(last - first_seq + 1, 0)
    problems = Problems()
    # Later windows count too: a generation that was pending in its own is scored again in the next.
    stored = _stored(ledger, [window for window in ledger.windows() if window.last_seq >= first_seq])
    trained = {version.id: ledger.trained(version.id) for version in ledger.versions()}
    gaps = sorted(set(range(first_seq, last + 1)) - {seq for seq, _ in rows})
    _check_missing(ledger, gaps, first_seq <= 1 and last == served, stored, trained, problems)
    _check_tokens(ledger, [generation for _, generation in rows], problems)
    _check_windows(ledger, rows, stored, problems)
    _check_trained(ledger, {generation.id for _, generation in rows}, stored, trained, problems)
    places = _replay(ledger, spec, [generation for _, generation in rows], stored, problems)
    by_place = {place: _reasons(places, place) for place in ("rewarded", "pending", "censored", "excluded")}
    total = sum(places.values())
    if total != expected and not problems.rows():
        problems.add("", [f"{expected} generations were served but {total} are in the books"])
    if first_seq <= 1 and last == served and not problems.rows():  # else a generation that misses it may have named it already
        problems.add("", [f"event number {number} was acknowledged and is gone" for number in ledger.missing_events()[:_NAMED]])
    return Report(
        generations=expected,
        rewarded=sum(by_place["rewarded"].values()),
        pending=sum(by_place["pending"].values()),
        censored=by_place["censored"],
        excluded=by_place["excluded"],
        balanced=total == expected and not problems.rows(),
        problems=problems.rows(),
    )


def require(report: Report) -> None:
    """Raise AuditError, naming the first problem, unless the books balance."""
    if not report.balanced:
        first = report.problems[0] if report.problems else {"generation": "", "problem": "the counts do not add up"}
        raise AuditError(
            f"the books do not balance, {len(report.problems)} problems, the first at generation {first['generation'] or '(none)'}: "
            f"{first['problem']}; see all with `keepgrad audit`"
        )


def _stored(ledger: Ledger, windows: Sequence[Window]) -> dict[str, dict[str, Score]]:
    """Window id to generation id to the score kept for it, oldest window first."""
    return {window.id: {one.generation: one for one in ledger.scores(window.id)} for window in windows}


def _check_missing(
    ledger: Ledger,
    gaps: Sequence[int],
    whole: bool,
    stored: Mapping[str, Mapping[str, Score]],
    trained: Mapping[str, set[str]],
    problems: Problems,
) -> None:
    """Name the generations whose row is gone: each sequence number without a row is one of them, and what refers to it knows its id.

    An event alone proves nothing, for it may have come before its generation; it names one only where a number is missing. On a part of the
    ledger, what is missing elsewhere is not looked for.
    """
    if not gaps and not whole:
        return
    by_event = ledger.event_generations()
    witnesses = {
        "its token arrays": ledger.token_generations(),
        "a score": {name for scores in stored.values() for name in scores},
        "a version trained on it": {name for names in trained.values() for name in names},
    }
    named = set().union(*witnesses.values())
    known = set(ledger.generation_keys(sorted(named | by_event.keys())))
    lost = named - known
    if len(gaps) > len(lost):
        lost |= by_event.keys() - known
    where = f" (sequence number {gaps[0]})" if len(gaps) == 1 else f" (one of the sequence numbers {_some(gaps)})" if gaps else ""
    for name in lost:
        tell = [what for what, names in witnesses.items() if name in names]
        tell += [f"{by_event[name]} events"] if name in by_event else []
        problems.add(name, [f"its row is missing{where}, but the ledger still holds {', '.join(tell)}"])
    if len(gaps) > len(lost):
        problems.add("", [f"{len(gaps) - len(lost)} generations are missing that nothing names, at sequence numbers {_some(gaps)}"])


def _check_tokens(ledger: Ledger, rows: Sequence[Generation], problems: Problems) -> None:
    """Each generation has its arrays, as long as was served (P2)."""
    there = ledger.token_generations()
    for generation in rows:
        if generation.id not in there:
            problems.add(generation.id, ["its token arrays are missing"])
    damaged = ledger.verify_segments()
    if damaged:
        problems.add("", damaged)
        return  # what cannot be read cannot be measured
    for at in range(0, len(rows), _CHUNK):
        part = {generation.id: generation for generation in rows[at : at + _CHUNK]}
        try:
            kept_tokens = ledger.tokens(list(part))
        except LedgerError as error:  # e.g. the row that names a segment is gone: a finding, not a fault of the audit
            problems.add("", [str(error)])
            continue
        for name, tokens in kept_tokens.items():
            wanted = part[name].completion_tokens if part[name].consent == "code" else 0
            if not len(tokens.completion_ids) == len(tokens.logprobs) == wanted:
                kept = f"{len(tokens.completion_ids)} ids and {len(tokens.logprobs)} log-probs"
                problems.add(name, [f"it was served with {wanted} tokens, but {kept} are kept"])


def _check_windows(
    ledger: Ledger, rows: Sequence[tuple[int, Generation]], stored: Mapping[str, Mapping[str, Score]], problems: Problems
) -> None:
    """A window that was scored, or trained on, has a score for each of its generations."""
    used = {version.window for version in ledger.versions()}
    numbers = [seq for seq, _ in rows]
    for window in ledger.windows():
        scores = stored.get(window.id, {})
        inside = [generation for _, generation in rows[bisect_left(numbers, window.first_seq) : bisect_right(numbers, window.last_seq)]]
        if inside and not scores and window.id in used:
            problems.add("", [f"a version was trained on window {window.id}, but none of its scores is there"])
        for generation in inside if scores else []:
            if generation.id not in scores:
                problems.add(generation.id, [f"its score of window {window.id} is missing"])


def _check_trained(
    ledger: Ledger, names: set[str], stored: Mapping[str, Mapping[str, Score]], trained: Mapping[str, set[str]], problems: Problems
) -> None:
    """What was trained on had a reward, and no version and ancestor share a generation (P4)."""
    rewarded = {name for scores in stored.values() for name, one in scores.items() if one.place == "rewarded"}
    for version, mine in trained.items():
        ancestors = set().union(*(trained.get(parent, set()) for parent in ledger.lineage(version)[1:]))
        for name in mine & names:
            if name not in rewarded:
                problems.add(name, [f"version {version} was trained on it, but no score says that it was rewarded"])
            if name in ancestors:
                problems.add(name, [f"version {version} was trained on it, and so was an ancestor"])


def _replay(
    ledger: Ledger, spec: Spec, rows: Sequence[Generation], stored: Mapping[str, Mapping[str, Score]], problems: Problems
) -> Counter[tuple[str, str]]:
    """Score every generation anew and hold it against what was kept; the number of generations by (place, reason)."""
    clocks, places = ledger.user_clocks(), Counter[tuple[str, str]]()
    kept: dict[str, list[tuple[str, Score]]] = {}
    for window, scores in stored.items():
        for name, one in scores.items():
            kept.setdefault(name, []).append((window, one))
    for at in range(0, len(rows), _CHUNK):
        part = rows[at : at + _CHUNK]
        events: dict[str, list[Event]] = ledger.events([generation.id for generation in part])
        for generation in part:
            told = events.get(generation.id, [])
            found = score(generation, outcome(generation, told, clocks.get(generation.user, generation.client_ms)), spec)
            places[found.place, found.reason] += 1
            problems.add(generation.id, _reason_trouble(found))
            # What was kept is held against the outcome with all clocks run out: who takes a user's latest row away turns that clock back.
            final = score(generation, outcome(generation, told, _NEVER), spec)
            for window, one in kept.get(generation.id, []):
                problems.add(generation.id, _kept_trouble(one, final, window))
    return places


def _reason_trouble(found: Score) -> list[str]:
    reason = REASONS.get(found.reason)
    if reason is None:
        return [f"it is {found.place} for a reason nobody knows, {found.reason!r}"]
    if found.place in ("censored", "excluded") and reason.policy_controllable:
        return [f"it is {found.place} for {found.reason!r}, which the policy itself can bring about: vanishing would pay"]
    return [] if found.place == reason.place else [f"it is {found.place} for {found.reason!r}, which belongs to {reason.place}"]


def _kept_trouble(kept: Score, final: Score, window: str) -> list[str]:
    """Hold the score kept in `window` against the final one. Later events may have made it stronger, but nothing weaker, and none fewer."""
    trouble = _reason_trouble(kept)
    if kept.reason not in REASONS or final.reason not in REASONS:
        return trouble
    if final.events < kept.events:
        trouble.append(f"{kept.events - final.events} of the {kept.events} events that window {window} knew are missing")
    elif REASONS[final.reason].strength < REASONS[kept.reason].strength:
        trouble.append(f"window {window} scored it {kept.reason!r}, but what the ledger holds makes it {final.reason!r}")
    elif "abstained" in (kept.reason, final.reason) and kept.reason != final.reason:
        trouble.append(f"window {window} scored it {kept.reason!r}, but it was served as {final.reason!r}")
    made = sum(kept.terms.values())
    if abs(made - kept.reward) > _SAME:
        trouble.append(f"its reward in window {window} is {kept.reward:.6f}, but its terms make {made:.6f}")
    same = kept.spec == final.spec and kept.reason == final.reason and kept.events == final.events
    if same and abs(kept.reward - final.reward) > _SAME:
        trouble.append(f"window {window} gave it {kept.reward:.6f}, replayed it is {final.reward:.6f}")
    return trouble


def _reasons(places: Mapping[tuple[str, str], int], place: str) -> dict[str, int]:
    return {reason: count for (where, reason), count in sorted(places.items()) if where == place}


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers[:10]) + (", ..." if len(numbers) > 10 else "")
