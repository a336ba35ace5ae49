"""Write a run's report: report.json for machines, report.html and plots for people, a table for the terminal."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from keepgrad.report import facts, page, plots, tables


def build(folder: Path) -> dict[str, Any]:
    """Read a run folder and write report.json, report.html and plots/*.png into it; returns what report.json holds.

    Raises ConfigError if the folder is not that of a finished run.
    """
    report = facts.collect(folder)
    pictures = plots.draw(report, folder / "plots")
    _write(folder / "report.json", json.dumps(report, indent=2) + "\n")
    _write(folder / "report.html", page.render(report, pictures))
    return report


def show(report: dict[str, Any], folder: Path, console: Console | None = None) -> None:
    """Print the tables that matter most, and where the rest lies."""
    out = console or Console()
    for table in tables.headline(report):
        drawn = RichTable(title=table.title, caption=table.note, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        drawn.title_justify = drawn.caption_justify = "left"
        for index, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*row)
        # Figures that are cut off are no figures: in a narrow window the lines are longer than it.
        out.width = max(out.width, out.measure(drawn, options=out.options.update(width=200)).maximum)
        out.print(drawn)
    for line in tables.closing(report):
        out.print(line, highlight=False, soft_wrap=True)
    out.print(
        f"report   {folder / 'report.html'}\nnumbers  {folder / 'report.json'}\nplots    {folder / 'plots'}",
        highlight=False,
        soft_wrap=True,
    )


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    part.replace(path)
