"""The ledger against a dictionary: any interleaving of writes, retries, conflicts, seals and reopenings, by two that have it open.

Promise P4, ids make retries harmless and nothing is lost or doubled, for arbitrary sequences instead of chosen ones.
"""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepgrad.errors import ConflictError
from keepgrad.ledger import Ledger
from keepgrad.records import Event, Generation, Tokens
from tests.ledgers import event, generation, key_of, tokens, traffic

_NUMBERS = st.integers(0, 11)
_CHANGED = st.sampled_from([False] * 6 + [True])


class Books(RuleBasedStateMachine):
    """Two open ledgers on one folder, and what they should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="keepgrad-ledger-"))
        self.generations: dict[str, tuple[Generation, Tokens]] = {}
        self.events: dict[str, tuple[Event, str]] = {}
        self.counted = 0
        self.traffic: list[str] = []
        self.sealed = 0

    @initialize()
    def begin(self) -> None:
        """Both start with an empty folder."""
        self.ledgers = [Ledger.open(self.root), Ledger.open(self.root)]

    def teardown(self) -> None:
        """Close, and leave nothing."""
        for ledger in getattr(self, "ledgers", []):
            ledger.close()
        shutil.rmtree(self.root)

    @rule(which=st.integers(0, 1), batch=st.lists(st.tuples(_NUMBERS, _CHANGED, _CHANGED), min_size=1, max_size=4))
    def add_generations(self, which: int, batch: list[tuple[int, bool, bool]]) -> None:
        """A call with new, repeated and conflicting ones."""
        items = [
            (generation(n, **({"text": "other"} if record else {})), tokens(n, **({"logprobs": [-0.5] * 4} if arrays else {})))
            for n, record, arrays in batch
        ]
        wanted = dict(self.generations)
        fine = all(wanted.setdefault(one.id, (one, arrays)) == (one, arrays) for one, arrays in items)
        try:
            self.ledgers[which].add_generations(items)
            assert fine
            self.generations = wanted
        except ConflictError:
            assert not fine

    @rule(which=st.integers(0, 1), batch=st.lists(st.tuples(_NUMBERS, _NUMBERS, _CHANGED), min_size=1, max_size=4))
    def add_events(self, which: int, batch: list[tuple[int, int, bool]]) -> None:
        """A call with events about known and unknown generations, by their own key and by others."""
        items = [(event(n, n % 12, chars=int(changed)), key_of(n) if key % 4 else "k-other") for n, key, changed in batch]
        wanted, answers, fine = dict(self.events), [], True
        for one, key in items:
            known = "stored" if one.generation in self.generations else "waiting"
            answers.append("duplicate" if one.id in wanted else known)
            fine = fine and wanted.setdefault(one.id, (one, key))[0] == one
        try:
            assert self.ledgers[which].add_events(items) == answers and fine
            self.events = wanted
        except ConflictError:
            assert not fine

    @rule(which=st.integers(0, 1), least=st.integers(1, 4))
    def seal(self, which: int, least: int) -> None:
        """Into a segment, if there are enough."""
        there = len(self.generations) - self.sealed
        moved = self.ledgers[which].seal(least)
        assert moved == (there if there >= least else 0)
        self.sealed += moved

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        """A process ends and another begins."""
        self.ledgers[which].close()
        self.ledgers[which] = Ledger.open(self.root)

    @rule(which=st.integers(0, 1), name=st.sampled_from(["v-a", "v-b"]))
    def put_traffic(self, which: int, name: str) -> None:
        """Another version answers from now on."""
        self.ledgers[which].put_traffic(traffic(name))
        if self.traffic[-1:] != [name]:
            self.traffic.append(name)

    @rule(which=st.integers(0, 1), n=st.integers(1, 3))
    def count(self, which: int, n: int) -> None:
        """Something happened n times."""
        self.ledgers[which].count("x", n)
        self.counted += n

    @invariant()
    def both_tell_the_same(self) -> None:
        """Whoever is asked: each once, unchanged, numbered without a gap."""
        for ledger in getattr(self, "ledgers", []):
            rows = ledger.generations()
            assert [seq for seq, _ in rows] == list(range(1, len(rows) + 1)) and ledger.last_seq() == len(rows)
            assert {one.id: one for _, one in rows} == {name: one for name, (one, _) in self.generations.items()}
            assert ledger.tokens(list(self.generations)) == {name: arrays for name, (_, arrays) in self.generations.items()}
            assert ledger.token_generations() == set(self.generations)
            mine = [one for one, key in self.events.values() if one.generation in self.generations and self.owner(one) == key]
            told = ledger.events(list(self.generations))
            assert sorted(one.id for some in told.values() for one in some) == sorted(one.id for one in mine)
            assert all(one in told[one.generation] for one in mine)
            assert ledger.counters().get("x", 0) == self.counted
            assert [one.incumbent for one in ledger.traffic_history()] == self.traffic
            now = ledger.traffic()
            assert (now.incumbent if now else None) == (self.traffic[-1] if self.traffic else None)
            assert ledger.verify_segments() == []

    def owner(self, one: Event) -> str:
        """The key that the event's generation was served to."""
        return self.generations[one.generation][0].key


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
