"""The report of a run folder that the real parts have filled: real ledger, real evaluation of drafts, real pictures."""

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from keepgrad import config as configuration
from keepgrad.config import Config
from keepgrad.errors import ConfigError
from keepgrad.ledger import Ledger
from keepgrad.outcomes.episode import outcome
from keepgrad.policy import verdict
from keepgrad.policy.traffic import user_hash
from keepgrad.records import Draft, Event, GateVerdict, Generation, Sampling, Tokens, Traffic, Version, Window, uuid7
from keepgrad.release.suite import Context
from keepgrad.report import facts, page, tables, write
from keepgrad.reward import score as scoring
from keepgrad.reward import spec as specs
from keepgrad.simulate import evaluate
from tests.reward.make import prompter

_START = 1_764_400_000_000
_STAGES = {"collect": 40.0, "score": 0.5, "audit": 0.2, "train": 20.0, "gate": 10.0, "canary": 15.0, "settle": 0.1}


def serve(ledger: Ledger, count: int, version: str, draw: random.Random) -> list[Generation]:
    """Generations of a few users and what became of them, all settled."""
    made, events = [], []
    for n in range(count):
        user = draw.randrange(6)
        shown = draw.random() < 0.8
        name, at = uuid7(), _START + 400_000 * (ledger.last_seq() + n)
        made.append(
            Generation(
                id=name, kind="tab", org="demo", user=user_hash("demo", f"dev-{user}"), key=f"k-{user}", conversation=f"c-{user}",
                version=version, arm="holdback" if user == 0 else "incumbent", consent="code", seed=n, sampling=Sampling(),
                prompt_tokens=3, completion_tokens=2, verdict="show" if shown else "silent", verdict_logprob=-0.2, show_probability=0.8,
                finish="stop", text="a + b", path="a.py", client_ms=at, created_ms=at, latency_ms=20.0,
            )
        )  # fmt: skip
        if shown:
            end = "accepted" if draw.random() < 0.4 else "rejected"
            for kind, after in (("shown", 100), (end, 900), ("settled", 12_000)):
                events.append((Event(id=uuid7(), generation=name, kind=kind, at_ms=at + after, text="a + b"), f"k-{user}"))  # type: ignore[arg-type]
    ledger.add_generations([(one, Tokens(one.id, [1, 2, 3], [4, 5], [-0.1, -0.2], [2], [[0.0] * len(verdict.FEATURES)])) for one in made])
    ledger.add_events(events)
    return made


def cycle(ledger: Ledger, number: int, parent: str, draw: random.Random) -> str:
    """One finished cycle in the ledger, as the loop writes it."""
    name, first = f"c-{number:06d}", ledger.last_seq() + 1
    serve(ledger, 60, parent, draw)
    window = Window(id=f"w-{number:06d}", first_seq=first, last_seq=ledger.last_seq(), closed_ms=_START)
    ledger.put_window(window)
    generations = [one for _, one in ledger.generations(window.first_seq, window.last_seq)]
    events, clocks = ledger.events([one.id for one in generations]), ledger.user_clocks()
    spec = specs.load("tab")
    ledger.put_scores(window.id, [scoring.score(one, outcome(one, events.get(one.id, []), clocks[one.user]), spec) for one in generations])
    version = Version(f"v-{number}", parent, "model", window.id, spec.hash, "0.1.0", 0, {"verdict.json": "00"}, _START + number)
    ledger.publish(version, [one.id for one in generations])
    effect = {"candidate": 1.1, "incumbent": 1.0, "difference": 0.1, "low": -0.05, "high": 0.2, "margin": 0.1, "passed": True}
    metrics = {"accept_rate": effect, "accepted_chars": effect, "reward": effect}
    ledger.put_verdict(GateVerdict(f"{name}-gate", "gate", version.id, parent, "pass", "all within margin", metrics, 160, _START))
    health = {"ratio_mean": 1.01, "ratio_sd": 0.3, "ess": 0.9, "kl": 0.001, "entropy_ratio": 1.0, "logp_drift": 0.1, "alarms": ["ratio_sd"]}
    counts: dict[str, dict[str, object]] = {
        "collect": {"window": window.id, "generations": 60, "incumbent": parent},
        "train": {"version": version.id, "samples": 60, "health": health},
        "gate": {"decision": "pass"},
        "canary": {"decision": "pass"},
        "settle": {"decision": "promoted", "version": version.id, "reason": "better <b>&</b> quieter"},
    }
    for stage, seconds in _STAGES.items():
        ledger.start_stage(name, stage)
        ledger.put_stage(name, stage, seconds, counts.get(stage, {}))
    ledger.put_traffic(Traffic(version.id, parent, "", 0.0, "v-base", 0.1, False, "promoted", _START + number))
    return version.id


def evaluation(draw: random.Random) -> dict[str, object]:
    """The evaluation's own numbers on made-up drafts of two versions: what the developers say is really computed."""
    contexts = [Context(f"x-{n}", f"file-{n % 40}.py", "python", "x = ", "compute(a, b)") for n in range(400)]

    def draft(version: str, right: float, quiet: float) -> Draft:
        good = draw.random() < right
        text, shown = "compute(a, b)" if good else "compute(1)", draw.random() > quiet
        ids = prompter().encode_text(" " + text)
        cuts = verdict.cuts([prompter().clean(ids[:tokens], True) for tokens in range(1, len(ids) + 1)])
        sure = draw.gauss(0.5 if good else -0.5, 1.0)
        inputs = [[sure - 0.1 * at for _ in verdict.FEATURES] for at in range(len(cuts))]
        said = "show" if shown else "silent"
        return Draft(version, ids, [-0.1] * len(ids), cuts, inputs, said, -0.1, 0.9, len(ids), text, "stop")  # type: ignore[arg-type]

    base, final = [draft("v-base", 0.3, 0.0) for _ in contexts], [draft("v-2", 0.4, 0.25) for _ in contexts]
    width = len(verdict.FEATURES)
    head = verdict.Head(mean=[0.0] * width, sd=[1.0] * width, w=list(np.ones(width)), b=0.0)
    found = evaluate.compare(contexts, base, final, head, prompter(), seed=0)
    return {"heldout": found, "projects": found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder of two promoted cycles."""
    root, draw = tmp_path_factory.mktemp("run"), random.Random(0)
    config = Config()
    (root / facts.SETTINGS).write_text(configuration.dump(config))
    ledger = Ledger.open(root / facts.DATA)
    ledger.put_version(Version("v-base", "", "model", "", "", "0.1.0", 0, {"verdict.json": "00"}, _START))
    ledger.put_traffic(Traffic("v-base", "v-base", "", 0.0, "v-base", 0.1, False, "the base", _START))
    first = cycle(ledger, 1, "v-base", draw)
    cycle(ledger, 2, first, draw)
    ledger.close()
    (root / facts.EVALUATION).write_text(json.dumps(evaluation(draw)))
    (root / facts.RUN).write_text(json.dumps({"seed": 0, "model": "tiny", "seconds": 200.0, "peak_memory_gib": 2.5}))
    yield root


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, object]:
    return write.build(folder)


def test_report_json_has_what_must_be_shown(folder: Path, built: dict[str, object]) -> None:
    read = json.loads((folder / "report.json").read_text())
    assert read == json.loads(json.dumps(built))
    for section in ("heldout", "projects"):
        for key in (
            "opportunities",
            "before",
            "after",
            "shown_change",
            "accept_rate_change",
            "accept_rate_change_ci",
            "filter",
            "over_filter",
        ):
            assert key in read[section], key
        assert {"accepted_chars_change", "accepted_chars_change_ci"} <= read[section].keys()
        assert {"accept_rate_change", "accept_rate_change_ci", "accepted_chars_change"} <= read[section]["over_filter"].keys()
    assert {"generations", "rewarded", "pending", "censored", "excluded", "balanced"} <= read["conservation"].keys()
    assert [version["id"] for version in read["versions"]] == ["v-base", "v-1", "v-2"]
    assert [row["seconds"]["train"] for row in read["cycles"]] == [20.0, 20.0]
    assert read["health"]["alarms"] == ["ratio_sd"] and read["peak_memory_gib"] == 2.5


def test_the_books_of_the_run_balance(built: dict[str, object]) -> None:
    books = msgspec.convert(built["conservation"], dict)
    assert books["balanced"] and books["generations"] == 120
    assert books["rewarded"] + books["pending"] + sum(books["censored"].values()) + sum(books["excluded"].values()) == 120


def test_overhead_is_what_neither_sampled_trained_nor_evaluated(built: dict[str, object]) -> None:
    assert built["overhead_share"] == pytest.approx(0.8 / 85.8, abs=1e-4)


def test_windows_are_measured_by_arm(built: dict[str, object]) -> None:
    cycles = msgspec.convert(built["cycles"], list)
    for row in cycles:
        assert set(row["window"]) == {"incumbent", "holdback"}
        values = row["window"]["incumbent"]
        assert 0.5 < values["shown"] <= 1 and values["shown_ci"][0] <= values["shown"] <= values["shown_ci"][1]
        assert 0 < values["accept_rate"] < 1 and values["accepted_chars"] > 0


def test_every_plot_is_a_picture(folder: Path, built: dict[str, object]) -> None:
    names = {"before_after", "shown", "accept_rate", "accepted_chars", "reward", "gate", "health", "seconds"}
    assert {path.stem for path in (folder / "plots").iterdir()} == names
    for path in (folder / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 4_000


def test_the_page_stands_alone(folder: Path, built: dict[str, object]) -> None:
    text = (folder / "report.html").read_text()
    assert "<script" not in text and "http://" not in text and "https://" not in text
    assert text.count("data:image/png;base64,") == 8
    assert "better &lt;b&gt;&amp;&lt;/b&gt; quieter" in text, "what a run says is text, not markup"


def test_the_terminal_table_names_all_three_policies(folder: Path, built: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    write.show(built, folder, Console(width=120))
    printed = capsys.readouterr().out
    for words in ("base (always shows)", "filter (no learning)", "learned vs filter", "books balanced", "report.html"):
        assert words in printed


def test_a_moved_run_can_be_rebuilt(folder: Path, built: dict[str, object], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    try:
        assert write.build(moved)["heldout"] == built["heldout"]
    finally:
        moved.rename(folder)


def test_an_unfinished_run_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / facts.SETTINGS).write_text("")
    with pytest.raises(ConfigError, match="has no data"):
        facts.collect(tmp_path)


def test_undefined_changes_are_dashes() -> None:
    assert tables.change({"accept_rate_change": None}, "accept_rate") == "-"
    assert tables.change({"accept_rate_change": 0.251, "accept_rate_change_ci": [0.1, None]}, "accept_rate") == "+25 % [+10, open]"


def test_a_page_without_numbers_is_still_a_page() -> None:
    empty = {
        "run": {}, "heldout": {}, "projects": {}, "cycles": [], "versions": [], "health": {}, "overhead_share": None,
        "peak_memory_gib": None,
        "conservation": {"generations": 0, "rewarded": 0, "pending": 0, "censored": {}, "excluded": {}, "balanced": True},
    }  # fmt: skip
    assert "no evaluation" in page.render(empty, {})


def test_no_figure_is_cut_off_in_a_narrow_window(folder: Path, built: dict[str, object]) -> None:
    console = Console(width=60, file=io.StringIO())
    write.show(built, folder, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\u2026" not in printed and "learned vs filter" in printed
