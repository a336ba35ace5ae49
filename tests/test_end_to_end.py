"""One small cycle of the whole loop on the real model: real programs, real HTTP, real files, from nothing to a report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulate.test_demo import environment

SETTINGS = """
[train]
minibatch = 24
lr = 0.0005

[release]
gate_contexts = 64
gate_min_contexts = 48
canary_share = 0.5
canary_min = 16
canary_max = 32
margin = 0.5

[cycle]
window = 96
mature_s = 20.0
"""


@pytest.mark.timeout(900)
def test_one_cycle_on_the_real_model(tmp_path: Path) -> None:
    (tmp_path / "keepgrad.toml").write_text(SETTINGS)
    command = [sys.executable, "-m", "keepgrad", "demo", "--config", str(tmp_path / "keepgrad.toml"), "--out", str(tmp_path / "run")]
    command += ["--cycles", "1", "--minutes", "10", "--developers", "24", "--heldout", "64", "--projects", "32", "--seed", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["conservation"]["balanced"] and report["conservation"]["generations"] >= 96
    (cycle,) = report["cycles"]
    assert set(cycle["seconds"]) >= {"collect", "score", "audit", "train", "gate", "settle"}
    assert len(report["versions"]) == 2, "one step was taken from the base"
    assert report["heldout"]["opportunities"] == 64 and report["projects"]["opportunities"] == 32
    assert 0 < report["heldout"]["before"]["accept_rate"] < 1
    health = cycle["counts"]["train"]["health"]
    assert 0.5 < health["ratio_mean"] < 2 and health["ess"] > 0.3 and health["entropy_ratio"] > 0.6
    for name in ("report.html", "plots"):
        assert (tmp_path / "run" / name).exists()
