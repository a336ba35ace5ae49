"""Plots of a run as PNG files. No global state of matplotlib is touched, so drawing works the same in any process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from keepgrad.report.tables import DASH, change

_DPI = 110
_INK, _GRID, _BASE, _FILTER, _LEARNED, _ALARM = "#1f2933", "#d9dee3", "#9aa5b1", "#e0a030", "#1f78b4", "#c0392b"
_STAGE_COLOURS = {
    "collect": "#1f78b4",
    "score": "#c0392b",
    "audit": "#8e44ad",
    "train": "#e0a030",
    "gate": "#27966f",
    "canary": "#7fb8de",
    "settle": "#555f6b",
}
_PER_CYCLE = (
    ("shown", "Share of drafts shown", 100.0, "%"),
    ("accept_rate", "Accept rate of what was shown", 100.0, "%"),
    ("accepted_chars", "Accepted characters per opportunity", 1.0, "characters"),
    ("reward", "Mean reward per opportunity", 1.0, "reward"),
)
_HEALTH = ("ratio_mean", "ratio_sd", "ess", "kl", "entropy_ratio", "logp_drift")


def draw(report: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Every plot that the report has numbers for, by name in the order of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Path] = {}

    def add(name: str, figure: Figure) -> None:
        pictures[name] = folder / f"{name}.png"
        FigureCanvasAgg(figure)
        figure.savefig(pictures[name], dpi=_DPI)

    if report.get("heldout", {}).get("before"):
        add("before_after", _before_after(report))
    cycles = report["cycles"]
    for key, title, scale, unit in _PER_CYCLE:
        if any(cycle["window"] for cycle in cycles):
            add(key, _per_cycle(cycles, key, title, scale, unit))
    if any(cycle["gate"] for cycle in cycles):
        add("gate", _gate(cycles))
    if any(cycle["counts"].get("train", {}).get("health") for cycle in cycles):
        add("health", _health(cycles))
    if cycles:
        add("seconds", _seconds(cycles))
    return pictures


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(_GRID)
        each.tick_params(colors=_INK, length=0)
        each.grid(axis="y", color=_GRID, linewidth=0.7)
        each.set_axisbelow(True)
    return figure, axes


def _before_after(report: Mapping[str, Any]) -> Figure:
    """The picture of the README: three policies, three numbers, on the same held-out places."""
    heldout = report["heldout"]
    policies = [(name, key, colour) for name, key, colour in _policies() if heldout.get(key)]
    figure, axes = _figure(9.0, 3.3, columns=3)
    numbers: tuple[tuple[str, str, str, float, Callable[[float], str]], ...] = (
        ("Suggestions shown", "shown_rate", "shown", 100, lambda value: f"{value:.0f} %"),
        ("Accept rate", "accept_rate", "accept_rate", 100, lambda value: f"{value:.1f} %"),
        ("Accepted characters per opportunity", "accepted_chars", "accepted_chars", 1, lambda value: f"{value:.2f}"),
    )
    changes = {"filter": heldout.get("filter", {}), "after": heldout}
    for axis, (title, key, metric, scale, form) in zip(axes, numbers, strict=True):
        values = [(heldout[policy].get(key) or 0.0) * scale for _, policy, _ in policies]
        bars = axis.bar([name for name, _, _ in policies], values, color=[colour for _, _, colour in policies], width=0.8)
        axis.bar_label(bars, labels=[form(value) for value in values], color=_INK, padding=2, fontsize=10)
        inside = [change(changes.get(policy, {}), metric).replace(" [", "\n[") for _, policy, _ in policies]
        axis.bar_label(bars, labels=["" if text == DASH else text for text in inside], label_type="center", color="white", fontsize=8.5)
        axis.set_title(title, fontsize=10.5, color=_INK)
        axis.set_ylim(0, max(values, default=0) * 1.18 or 1)
        axis.set_yticks([])
        axis.grid(visible=False)
        axis.spines["left"].set_visible(False)
    return figure


def _policies() -> tuple[tuple[str, str, str], ...]:
    return (("base", "before", _BASE), ("filter", "filter", _FILTER), ("learned", "after", _LEARNED))


def _per_cycle(cycles: Sequence[Mapping[str, Any]], key: str, title: str, scale: float, unit: str) -> Figure:
    """One metric over the cycles: the version that served, and beside it the holdback, which always got the base."""
    figure, (axis,) = _figure(6.4, 3.2)
    for arm, label, colour, shift in (("holdback", "holdback (base)", _BASE, 0.08), ("incumbent", "incumbent", _LEARNED, 0.0)):
        points = [(n, cycle["window"][arm]) for n, cycle in enumerate(cycles, 1) if cycle["window"].get(arm, {}).get(key) is not None]
        if not points:
            continue
        xs, ys = [n + shift for n, _ in points], [values[key] * scale for _, values in points]
        # The holdback is a few users: points without a line, so that nobody reads a trend into them.
        style = "o-" if arm == "incumbent" else "o"
        axis.plot(xs, ys, style, color=colour, label=label, linewidth=1.8, markersize=5, fillstyle="full" if arm == "incumbent" else "none")
        for x, (_, values) in zip(xs, points, strict=True):
            low, high = values.get(f"{key}_ci") or (None, None)
            if low is not None and high is not None:
                axis.vlines(x, low * scale, high * scale, color=colour, linewidth=1.2, alpha=0.55)
    axis.set_title(title, fontsize=11, color=_INK)
    _cycle_axis(axis, cycles)
    axis.set_ylabel(unit, color=_INK)
    axis.legend(frameon=False, fontsize=9)
    return figure


def _gate(cycles: Sequence[Mapping[str, Any]]) -> Figure:
    """Candidate against incumbent at each gate: relative change with its interval, and the margin it may not fall below."""
    names = [name for name in ("accept_rate", "accepted_chars", "reward") if any(name in cycle["gate"] for cycle in cycles)]
    figure, axes = _figure(9.0, 3.1, columns=max(len(names), 1))
    for axis, name in zip(axes, names, strict=False):
        for n, cycle in enumerate(cycles, 1):
            effect = cycle["gate"].get(name)
            if not effect:
                continue
            colour = _LEARNED if effect.get("passed") else _ALARM
            axis.plot([n], [100 * effect["difference"]], "o", color=colour, markersize=5)
            if effect.get("low") is not None and effect.get("high") is not None:
                axis.vlines(n, 100 * effect["low"], 100 * effect["high"], color=colour, linewidth=1.6)
            axis.hlines(-100 * effect.get("margin", 0.0), n - 0.35, n + 0.35, color=_ALARM, linewidth=1, linestyle=":")
        axis.axhline(0, color=_INK, linewidth=0.8)
        axis.set_title(name.replace("_", " "), fontsize=10.5, color=_INK)
        _cycle_axis(axis, cycles)
    axes[0].set_ylabel("change against incumbent, %", color=_INK)
    return figure


def _health(cycles: Sequence[Mapping[str, Any]]) -> Figure:
    """Health numbers of each step; red where one raised its alarm."""
    figure, axes = _figure(9.0, 4.6, columns=3, rows=2)
    for axis, name in zip(axes, _HEALTH, strict=True):
        points = []
        for n, cycle in enumerate(cycles, 1):
            health = cycle["counts"].get("train", {}).get("health", {})
            if health.get(name) is not None:
                points.append((n, health[name], name in health.get("alarms", [])))
        axis.plot([n for n, _, _ in points], [value for _, value, _ in points], "-", color=_LEARNED, linewidth=1.6)
        axis.scatter([p[0] for p in points], [p[1] for p in points], c=[_ALARM if p[2] else _LEARNED for p in points], s=26, zorder=3)
        axis.set_title(name.replace("_", " "), fontsize=10.5, color=_INK)
        _cycle_axis(axis, cycles)
    return figure


def _seconds(cycles: Sequence[Mapping[str, Any]]) -> Figure:
    """Where each cycle's time went."""
    figure, (axis,) = _figure(6.4, 3.2)
    floor = [0.0] * len(cycles)
    for stage, colour in _STAGE_COLOURS.items():
        heights = [cycle["seconds"].get(stage, 0.0) for cycle in cycles]
        axis.bar(range(1, len(cycles) + 1), heights, bottom=floor, color=colour, label=stage, width=0.62)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axis.set_title("Seconds by stage", fontsize=11, color=_INK)
    _cycle_axis(axis, cycles)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _cycle_axis(axis: Axes, cycles: Sequence[Mapping[str, Any]]) -> None:
    step = max(1, len(cycles) // 12)
    axis.set_xticks(range(1, len(cycles) + 1, step))
    axis.set_xlim(0.4, len(cycles) + 0.6)
    axis.set_xlabel("cycle", color=_INK)
