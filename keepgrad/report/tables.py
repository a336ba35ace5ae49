"""The report's tables as plain text cells, so that terminal and page show the same."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_POLICIES = (
    ("before", "base (always shows)"),
    ("filter", "filter (no learning)"),
    ("cut_filter", "cutting filter"),
    ("after", "learned"),
)
_STAGES = ("collect", "score", "audit", "train", "gate", "canary", "settle")
_SECTIONS = (("heldout", "Held-out files"), ("projects", "Projects never trained on"))
_COMPARISONS = {
    "filter": "filter vs base",
    "cut_filter": "cutting filter vs base",
    "over_filter": "learned vs filter",
    "over_cut_filter": "learned vs cutting filter",
    "text_gain": "its text alone",
    "silence_gain": "its silence alone",
    "cut_gain": "its cut alone",
}
DASH = "-"


class Table(NamedTuple):
    """A title, column heads, rows of cells, and a sentence below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def headline(report: Mapping[str, Any]) -> list[Table]:
    """Before, filter and learned, on held-out files and on projects never trained on."""
    return [_compare(report[name], title) for name, title in _SECTIONS if report.get(name)]


def closing(report: Mapping[str, Any]) -> list[str]:
    """Sentences below the headline: the books, the time, the memory, what raised an alarm."""
    books, promoted = report["conservation"], sum(cycle["decision"] == "promoted" for cycle in report["cycles"])
    lines = [
        f"{len(report['cycles'])} cycles, {promoted} promoted; {books['generations']} generations: {places(books)}; "
        f"books {'balanced' if books['balanced'] else 'NOT balanced'}"
    ]
    share, memory = report["overhead_share"], report["peak_memory_gib"]
    lines.append(
        f"{percent(share)} of the cycles' time neither sampled, trained nor evaluated; peak memory {number(memory, 2)} GiB; "
        f"{number(report['run'].get('seconds', 0) / 60, 1)} minutes in all"
    )
    alarms = report["health"].get("alarms", [])
    lines.append(f"health alarms in the last step: {', '.join(alarms) if alarms else 'none'}")
    return lines


def details(report: Mapping[str, Any]) -> list[Table]:
    """Everything else: cycles, time, windows, health, books, versions."""
    return [_decisions(report), _seconds(report), _windows(report), _health(report), _books(report), _versions(report)]


def places(books: Mapping[str, Any]) -> str:
    """The books in one line."""
    parts = [f"rewarded {books['rewarded']}", f"pending {books['pending']}"]
    for place in ("censored", "excluded"):
        reasons = books[place]
        named = f" ({', '.join(f'{reason} {count}' for reason, count in sorted(reasons.items()))})" if reasons else ""
        parts.append(f"{place} {sum(reasons.values())}{named}")
    return ", ".join(parts)


def percent(value: float | None, signed: bool = False, digits: int = 1) -> str:
    """A share as per cent."""
    return DASH if value is None else f"{100 * value:{'+' if signed else ''}.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many decimals."""
    return DASH if value is None else f"{value:.{digits}f}"


def change(values: Mapping[str, Any], name: str) -> str:
    """A relative change with its interval, in per cent."""
    estimate, interval = values.get(f"{name}_change"), values.get(f"{name}_change_ci")
    if estimate is None:
        return DASH
    low, high = interval or (None, None)
    ends = "" if low is None and high is None else f" [{_end(low)}, {_end(high)}]"
    return f"{100 * estimate:+.0f} %{ends}"


def _end(value: float | None) -> str:
    return "open" if value is None else f"{100 * value:+.0f}"


def _compare(section: Mapping[str, Any], title: str) -> Table:
    """Levels of each policy, then each relative change that the evaluation reports."""
    rows = []
    for key, name in _POLICIES:
        policy = section.get(key)
        if policy:
            rows.append(
                [name, percent(policy.get("shown_rate")), percent(policy.get("accept_rate")), number(policy.get("accepted_chars"), 2)]
            )
    rows.append(["learned vs base", *(change(section, metric) for metric in ("shown", "accept_rate", "accepted_chars"))])
    for key, values in section.items():
        if isinstance(values, Mapping) and "accept_rate_change" in values:
            rows.append([_comparison(key), *(change(values, metric) for metric in ("shown", "accept_rate", "accepted_chars"))])
    note = f"{section.get('opportunities', 0)} opportunities; accepted chars are per opportunity; changes are relative, with 95 % intervals"
    if section.get("clusters"):
        note += f" over {section['clusters']} files"
    return Table(title, ("", "shown", "accept rate", "accepted chars"), rows, note)


def _comparison(key: str) -> str:
    return _COMPARISONS.get(key, key.replace("_", " "))


def _decisions(report: Mapping[str, Any]) -> Table:
    rows = []
    for cycle in report["cycles"]:
        counts = cycle["counts"]
        rows.append(
            [
                cycle["cycle"],
                cycle["decision"],
                cycle["candidate"] or DASH,
                str(counts.get("collect", {}).get("generations", DASH)),
                str(counts.get("train", {}).get("samples", DASH)),
                counts.get("gate", {}).get("decision", DASH),
                counts.get("canary", {}).get("decision", DASH),
                cycle["reason"],
            ]
        )
    return Table("Cycles", ("cycle", "decision", "candidate", "generations", "samples", "gate", "canary", "why"), rows)


def _seconds(report: Mapping[str, Any]) -> Table:
    rows = [[c["cycle"], *(number(c["seconds"].get(stage), 1) for stage in _STAGES), number(c["wall_s"], 1)] for c in report["cycles"]]
    note = f"{percent(report['overhead_share'])} of it was neither sampling (collect, canary) nor training nor evaluating (gate)"
    return Table("Seconds by stage", ("cycle", *_STAGES, "wall"), rows, note)


def _windows(report: Mapping[str, Any]) -> Table:
    rows = []
    for cycle in report["cycles"]:
        for arm, values in cycle["window"].items():
            rows.append(
                [
                    cycle["cycle"],
                    arm,
                    str(values["opportunities"]),
                    percent(values["shown"]),
                    percent(values["accept_rate"]),
                    number(values["accepted_chars"], 2),
                    number(values["reward"]),
                ]
            )
    note = "Each window holds other places in other files: only the held-out tables compare like with like."
    return Table(
        "What happened in each window", ("cycle", "arm", "rewarded", "shown", "accept rate", "accepted chars", "reward"), rows, note
    )


def _health(report: Mapping[str, Any]) -> Table:
    healths = [(cycle["cycle"], cycle["counts"].get("train", {}).get("health", {})) for cycle in report["cycles"]]
    names = [name for name, value in next((h for _, h in healths if h), {}).items() if isinstance(value, int | float)]
    rows = [[cycle, *(number(h.get(name)) for name in names), ", ".join(h.get("alarms", [])) or "none"] for cycle, h in healths if h]
    return Table("Health of each training step", ("cycle", *(name.replace("_", " ") for name in names), "alarms"), rows)


def _books(report: Mapping[str, Any]) -> Table:
    books = report["conservation"]
    rows = [["rewarded", "", str(books["rewarded"])], ["pending", "", str(books["pending"])]]
    for place in ("censored", "excluded"):
        rows += [[place, reason, str(count)] for reason, count in sorted(books[place].items())]
    note = f"{books['generations']} generations served, each in exactly one place: {'balanced' if books['balanced'] else 'NOT balanced'}"
    return Table("Conservation", ("place", "reason", "generations"), rows, note)


def _versions(report: Mapping[str, Any]) -> Table:
    rows = []
    for version in report["versions"]:
        decided = ", ".join(f"{stage} {verdict['decision']}" for stage, verdict in version["verdicts"].items())
        rows.append(
            [
                version["id"],
                version["parent"] or "base",
                version["window"] or DASH,
                decided or DASH,
                "serving" if version["serving"] else "",
            ]
        )
    return Table("Policy versions", ("version", "parent", "window", "verdicts", ""), rows)
