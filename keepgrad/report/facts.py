"""The numbers of a run, out of its ledger, its evaluation and its run record: everything that report.json holds.

overhead_share is the part of the cycles' wall time that was neither sampling (collect, canary) nor training (train) nor evaluating (gate).
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from keepgrad import __version__, metrics
from keepgrad.audit import audit
from keepgrad.config import Config, load
from keepgrad.errors import ConfigError
from keepgrad.ledger import Ledger
from keepgrad.metrics import Judged
from keepgrad.outcomes.episode import outcome
from keepgrad.records import Generation, Outcome, Score, Window
from keepgrad.reward import spec as specs

DATA, RUN, EVALUATION, SETTINGS = "data", "run.json", "evaluation.json", "keepgrad.toml"
"""Inside a run folder: the data folder, the demo's own record, the evaluation's answer, the configuration."""
_USEFUL_STAGES = ("collect", "train", "gate", "canary")
TAKEN = frozenset(["accepted", "partial", "typed_through"])
"""Ends in which the developer took something."""


def collect(folder: Path) -> dict[str, Any]:
    """Everything for report.json. Raises ConfigError if `folder` lacks a file of a finished run."""
    for name in (SETTINGS, DATA, RUN, EVALUATION):
        if not (folder / name).exists():
            raise ConfigError(
                f"{folder} has no {name}, so it is not the folder of a finished run: give the --out folder of `keepgrad demo`"
            )
    config = load(folder / SETTINGS)
    # The folder may have been moved since: its own data folder counts, not the one its configuration names.
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, data=str(folder / DATA)))
    run, evaluation = json.loads((folder / RUN).read_text()), json.loads((folder / EVALUATION).read_text())
    ledger = Ledger.open(config.root)
    try:
        return _facts(config, ledger, run, evaluation)
    finally:
        ledger.close()


def _facts(config: Config, ledger: Ledger, run: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
    cycles = _cycles(ledger)
    books = audit(ledger, specs.load(config.reward.spec))
    latest = [cycle["counts"]["train"]["health"] for cycle in cycles if "health" in cycle["counts"].get("train", {})]
    return {
        "keepgrad": __version__,
        **{name: evaluation.get(name, {}) for name in ("heldout", "projects")},
        **{name: value for name, value in evaluation.items() if name not in ("heldout", "projects")},
        "conservation": {
            "generations": books.generations,
            "rewarded": books.rewarded,
            "pending": books.pending,
            "censored": dict(books.censored),
            "excluded": dict(books.excluded),
            "balanced": books.balanced,
            "problems": len(books.problems),
        },
        "versions": _versions(ledger),
        "cycles": cycles,
        "health": latest[-1] if latest else {},
        "overhead_share": _overhead(cycles),
        "peak_memory_gib": run.get("peak_memory_gib"),
        "counters": ledger.counters(),
        "run": run,
    }


def _cycles(ledger: Ledger) -> list[dict[str, Any]]:
    """One row per cycle: seconds and counts by stage, what was decided, and how its window went, for the incumbent and for the holdback."""
    stages: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ledger.stages():
        stages[row["cycle"]].append(row)
    windows = {window.id: window for window in ledger.windows()}
    verdicts = ledger.verdicts()
    clocks = ledger.user_clocks()
    rows = []
    for name, steps in stages.items():
        done = {step["stage"]: step for step in steps if step["finished"]}
        counts = {stage: step["counts"] for stage, step in done.items()}
        settled, trained = counts.get("settle", {}), counts.get("train", {})
        window = windows.get(counts.get("collect", {}).get("window", ""))
        candidate = trained.get("version", "")
        rows.append(
            {
                "cycle": name,
                "decision": settled.get("decision", "unfinished"),
                "reason": settled.get("reason", ""),
                "candidate": candidate,
                "seconds": {stage: round(step["seconds"], 3) for stage, step in done.items()},
                "wall_s": _wall_s(steps),
                "counts": counts,
                "gate": next((v.metrics for v in verdicts if v.candidate == candidate and v.stage == "gate"), {}) if candidate else {},
                "window": _window(ledger, window, clocks) if window else {},
            }
        )
    return rows


def _wall_s(steps: list[dict[str, Any]]) -> float:
    """Seconds from the first stage's begin to the last one's end, or of the stages alone if the ledger kept no moments."""
    moments = [step["at_ms"] for step in steps if step.get("at_ms")]
    worked: float = sum(step["seconds"] for step in steps if step["finished"])
    spanned = (max(moments) - min(moments)) / 1000 if len(moments) > 1 else 0.0
    return round(float(max(spanned, worked)), 3)


def _overhead(cycles: list[dict[str, Any]]) -> float | None:
    wall = sum(cycle["wall_s"] for cycle in cycles)
    useful = sum(cycle["seconds"].get(stage, 0.0) for cycle in cycles for stage in _USEFUL_STAGES)
    return round(max(0.0, 1 - useful / wall), 4) if wall else None


def _window(ledger: Ledger, window: Window, clocks: dict[str, int]) -> dict[str, Any]:
    """What became of a window's suggestions, by arm: metrics with intervals by user, and the mean reward."""
    generations = [generation for _, generation in ledger.generations(window.first_seq, window.last_seq)]
    events = ledger.events([generation.id for generation in generations])
    scores = {score.generation: score for score in ledger.scores(window.id)}
    arms: dict[str, list[tuple[Generation, Outcome, Score]]] = defaultdict(list)
    for generation in generations:
        score = scores.get(generation.id)
        if score is not None and score.place == "rewarded":
            found = outcome(generation, events.get(generation.id, []), clocks.get(generation.user, generation.client_ms))
            arms[generation.arm].append((generation, found, score))
    return {arm: _arm(rows) for arm, rows in arms.items()}


def _arm(rows: list[tuple[Generation, Outcome, Score]]) -> dict[str, Any]:
    judged = [
        Judged(
            context=generation.id,
            cluster=generation.user,
            shown=generation.verdict == "show",
            accepted=found.end in TAKEN,
            accepted_chars=found.accepted_chars,
            shown_chars=found.shown_chars,
        )
        for generation, found, _ in rows
    ]
    result: dict[str, Any] = {"opportunities": len(rows), "reward": sum(score.reward for _, _, score in rows) / len(rows)}
    for name in metrics.METRICS:
        interval = metrics.rate(judged, name)
        result[name], result[f"{name}_ci"] = _finite(interval.estimate), metrics.ends(interval)
    return result


def _versions(ledger: Ledger) -> list[dict[str, Any]]:
    verdicts = ledger.verdicts()
    traffic = ledger.traffic()
    rows = []
    for version in ledger.versions():
        row = dict(msgspec.to_builtins(version))
        row["verdicts"] = {v.stage: {"decision": v.decision, "reason": v.reason} for v in verdicts if v.candidate == version.id}
        row["serving"] = bool(traffic and version.id == traffic.incumbent)
        rows.append(row)
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
