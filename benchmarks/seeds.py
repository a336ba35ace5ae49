"""Several demo runs beside each other: `python benchmarks/seeds.py RUN...`, each RUN a folder with a report.json.

make demo ARGS="--seed 0 --out runs/0"; make demo ARGS="--seed 1 --out runs/1"; make demo ARGS="--seed 2 --out runs/2"
.venv/bin/python benchmarks/seeds.py runs/0 runs/1 runs/2
"""

import json
import sys
from pathlib import Path
from typing import Any

ROWS = (
    ("shown", "shown_change", ""),
    ("accept rate", "accept_rate_change", ""),
    ("accepted characters", "accepted_chars_change", ""),
    ("over the filter: accept rate", "accept_rate_change", "over_filter"),
    ("over the filter: characters", "accepted_chars_change", "over_filter"),
    ("text alone: accept rate", "accept_rate_change", "text_gain"),
    ("text alone: characters", "accepted_chars_change", "text_gain"),
    ("silence alone: accept rate", "accept_rate_change", "silence_gain"),
    ("silence alone: characters", "accepted_chars_change", "silence_gain"),
    ("cut alone: accept rate", "accept_rate_change", "cut_gain"),
    ("cut alone: characters", "accepted_chars_change", "cut_gain"),
    ("over the filter that cuts: accept rate", "accept_rate_change", "over_cut_filter"),
    ("over the filter that cuts: characters", "accepted_chars_change", "over_cut_filter"),
    ("filter: accept rate", "accept_rate_change", "filter"),
    ("filter: characters", "accepted_chars_change", "filter"),
)


def cell(found: dict[str, Any], key: str) -> str:
    """A relative change with its 95 % interval, in percent."""
    value, (low, high) = found[key], found[f"{key}_ci"]
    return f"{100 * value:+.0f} [{100 * low:+.0f}, {100 * high:+.0f}]"


def main(folders: list[str]) -> None:
    """Print one table per split, then what each run cost."""
    reports = [json.loads((Path(folder) / "report.json").read_text()) for folder in folders]
    for split in ("heldout", "projects"):
        counts = ", ".join(str(report[split]["opportunities"]) for report in reports)
        print(f"{split} ({counts} opportunities; relative change in %, 95 % interval by file)")
        for label, key, part in ROWS:
            cells = [cell(report[split][part] if part else report[split], key) for report in reports]
            print(f"  {label:30}" + "".join(f"{text:>20}" for text in cells))
    for folder, report in zip(folders, reports, strict=True):
        books, cycles = report["conservation"], report["cycles"]
        print(
            f"{folder}: {len(cycles)} cycles, {books['generations']} generations, balanced {books['balanced']}, "
            f"overhead {100 * report['overhead_share']:.1f} %, peak memory {report['peak_memory_gib']:.2f} GiB"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
