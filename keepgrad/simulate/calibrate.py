"""Simulated developers beside published telemetry of real ones.

Real figures come from two public data sets, read where they lie (never copied into the repository):

    cups_copilot            Copilot telemetry of 21 programmers (a part of them here): accepted or rejected, time to decide, and how
                            much of accepted text had changed at five check points (Mozannar et al., CHI 2024)
    vscode_edit_recordings  keystrokes of one developer in 1.5 hours: how often a single-line suggestion was typed out instead of taken

Ours come from developers who are shown the suggestions of a stand-in for a good model: real lines, spoilt at the stated rates GOOD_MODEL,
right in about a third of cases whatever their length. So the acceptance is that of a model whose quality we chose; what it calibrates is
how developers answer right, half-right and wrong suggestions, not how good any model is.

The rates of developer.py and GOOD_MODEL were set by hand against this very table: agreement shows a fit, not a prediction. The model was
chosen to be accepted as often as the real one, so that row is an input.

What cannot be known from the data: the true check-point times (15, 30, 120, 300 and 600 s are the since opened client's); how right a real
suggestion was, since what the programmer wanted is not recorded; whether a rejection was Esc, typing on, or not looking; typing out
instead of accepting, in CUPS; behaviour on tasks of other lengths, languages and tools. Each is an assumption of developer.py.
"""

import gzip
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles
from typing import Any

from keepgrad.errors import ConfigError
from keepgrad.release.suite import Context, cut
from keepgrad.simulate.corpus import files
from keepgrad.simulate.developer import HORIZONS_S, Decision, Draws, decide, fit_of, temperament

GOOD_MODEL = {"whole": 0.24, "start": 0.10, "near": 0.16, "wrong": 0.50}
"""Shares of the stand-in's suggestions: the whole rest of the line, a right start of it, right for the most part, another line's text."""
UNKNOWN = (
    "how right a real suggestion was",
    "whether a rejection was Esc, typing on, or not looking",
    "the true check-point times",
    "other languages, tasks and tools",
)
PUBLISHED_EDIT_DISTANCE = (0.072, 0.085, 0.100, 0.120, 0.130)
"""Mean over accepted suggestions of the whole CUPS set, as its README gives it; a part of the set may differ."""
_DEVELOPERS = 40
_LENGTHS = ((1, 3), (4, 8), (9, 16), (17, 32), (33, 64))
_RECORDING = "EditSourceTracker.test1.recording.w.json"

Numbers = dict[str, Any]


def data_folder() -> Path:
    """`KEEPGRAD_DATA`, or ../shared/data seen from the repository root."""
    return Path(os.environ.get("KEEPGRAD_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


def table(data_dir: Path, seed: int = 0) -> Numbers:
    """{"real": ..., "ours": ..., "good_model": ..., "unknown": [...]} with the same names in `real` and `ours` where both exist.

    Raises ConfigError if the CUPS file is not there; the figure from keystrokes is left out if that recording is missing.
    """
    real = cups(data_dir / "cups_copilot" / "cups_events.jsonl.gz")
    recording = data_dir / "vscode_edit_recordings" / "recordings" / _RECORDING
    if recording.exists():
        real |= typed_through(recording)
    return {"real": real, "ours": simulated(seed), "good_model": GOOD_MODEL, "unknown": list(UNKNOWN)}


def render(numbers: Numbers) -> str:
    """The table as text, real and ours beside each other."""
    real, ours = numbers["real"], numbers["ours"]
    lines = [f"{'':44}{'real':>9}{'ours':>9}"]
    for name in [*real, *(name for name in ours if name not in real)]:
        lines.append(f"{name.replace('_', ' '):44}{_cell(real.get(name)):>9}{_cell(ours.get(name)):>9}")
    lines.append("Simulated developers are a stand-in for people. Not known: " + "; ".join(numbers["unknown"]) + ".")
    return "\n".join(lines)


def cups(file: Path) -> Numbers:
    """Figures of the CUPS telemetry: every suggestion ends as Accepted or Rejected. Raises ConfigError if the file cannot be read."""
    try:
        rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read CUPS telemetry at {file} ({error}): set KEEPGRAD_DATA to the folder with cups_copilot") from None
    ended = [row for row in rows if row["StateName"] in ("Accepted", "Rejected")]
    taken = [row for row in ended if row["StateName"] == "Accepted"]
    single = [row for row in ended if "\n" not in row["CurrentSuggestion"]]
    users: dict[int, list[bool]] = defaultdict(list)
    for row in ended:
        users[row["UserId"]].append(row["StateName"] == "Accepted")
    numbers: Numbers = {"suggestions": len(ended), "developers": len(users), "accept_rate": len(taken) / len(ended)}
    numbers["accept_rate_spread_between_developers"] = pstdev(fmean(ends) for ends in users.values())
    numbers |= _by_length([(len(row["CurrentSuggestion"]), row["StateName"] == "Accepted") for row in single])
    numbers |= _distances([dict(zip(HORIZONS_S, row["EditPercentage"], strict=True)) for row in taken])
    numbers |= {f"published_edit_distance_{at}_s": value for at, value in zip(HORIZONS_S, PUBLISHED_EDIT_DISTANCE, strict=True)}
    numbers |= _times("accept", [row["TimeSpentInState"] for row in taken])
    return numbers | _times("dismiss", [row["TimeSpentInState"] for row in ended if row["StateName"] == "Rejected"])


def simulated(seed: int = 0, per_developer: int = 40) -> Numbers:
    """The same figures of our developers shown the stand-in for a good model."""
    contexts = cut(files("gate"), _DEVELOPERS * per_developer, seed, per_file=6)
    suggested = [(context, _suggestion(context, contexts, Draws(seed, "model", context.id))) for context in contexts]
    ends: dict[str, list[tuple[str, Decision]]] = defaultdict(list)
    for index, (context, text) in enumerate(suggested):
        name = f"dev-{index % _DEVELOPERS}"
        if text.strip():
            ends[name].append((text, decide(text, context.truth, temperament(seed, name), Draws(seed, name, context.id))))
    shown = [end for by_developer in ends.values() for end in by_developer]
    keyed = [decision for _, decision in shown if decision.survival]
    count = Counter(decision.end for _, decision in shown)
    numbers: Numbers = {"suggestions": len(shown), "developers": len(ends), "accept_rate": len(keyed) / len(shown)}
    numbers["accept_rate_spread_between_developers"] = pstdev(fmean(bool(d.survival) for _, d in own) for own in ends.values())
    numbers |= _by_length([(len(text), bool(decision.survival)) for text, decision in shown])
    numbers |= _distances([decision.survival for decision in keyed])
    numbers |= {f"published_edit_distance_{at}_s": numbers[f"edit_distance_{at}_s"] for at in HORIZONS_S}
    numbers |= _times("accept", [decision.after_s for decision in keyed])
    numbers |= _times("dismiss", [decision.after_s for _, decision in shown if not decision.taken])
    typed = [len(text) for text, decision in shown if decision.end == "typed_through"]
    numbers |= {"typed_through_share": len(typed) / len(shown), "typed_through_median_characters": median(typed or [0])}
    return numbers | {f"{end}_share": count[end] / len(shown) for end in ("accepted", "partial", "rejected", "ignored")}


def typed_through(recording: Path) -> Numbers:
    """How often a single-line suggestion was typed out, from a keystroke log (one developer, TypeScript): replays every edit.

    A suggestion counts as shown from its answer on, and ends when the line equals it (typed out), is accepted, leaves it, or gets another.
    """
    log = json.loads(recording.read_bytes())["log"]
    replay = _Replay(log)
    for entry in log:
        replay.step(entry)
    shown = sum(replay.ends.values())
    return {
        "typed_through_share": replay.ends["typed"] / max(shown, 1),
        "typed_through_median_characters": median(replay.typed_characters or [0]),
    }


class _Replay:
    """Documents of a recording at one moment, and the suggestion that stands in each."""

    def __init__(self, log: list[dict[str, Any]]) -> None:
        self.ends: Counter[str] = Counter()
        self.typed_characters: list[int] = []
        self._documents: dict[int, str] = {}
        self._stored: dict[str, str] = {}
        self._asked: dict[int, int] = {}
        self._standing: dict[int, tuple[int, str, int]] = {}
        reasons = (entry for entry in log if entry.get("data", {}).get("source") == "inlineSuggestion.accept")
        self._accepts = {(entry["id"], entry["data"]["v"]) for entry in reasons}  # the reason follows its change

    def step(self, entry: dict[str, Any]) -> None:
        kind, document = entry["kind"], entry.get("id", -1)
        if kind == "setContent":
            self._documents[document] = entry["content"]
        elif kind == "storeContent":
            self._stored[entry["contentId"]] = self._documents.get(document, "")
        elif kind == "restoreContent":
            self._documents[document] = self._stored.get(entry["contentId"], "")
        elif kind == "changed":
            self._changed(document, entry)
        elif kind == "documentEvent" and entry["data"].get("kind") == "start":
            self._asked[entry["data"]["requestId"]] = document
        elif kind == "event" and entry["data"].get("result") and not entry["data"].get("error"):
            self._suggested(self._asked[entry["data"]["requestId"]], entry["data"]["result"][0])

    def _changed(self, document: int, entry: dict[str, Any]) -> None:
        content = self._documents.get(document, "")
        for begin, end, new in sorted(entry["edit"], reverse=True):
            content = content[:begin] + new + content[end:]
        self._documents[document] = content
        if document not in self._standing:
            return
        row, target, characters = self._standing[document]
        now = self._line(document, row)
        if (document, entry["v"]) in self._accepts:
            self._end(document, "accepted")
        elif now.rstrip() == target.rstrip():
            self._end(document, "typed")
            self.typed_characters.append(characters)
        elif not target.startswith(now):
            self._end(document, "left")

    def _suggested(self, document: int, item: dict[str, Any]) -> None:
        place = re.match(r"\[(\d+),(\d+) -> (\d+),(\d+)\]", item["range"])
        if not place or item.get("isInlineEdit"):
            return
        row, begin, last_row, end = map(int, place.groups())
        line = self._line(document, row - 1)
        target = line[: begin - 1] + item["text"].split("\n")[0].rstrip("\r")
        if row != last_row or not target.startswith(line[: end - 1]) or len(target) < end:
            return
        if document in self._standing:
            if self._standing[document][:2] == (row - 1, target):
                return
            self._end(document, "replaced")
        self._standing[document] = (row - 1, target, len(target) - end + 1)

    def _line(self, document: int, row: int) -> str:
        lines = self._documents.get(document, "").split("\n")
        return lines[row].rstrip("\r") if row < len(lines) else ""

    def _end(self, document: int, how: str) -> None:
        del self._standing[document]
        self.ends[how] += 1


def _suggestion(context: Context, pool: Sequence[Context], draws: Draws) -> str:
    """What the stand-in for a good model suggests: the truth, spoilt at the rates of GOOD_MODEL."""
    truth, luck = context.truth.rstrip(), draws.uniform("kind")
    other = pool[int(draws.uniform("other") * len(pool))].truth.rstrip()
    words = [match.end() for match in re.finditer(r"\w+|[^\w\s]", truth)]
    if luck < GOOD_MODEL["whole"] or len(words) < 2:
        return truth if luck < 1 - GOOD_MODEL["wrong"] else other
    if luck < GOOD_MODEL["whole"] + GOOD_MODEL["start"]:
        return truth[: words[int(draws.uniform("stop") * (len(words) - 1))]]
    if luck < 1 - GOOD_MODEL["wrong"]:
        keep = words[min(int((0.7 + 0.25 * draws.uniform("keep")) * len(words)), len(words) - 2)]
        return truth[:keep] + other[-max(len(truth) - keep, 1) :]
    return other if fit_of(other, truth)[0] == "wrong" else "pass  # " + other


def _by_length(ends: Sequence[tuple[int, bool]]) -> Numbers:
    numbers = {}
    for low, high in _LENGTHS:
        chosen = [taken for characters, taken in ends if low <= characters <= high]
        if chosen:
            numbers[f"accept_rate_of_{low}_to_{high}_characters"] = fmean(chosen)
    return numbers


def _distances(survivals: Sequence[dict[int, float]]) -> Numbers:
    numbers = {f"edit_distance_{at}_s": fmean(survival[at] for survival in survivals) for at in HORIZONS_S}
    ends = (HORIZONS_S[0], HORIZONS_S[-1])
    return numbers | {f"share_changed_by_{at}_s": fmean(survival[at] > 0 for survival in survivals) for at in ends}


def _times(what: str, seconds: Sequence[float]) -> Numbers:
    low, middle, high = quantiles(seconds, n=4)
    return {f"{what}_after_s_quartile_1": low, f"{what}_after_s_median": middle, f"{what}_after_s_quartile_3": high}


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
