"""P1 on a real ledger: books balance through any interleaving, replay gives the same rewards, and what is taken away by force is named."""

import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepgrad import audit as auditing
from keepgrad.audit import Report, audit
from keepgrad.errors import AuditError
from keepgrad.ledger import Ledger
from keepgrad.outcomes.episode import outcome
from keepgrad.records import Event, Generation, Sampling, Score, Tokens, Version, Window
from keepgrad.reward.score import score
from keepgrad.reward.spec import load

SPEC = load()
T0 = 1_764_400_000_000
KINDS = ("shown", "accepted", "partial", "typed_through", "rejected", "ignored", "not_drawn", "settled", "survival", "closed")


def served(name: str, user: str = "u-1", shown: bool = True, consent: str = "code", asked_s: int = 0) -> tuple[Generation, Tokens]:
    """One generation as the gateway would keep it."""
    code = consent == "code"
    made = {
        "id": name, "kind": "tab", "org": "acme", "user": user, "key": f"k-{user}", "conversation": "c-1", "version": "v-base",
        "arm": "incumbent", "consent": consent, "seed": 7, "sampling": Sampling(), "prompt_tokens": 2, "completion_tokens": 3,
        "verdict": "show" if shown else "silent", "verdict_logprob": -0.1, "show_probability": 0.9, "finish": "stop",
        "text": "return total" if code else "", "path": "", "client_ms": T0 + 1000 * asked_s, "created_ms": T0, "latency_ms": 80.0,
    }  # fmt: skip
    arrays = ([1, 2], [3, 4, 5], [-0.1, -0.2, -0.3], [3], [[0.5]]) if code else ([], [], [], [], [])
    return msgspec.convert(made, Generation), Tokens(name, *arrays)


def told(identity: str, generation: str, kind: str, at_s: float, **more: Any) -> Event:
    return msgspec.convert({"id": identity, "generation": generation, "kind": kind, "at_ms": T0 + int(1000 * at_s), **more}, Event)


def books(ledger: Ledger) -> dict[str, Score]:
    """Generation id to its score now, the way the cycle makes it."""
    rows = [generation for _, generation in ledger.generations()]
    events, clocks = ledger.events([one.id for one in rows]), ledger.user_clocks()
    return {one.id: score(one, outcome(one, events.get(one.id, []), clocks[one.user]), SPEC) for one in rows}


def close_window(ledger: Ledger, number: int) -> None:
    """Close a window over what came since the last one and keep its scores, as the cycle does."""
    first = max((window.last_seq for window in ledger.windows()), default=0) + 1
    last = ledger.last_seq()
    if last >= first:
        window = Window(f"w-{number}", first, last, T0)
        names = {generation.id for _, generation in ledger.generations(first, last)}
        ledger.put_window(window)
        ledger.put_scores(window.id, [one for name, one in books(ledger).items() if name in names])


@contextmanager
def opened(root: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(root)
    try:
        yield ledger
    finally:
        ledger.close()


def check_conserved(report: Report, generations: int) -> None:
    assert report.problems == [] and report.balanced and report.exit_code == 0
    assert report.generations == generations
    assert report.rewarded + report.pending + sum(report.censored.values()) + sum(report.excluded.values()) == generations


# ---- conservation as a property

_event = st.tuples(st.sampled_from(KINDS), st.integers(0, 700), st.integers(0, 14), st.sampled_from(["", "superseded", "expired"]))
_opportunity = st.tuples(
    st.sampled_from(["u-1", "u-2", "u-3"]),
    st.booleans(),
    st.sampled_from(["code", "code", "code", "metadata"]),
    st.integers(0, 900),
    st.lists(_event, max_size=5),
)


def _actions(plan: Sequence[Any]) -> list[Any]:
    """What clients send, in no order yet: generations, events (also before their generation), and some events twice."""
    actions: list[Any] = []
    for at, (user, shown, consent, asked_s, events) in enumerate(plan):
        actions.append(served(f"g-{at}", user, shown, consent, asked_s))
        for number, (kind, after_s, chars, reason) in enumerate(events):
            event = told(f"e-{at}-{number}", f"g-{at}", kind, asked_s + after_s, chars=chars, reason=reason)
            actions += [(event, f"k-{user}")] * (2 if number % 2 else 1)
    return actions


def _perform(ledger: Ledger, actions: Sequence[Any]) -> None:
    for first, second in actions:
        if isinstance(first, Generation):
            ledger.add_generations([(first, second)])
        else:
            ledger.add_events([(first, second)])


@settings(max_examples=25, deadline=None)
@given(st.lists(_opportunity, min_size=1, max_size=4), st.integers(0, 2**32), st.integers(0, 2))
def test_books_balance_at_any_moment_of_any_interleaving_and_replay_the_same(plan: Sequence[Any], luck: int, windows: int) -> None:
    actions = _actions(plan)
    random.Random(luck).shuffle(actions)
    cuts = sorted(random.Random(luck + 1).randint(0, len(actions)) for _ in range(windows))
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as ledger:
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(actions)], strict=True)):
            _perform(ledger, actions[start:stop])
            if number % 2:
                ledger.seal(1)
            check_conserved(audit(ledger, SPEC), ledger.last_seq())
            close_window(ledger, number)
            check_conserved(audit(ledger, SPEC), ledger.last_seq())
        assert ledger.last_seq() == len(plan)
        for window in ledger.windows():
            check_conserved(audit(ledger, SPEC, window.first_seq, window.last_seq), window.last_seq - window.first_seq + 1)
        found = books(ledger)
        random.Random(luck + 2).shuffle(actions)
        with tempfile.TemporaryDirectory() as other, opened(Path(other)) as again:
            _perform(again, actions)
            assert books(again) == found, "the same generations and events in another order must give the same rewards"


@settings(max_examples=12, deadline=None)
@given(st.lists(_opportunity, min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_users_clock_running_on_leaves_only_what_is_known_or_gone(plan: Sequence[Any], luck: int) -> None:
    actions = _actions(plan)
    random.Random(luck).shuffle(actions)
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as ledger:
        _perform(ledger, actions)
        for user in ("u-1", "u-2", "u-3"):
            ledger.add_generations([served(f"late-{user}", user, shown=False, asked_s=5000)])
        report = audit(ledger, SPEC)
        check_conserved(report, len(plan) + 3)
        assert report.pending == 0


def test_events_of_another_key_count_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.add_events([(told("e-1", "g-1", "accepted", 1), "k-intruder"), (told("e-2", "g-1", "shown", 1), "k-u-1")])
        ledger.add_generations([served("g-1"), served("g-2", shown=False, asked_s=900)])
        assert books(ledger)["g-1"].reason == "expired"
        check_conserved(audit(ledger, SPEC), 2)


# ---- deletion by force


def _scored_ledger(root: Path, sealed: bool = False) -> None:
    """Twelve generations of every kind, a scored window over the first ten, a version trained on what was rewarded."""
    with opened(root) as ledger:
        ledger.put_version(_version("v-base", ""))
        for at in range(12):
            name, asked_s = f"g-{at}", 60 * at
            ledger.add_generations([served(name, f"u-{at % 3}", shown=at % 4 != 3, asked_s=asked_s)])
            if at % 4 != 3:
                end = ("accepted", "rejected", "partial")[at % 4]
                kinds = [("shown", 0.3), (end, 2), ("settled", 14), ("survival", 30)]
                events = [told(f"e-{at}-{kind}", name, kind, asked_s + after, chars=6, horizon_s=30) for kind, after in kinds]
                ledger.add_events([(event, f"k-u-{at % 3}") for event in events])
            if at == 9:
                if sealed:
                    ledger.seal(1)
                close_window(ledger, 1)
        rewarded = [one.generation for one in ledger.scores("w-1") if one.place == "rewarded"]
        assert len(rewarded) == 10
        ledger.publish(_version("v-1", "v-base"), rewarded)


def _version(name: str, parent: str, window: str = "w-1") -> Version:
    return Version(name, parent, "m", window if parent else "", SPEC.hash, "0.1.0", 0, {}, T0)


def _force(root: Path, table: str, where: str) -> None:
    """What nobody may do: drop the guard and delete behind the ledger's back."""
    with sqlite3.connect(root / "ledger.sqlite") as raw:
        raw.execute(f"DROP TRIGGER {table}_no_delete")
        assert raw.execute(f"DELETE FROM {table} WHERE {where}").rowcount == 1
    raw.close()


def _names_only(root: Path, generation: str, says: str) -> Report:
    with opened(root) as ledger:
        report = audit(ledger, SPEC)
    assert [problem["generation"] for problem in report.problems] == [generation], report.problems
    assert says in report.problems[0]["problem"]
    assert not report.balanced and report.exit_code == 1 and AuditError.exit_code == 1
    with pytest.raises(AuditError, match=f"1 problems, the first at generation {generation}"):
        auditing.require(report)
    return report


def test_untouched_it_balances(tmp_path: Path) -> None:
    _scored_ledger(tmp_path)
    with opened(tmp_path) as ledger:
        report = audit(ledger, SPEC)
        check_conserved(report, 12)
        auditing.require(report)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("at", [0, 3, 7, 9, 10, 11])
def test_a_deleted_generation_row_is_named(tmp_path: Path, at: int, sealed: bool) -> None:
    _scored_ledger(tmp_path, sealed)
    _force(tmp_path, "generations", f"id = 'g-{at}'")
    report = _names_only(tmp_path, f"g-{at}", f"its row is missing (sequence number {at + 1})")
    assert report.generations == 12 and report.rewarded == 11


@pytest.mark.parametrize(("sealed", "at"), [(False, 0), (False, 11), (True, 0), (True, 11)])
def test_a_deleted_token_row_is_named(tmp_path: Path, sealed: bool, at: int) -> None:
    _scored_ledger(tmp_path, sealed)
    _force(tmp_path, "segment_rows" if sealed and at < 10 else "spool", f"generation = 'g-{at}'")
    _names_only(tmp_path, f"g-{at}", "its token arrays are missing")


@pytest.mark.parametrize("at", [0, 1, 3, 9])
def test_a_deleted_score_row_is_named(tmp_path: Path, at: int) -> None:
    _scored_ledger(tmp_path)
    _force(tmp_path, "scores", f"generation = 'g-{at}'")
    _names_only(tmp_path, f"g-{at}", "its score of window w-1 is missing")


@pytest.mark.parametrize(
    "event", ["0-shown", "0-accepted", "0-settled", "0-survival", "1-rejected", "2-partial", "9-rejected", "9-survival"]
)
def test_a_deleted_event_of_a_scored_generation_is_named(tmp_path: Path, event: str) -> None:
    _scored_ledger(tmp_path)
    _force(tmp_path, "events", f"id = 'e-{event}'")
    _names_only(tmp_path, f"g-{event[0]}", "1 of the 4 events that window w-1 knew are missing")


def test_two_deleted_rows_are_two_problems_and_a_part_without_them_balances(tmp_path: Path) -> None:
    _scored_ledger(tmp_path)
    _force(tmp_path, "generations", "id = 'g-2'")
    with sqlite3.connect(tmp_path / "ledger.sqlite") as raw:
        raw.execute("DELETE FROM generations WHERE id = 'g-8'")
    raw.close()
    with opened(tmp_path) as ledger:
        assert [problem["generation"] for problem in audit(ledger, SPEC).problems] == ["g-2", "g-8"]
        check_conserved(audit(ledger, SPEC, 4, 8), 5)
        assert not audit(ledger, SPEC, 1, 5).balanced


def test_a_generation_that_nothing_names_any_more_is_still_missed(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.add_generations([served(f"g-{at}", shown=False) for at in range(3)])
    _force(tmp_path, "generations", "id = 'g-1'")
    _force(tmp_path, "spool", "generation = 'g-1'")
    with opened(tmp_path) as ledger:
        report = audit(ledger, SPEC)
    assert [problem["generation"] for problem in report.problems] == [""] and "sequence numbers 2" in report.problems[0]["problem"]


def test_an_event_that_waits_for_its_generation_is_no_problem(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.add_generations([served("g-1", shown=False)])
        assert ledger.add_events([(told("e-1", "g-2", "shown", 1), "k-u-1")]) == ["waiting"]
        check_conserved(audit(ledger, SPEC), 1)


# ---- content that was changed, and training that should not have been


def _change(root: Path, window: str, generation: str, **change: Any) -> None:
    with sqlite3.connect(root / "ledger.sqlite") as raw:
        where = (window, generation)
        (payload,) = raw.execute("SELECT payload FROM scores WHERE window = ? AND generation = ?", where).fetchone()
        other = msgspec.structs.replace(msgspec.json.decode(payload, type=Score), **change)
        raw.execute("DROP TRIGGER scores_no_update")
        raw.execute("UPDATE scores SET payload = ? WHERE window = ? AND generation = ?", (msgspec.json.encode(other), *where))
    raw.close()


@pytest.mark.parametrize(
    ("generation", "change", "says"),
    [
        ("g-0", {"reward": 5.0}, "its terms make 0.286585"),
        ("g-0", {"reward": 5.0, "terms": {"accept": 5.0}}, "replayed it is"),
        ("g-1", {"reason": "accepted"}, "scored it 'accepted', but what the ledger holds makes it 'rejected'"),
        ("g-3", {"reason": "closed", "place": "censored"}, "served as 'abstained'"),
        ("g-0", {"reason": "superstition"}, "a reason nobody knows"),
        ("g-3", {"place": "censored"}, "vanishing would pay"),
        ("g-3", {"place": "excluded"}, "vanishing would pay"),
        ("g-0", {"place": "pending"}, "belongs to rewarded"),
    ],
)
def test_a_changed_score_is_named(tmp_path: Path, generation: str, change: dict[str, Any], says: str) -> None:
    _scored_ledger(tmp_path)
    _change(tmp_path, "w-1", generation, **change)
    _names_only(tmp_path, generation, says)


def test_later_events_after_scoring_are_no_problem_but_a_stronger_truth(tmp_path: Path) -> None:
    _scored_ledger(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.add_events([(told("late", "g-1", "accepted", 5000), "k-u-1")])
        check_conserved(audit(ledger, SPEC), 12)
        assert books(ledger)["g-1"].reason == "accepted" and ledger.scores("w-1")[1].reason == "rejected"


def test_training_twice_in_a_line_or_without_a_reward_is_named(tmp_path: Path) -> None:
    _scored_ledger(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.publish(_version("v-2", "v-1", "w-2"), ["g-10"])  # never scored
        ledger.publish(_version("v-3", "v-base"), ["g-0"])  # another line: allowed
    with opened(tmp_path) as ledger:
        problems = audit(ledger, SPEC).problems
    assert [problem["generation"] for problem in problems] == ["g-10"] and "no score says" in problems[0]["problem"]
    with sqlite3.connect(tmp_path / "ledger.sqlite") as raw:
        raw.execute("INSERT INTO trained (generation, version) VALUES ('g-0', 'v-2')")
    raw.close()
    with opened(tmp_path) as ledger:
        problems = audit(ledger, SPEC).problems
    assert [problem["generation"] for problem in problems] == ["g-0", "g-10"] and "so was an ancestor" in problems[0]["problem"]


def test_tokens_of_another_length_and_a_damaged_segment_are_found(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        generation, tokens = served("g-1", shown=False)
        ledger.add_generations([(generation, msgspec.structs.replace(tokens, logprobs=[-0.1])), served("g-2", shown=False)])
    _names_only(tmp_path, "g-1", "3 ids and 1 log-probs")
    with opened(tmp_path) as ledger:
        ledger.seal(1)
        file = next((tmp_path / "segments").glob("*.parquet"))
        file.write_bytes(file.read_bytes()[:-40])
        report = audit(ledger, SPEC)
    assert not report.balanced and "damaged" in report.problems[0]["problem"]


def test_a_segment_that_the_ledger_no_longer_names_is_found(tmp_path: Path) -> None:
    _scored_ledger(tmp_path, sealed=True)
    _force(tmp_path, "segments", "seq = 1")
    with opened(tmp_path) as ledger:
        report = audit(ledger, SPEC)
    assert not report.balanced and "segment 1" in report.problems[0]["problem"]


def _command(folder: Path) -> subprocess.CompletedProcess[str]:
    """`keepgrad audit --json` in a process of its own, in that folder."""
    command = [sys.executable, "-m", "keepgrad", "audit", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_says_so_and_exits_1(tmp_path: Path) -> None:
    _scored_ledger(tmp_path / "data")
    (tmp_path / "keepgrad.toml").write_text(f"[server]\ndata = {json.dumps(str(tmp_path / 'data'))}\n")
    fine = _command(tmp_path)
    assert fine.returncode == 0, fine.stderr
    assert json.loads(fine.stdout)["balanced"] is True
    _force(tmp_path / "data", "generations", "id = 'g-5'")
    broken = _command(tmp_path)
    assert broken.returncode == 1
    assert [problem["generation"] for problem in json.loads(broken.stdout)["problems"]] == ["g-5"]
