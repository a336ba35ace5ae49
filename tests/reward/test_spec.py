"""A spec is known by its values, and says clearly what is wrong with it."""

from pathlib import Path

import msgspec
import pytest

from keepgrad.errors import ConfigError
from keepgrad.reward.spec import Spec, load

SHIPPED = Path(__file__).parents[2] / "keepgrad" / "reward" / "tab.toml"


def test_the_shipped_spec() -> None:
    spec = load("tab")
    assert (spec.tau, spec.user_cap) == (0.25, 0.1)
    assert load() == spec == load(SHIPPED)
    assert len(spec.hash) == 16 and set(spec.hash) <= set("0123456789abcdef")


def test_the_hash_is_of_the_values_only(tmp_path: Path) -> None:
    lines = [line for line in SHIPPED.read_text().splitlines() if line and not line.startswith("#")]
    (tmp_path / "bare.toml").write_text("\n".join(reversed(lines)).replace("size_typical = 30", "size_typical = 30.0"))
    assert load(tmp_path / "bare.toml").hash == load().hash
    hashes = {msgspec.structs.replace(load(), **change).hash for change in ({"tau": 0.2}, {"size_gain": 0.0}, {"user_cap": 0.2}, {})}
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tau = 0.25", "tau = 1.5", "tau"),
        ("tau = 0.25", "tau = 'much'", "tau"),
        ("tau = 0.25", "tau = nan", "tau"),
        ("tau = 0.25", "", "tau"),
        ("tau = 0.25", "tau = 0.25\nbonus = 1", "bonus"),
        ("size_gain = 1.0", "size_gain = -1", "size_gain"),
        ("size_typical = 30", "size_typical = 0", "size_typical"),
        ("user_cap = 0.1", "user_cap = 0", "user_cap"),
        ("tau = 0.25", "tau = [", "line"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_one_clear_sentence(tmp_path: Path, old: str, new: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(SHIPPED.read_text().replace(f"\n{old}\n", f"\n{new}\n"))
    with pytest.raises(ConfigError, match=says) as caught:
        load(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_no_such_spec() -> None:
    with pytest.raises(ConfigError, match="no reward spec"):
        load("nothing")


def test_values_out_of_bounds_cannot_be_made_in_code_either() -> None:
    with pytest.raises(ValueError, match="tau"):
        Spec(name="x", tau=0.0, size_gain=0.0, size_typical=12, user_cap=1.0, settled_chars=0)
