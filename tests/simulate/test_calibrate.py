"""Our developers beside real telemetry, where the data is at hand."""

import json
from pathlib import Path

import pytest

from keepgrad.errors import ConfigError
from keepgrad.simulate import calibrate
from keepgrad.simulate.developer import HORIZONS_S

DATA = calibrate.data_folder()
needs_data = pytest.mark.skipif(not (DATA / "cups_copilot").exists(), reason="public data absent: set KEEPGRAD_DATA to its folder")


@pytest.fixture(scope="module")
def ours() -> calibrate.Numbers:
    return calibrate.simulated()


def test_ours_are_close_to_the_published_edit_distances(ours: calibrate.Numbers) -> None:
    for at, published in zip(HORIZONS_S, calibrate.PUBLISHED_EDIT_DISTANCE, strict=True):
        assert ours[f"edit_distance_{at}_s"] == pytest.approx(published, abs=0.025)


def test_a_third_of_what_a_good_model_shows_is_accepted(ours: calibrate.Numbers) -> None:
    assert 0.30 < ours["accept_rate"] < 0.42


def test_figures_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    assert calibrate.simulated(3, 3) == calibrate.simulated(3, 3) != calibrate.simulated(4, 3)


@needs_data
def test_real_and_ours_stand_beside_each_other() -> None:
    numbers = calibrate.table(DATA)
    real, ours = numbers["real"], numbers["ours"]
    assert ours["accept_rate"] == pytest.approx(real["accept_rate"], abs=0.06)
    for name in ("edit_distance_15_s", "edit_distance_600_s", "share_changed_by_15_s", "share_changed_by_600_s"):
        assert ours[name] == pytest.approx(real[name], abs=0.08), name
    for name in ("accept_after_s_median", "dismiss_after_s_median"):
        assert 0.7 < ours[name] / real[name] < 1.4, name
    assert ours["accept_rate_of_1_to_3_characters"] < 0.25
    assert ours["accept_rate_spread_between_developers"] == pytest.approx(real["accept_rate_spread_between_developers"], abs=0.05)
    text = calibrate.render(numbers)
    assert "stand-in for people" in text and "edit distance 120 s" in text


@needs_data
def test_typing_out_is_measured_from_keystrokes() -> None:
    real = calibrate.typed_through(DATA / "vscode_edit_recordings" / "recordings" / "EditSourceTracker.test1.recording.w.json")
    assert 0.01 < real["typed_through_share"] < 0.15


def test_replay_tells_typed_out_from_accepted(tmp_path: Path) -> None:
    def shown(request: int, line: int, text: str) -> list[dict[str, object]]:
        start = {"kind": "documentEvent", "id": 1, "time": 0, "data": {"kind": "start", "requestId": request, "v": 1}}
        item = {"range": f"[{line},1 -> {line},1]", "text": text, "isInlineEdit": False}
        return [start, {"kind": "event", "time": 0, "data": {"kind": "end", "requestId": request, "result": [item]}}]

    log: list[dict[str, object]] = [{"kind": "setContent", "id": 1, "time": 0, "content": "\n\n", "v": 1}]
    log += shown(0, 1, "ab") + [{"kind": "changed", "id": 1, "time": 1, "edit": [[0, 0, "a"]], "v": 2}]
    log += [{"kind": "changed", "id": 1, "time": 2, "edit": [[1, 1, "b"]], "v": 3}]
    log += shown(1, 2, "cd") + [{"kind": "changed", "id": 1, "time": 3, "edit": [[3, 3, "cd"]], "v": 4}]
    log += [{"kind": "documentEvent", "id": 1, "time": 3, "data": {"source": "inlineSuggestion.accept", "v": 4}}]
    file = tmp_path / "log.json"
    file.write_text(json.dumps({"log": log}))
    assert calibrate.typed_through(file) == {"typed_through_share": 0.5, "typed_through_median_characters": 2}


def test_missing_data_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read CUPS telemetry at .*: set KEEPGRAD_DATA"):
        calibrate.table(tmp_path)
