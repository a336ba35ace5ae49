"""report.html: one file, no scripts, pictures inside, readable on paper and in the dark."""

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from keepgrad.report import tables
from keepgrad.report.tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #52606d; --line: #d9dee3; --paper: #fff; --mark: #1f78b4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #9aa5b1; --line: #3a4550; --paper: #161b20; --mark: #7fb8de; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; } .soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .8rem .35rem 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; min-width: 16rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; border-radius: 6px; background: #fff; }
figcaption { color: var(--soft); font-size: .88rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 0 1.25rem; }
"""
_CAPTIONS = {
    "before_after": "Three policies on the same held-out places.",
    "shown": "Drafts shown, by window. Vertical lines are 95 % intervals by user.",
    "accept_rate": "Accepted of what was shown, by window.",
    "accepted_chars": "Accepted characters per opportunity, by window.",
    "reward": "Mean reward, by window.",
    "gate": "Candidate against incumbent at each offline gate, with intervals; dotted: the margin.",
    "health": "Health of each training step; red points raised an alarm.",
    "seconds": "Where each cycle's time went.",
}


def render(report: Mapping[str, Any], pictures: Mapping[str, Path]) -> str:
    """The whole page."""
    run = report["run"]
    body = [
        "<h1>What keepgrad learned from what developers kept</h1>",
        f'<p class="soft">Model {escape(str(run.get("model", "")))}, seed {run.get("seed", 0)}, {len(report["cycles"])} cycles, '
        f"{tables.number(run.get('seconds', 0) / 60, 1)} minutes. The developers are simulated: they type real files and want their real "
        "text; they are a stand-in for people.</p>",
        f"<p>{escape(_sentence(report))}</p>",
        _picture("before_after", pictures),
        *(_table(table) for table in tables.headline(report)),
        *(f"<p>{escape(line)}</p>" for line in tables.closing(report)),
        "<h2>Over the cycles</h2>",
        '<div class="pair">',
        *(_picture(name, pictures) for name in ("shown", "accept_rate", "accepted_chars", "reward")),
        "</div>",
        *(_picture(name, pictures) for name in ("gate", "health", "seconds")),
        *(_table(table) for table in tables.details(report)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>keepgrad report</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _sentence(report: Mapping[str, Any]) -> str:
    held = report.get("heldout", {})
    if not held.get("after"):
        return "This run has no evaluation on held-out files."
    return (
        f"On {held.get('opportunities', 0)} held-out places: suggestions shown {tables.change(held, 'shown')}, accept rate "
        f"{tables.change(held, 'accept_rate')}, accepted characters per opportunity {tables.change(held, 'accepted_chars')}."
    )


def _picture(name: str, pictures: Mapping[str, Path]) -> str:
    if name not in pictures:
        return ""
    data = base64.b64encode(pictures[name].read_bytes()).decode()
    caption = escape(_CAPTIONS.get(name, ""))
    return f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>{note}'


def _cell(text: str) -> str:
    long = len(text) > 40
    return f'<td class="text">{escape(text)}</td>' if long else f"<td>{escape(text)}</td>"
