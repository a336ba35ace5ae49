"""What is exported is what the ledger holds, of everyone or of one user."""

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from keepgrad.config import Config, Server
from keepgrad.errors import ConfigError
from keepgrad.export import export
from keepgrad.ledger import Ledger
from keepgrad.policy.traffic import user_hash
from keepgrad.records import Generation, Score, Tokens
from tests.ledgers import fill, generation, tokens


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made = Config(server=Server(data=str(tmp_path / "data")))
    ledger = Ledger.open(made.root)
    fill(ledger, 6)
    ledger.add_generations([(generation(50, org="rival", user=user_hash("rival", "eve")), tokens(50))])
    ledger.close()
    return made


def rows(file: Path) -> list[dict[str, object]]:
    return pq.read_table(file).to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]


def test_everything_comes_out_as_it_went_in(config: Config, tmp_path: Path) -> None:
    counts = export(config, tmp_path / "out")
    ledger = Ledger.open(config.root)
    stored = [one for _, one in ledger.generations()]
    ids = [one.id for one in stored]
    assert counts == {"generations": 7, "tokens": 7, "events": 6, "scores": 6, "versions": 2, "traffic": 2, "verdicts": 1}
    back = [msgspec.convert({**row, "key": "k"}, Generation) for row in rows(tmp_path / "out" / "generations.parquet")]
    assert back == [msgspec.structs.replace(one, key="k") for one in stored]
    arrays = {one.generation: one for one in msgspec.convert(rows(tmp_path / "out" / "tokens.parquet"), list[Tokens])}
    assert arrays == ledger.tokens(ids)
    assert msgspec.convert(rows(tmp_path / "out" / "scores.parquet"), list[Score]) == ledger.scores("w-1")
    ledger.close()


def test_of_one_organisation_or_user_only_what_was_served_to_them(config: Config, tmp_path: Path) -> None:
    assert export(config, tmp_path / "rival", org="rival", user="eve") == {"generations": 1, "tokens": 1, "events": 0, "scores": 0}
    assert [row["org"] for row in rows(tmp_path / "rival" / "generations.parquet")] == ["rival"]
    assert export(config, tmp_path / "acme", org="acme")["generations"] == 6
    assert export(config, tmp_path / "none", org="acme", user="eve")["generations"] == 0


def test_refusals(config: Config, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        export(config, tmp_path / "full")
    with pytest.raises(ConfigError, match="--org"):
        export(config, tmp_path / "out", user="ann")
