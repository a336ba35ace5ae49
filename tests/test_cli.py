"""The command line as a person or a script meets it: real processes, one sentence for each trouble, JSON where it is read."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepgrad import cli
from keepgrad.config import Config
from keepgrad.doctor import require_disk, require_port
from keepgrad.errors import ConfigError, VersionError
from keepgrad.gateway.auth import hash_secret
from keepgrad.ledger import Ledger
from keepgrad.operate import opened, prepare, rollback, set_traffic, write_suite
from keepgrad.policy.versions import Store
from keepgrad.records import GateVerdict, Version


def keepgrad(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "keepgrad", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def refused(done: "subprocess.CompletedProcess[str]", code: int = 2) -> str:
    """The one sentence on stderr."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("keepgrad: "), done.stderr
    return lines[0]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Defaults, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Config()


def made(config: Config) -> dict[str, object]:
    return prepare(config, "fingerprint", {"verdict.json": b"{}"}, ["ann"], "acme")


def candidate(config: Config, parent: str, passed: bool) -> Version:
    version = Store(config.root).write({"verdict.json": b"{ }"}, parent=parent, model="fingerprint", window="w-1", spec="s", seed=0)
    with opened(config) as ledger:
        ledger.put_version(version)
        if passed:
            ledger.put_verdict(GateVerdict("g-1", "gate", version.id, parent, "pass", "all within margin", {}, 160, 1))
    return version


def test_help_is_fast_and_teaches(tmp_path: Path) -> None:
    times = []
    for _ in range(3):
        began = time.monotonic()
        done = keepgrad("--help", folder=tmp_path)
        times.append(time.monotonic() - began)
        assert done.returncode == 0 and "keepgrad demo" in done.stdout
    assert min(times) < 0.5


@pytest.mark.parametrize("module", ["torch", "litestar", "pyarrow", "matplotlib", "dbos"])
def test_help_needs_no_heavy_import(module: str, tmp_path: Path) -> None:
    code = f"import sys, keepgrad.cli; keepgrad.cli.parser().format_help(); sys.exit({module!r} in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment).returncode == 0


def test_a_client_only_machine_loads_no_torch(tmp_path: Path) -> None:
    code = "import sys, keepgrad.simulate.fleet, keepgrad.simulate.progress, keepgrad.operate; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment).returncode == 0


def test_unknown_configuration_key(tmp_path: Path) -> None:
    (tmp_path / "keepgrad.toml").write_text("[train]\nlearning_rate = 1.0\n")
    assert "learning_rate" in refused(keepgrad("config", folder=tmp_path))


def test_configuration_file_that_is_not_there(tmp_path: Path) -> None:
    assert "other.toml" in refused(keepgrad("config", "--config", "other.toml", folder=tmp_path))


def test_config_prints_a_file_that_can_be_read_back(tmp_path: Path) -> None:
    first = keepgrad("config", folder=tmp_path)
    (tmp_path / "keepgrad.toml").write_text(first.stdout)
    assert keepgrad("config", folder=tmp_path).stdout == first.stdout


def test_model_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "keepgrad.toml").write_text('[model]\npath = "model"\n')
    assert "tokenizer" in refused(keepgrad("model", "fetch", folder=tmp_path))


def test_port_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=r"server\.port"):
            require_port("127.0.0.1", port, "server.port")
        (tmp_path / "keepgrad.toml").write_text(f"[server]\nport = {port}\n")
        assert f"port {port}" in refused(keepgrad("serve", folder=tmp_path))


def test_no_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GiB free"):
        require_disk(tmp_path / "not" / "there", least_gib=1e9)


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "keepgrad.toml").write_text('[server]\ndata = "file/data"\n')
    refused(keepgrad("audit", folder=tmp_path))


def test_commands_that_do_not_exist(tmp_path: Path) -> None:
    assert keepgrad("learn", folder=tmp_path).returncode == 2
    assert keepgrad("cycle", folder=tmp_path).returncode == 2
    assert keepgrad("demo", "--minutes", "0", folder=tmp_path).returncode == 2


def test_doctor_speaks_json(tmp_path: Path) -> None:
    done = keepgrad("doctor", "--quick", "--json", folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["python"]["level"] == "ok"
    assert {"memory", "disk", "bfloat16", "server.port"} <= checks.keys()
    assert all(check["level"] == "ok" or check["fix"] for check in checks.values())


def test_prepare_is_repeatable_and_keeps_only_hashes(config: Config) -> None:
    first, second = made(config), made(config)
    assert first["base"] == second["base"] and first["contexts"] == second["contexts"]
    with opened(config) as ledger:
        assert len(ledger.versions()) == 1 and len(ledger.traffic_history()) == 1
        secrets = [key["secret"] for made_key in (first, second) for key in made_key["keys"]]  # type: ignore[attr-defined]
        assert [key.secret_hash for key in ledger.keys()] == [hash_secret(secret) for secret in secrets]  # noqa: SIM118
    for file in config.root.rglob("*"):
        assert not file.is_file() or not any(secret.encode() in file.read_bytes() for secret in secrets)


def test_another_model_needs_another_folder(config: Config) -> None:
    made(config)
    with pytest.raises(VersionError, match=r"server\.data"):
        prepare(config, "another", {"verdict.json": b"{}"}, [], "acme")


def test_suite_from_a_repository(config: Config) -> None:
    path, count = write_suite(config, Path(cli.__file__).parent, count=100)
    assert count == 100 and len(path.read_bytes().splitlines()) == 100
    with pytest.raises(ConfigError, match="no folder"):
        write_suite(config, Path("nowhere"))
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match="0 gate contexts"):
        write_suite(config, Path("empty"))


def test_traffic_needs_a_verdict(config: Config) -> None:
    base = str(made(config)["base"])
    version = candidate(config, base, passed=False)
    with pytest.raises(VersionError, match="gate"):
        set_traffic(config, version.id, 1.0, False, "")
    assert set_traffic(config, version.id, 1.0, True, "by hand")["incumbent"] == version.id


def test_set_canary_rollback(config: Config) -> None:
    base = str(made(config)["base"])
    version = candidate(config, base, passed=True)
    canary = set_traffic(config, version.id, 0.25, False, "try")
    assert (canary["incumbent"], canary["canary"], canary["canary_share"]) == (base, version.id, 0.25)
    ended = rollback(config, "no")
    assert (ended["incumbent"], ended["canary"], ended["force"]) == (base, "", True)
    promoted = set_traffic(config, version.id, 1.0, False, "yes")
    assert (promoted["incumbent"], promoted["previous"]) == (version.id, base)
    back = rollback(config, "no")
    assert (back["incumbent"], back["force"]) == (base, True)
    with pytest.raises(VersionError, match="before"):
        rollback(config, "further")


def test_a_damaged_version_gets_no_traffic(config: Config) -> None:
    base = str(made(config)["base"])
    version = candidate(config, base, passed=True)
    (Store(config.root).path(version.id) / "verdict.json").write_bytes(b"{  }")
    with pytest.raises(VersionError, match=r"verdict\.json"):
        set_traffic(config, version.id, 1.0, False, "")


def test_versions_and_traffic_speak_json(config: Config, tmp_path: Path) -> None:
    base = made(config)["base"]
    rows = json.loads(keepgrad("versions", "--verify", "--json", folder=tmp_path).stdout)
    assert [row["version"] for row in rows] == [base] and rows[0]["traffic"].startswith("incumbent")
    assert json.loads(keepgrad("traffic", "show", "--json", folder=tmp_path).stdout)["incumbent"] == base
    assert "nothing" not in refused(keepgrad("traffic", "rollback", folder=tmp_path))


def test_traffic_before_init(tmp_path: Path) -> None:
    assert "keepgrad init" in refused(keepgrad("traffic", "show", folder=tmp_path))


def test_audit_of_an_empty_ledger_balances(tmp_path: Path) -> None:
    Ledger.open(tmp_path / ".keepgrad").close()
    done = keepgrad("audit", "--json", folder=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["balanced"] is True
    assert "no window" in refused(keepgrad("audit", "--window", "w-9", folder=tmp_path))


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / ".keepgrad").mkdir()
    (tmp_path / ".keepgrad" / "ledger.sqlite").write_bytes(b"not a database, at all" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(tmp_path / ".keepgrad" / "ledger.sqlite").execute("SELECT * FROM sqlite_master")
    refused(keepgrad("audit", folder=tmp_path))


def test_report_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert "finished run" in refused(keepgrad("report", ".", folder=tmp_path))


def test_demo_refuses_a_folder_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert "--out" in refused(keepgrad("demo", "--tiny", "--out", "mine", folder=tmp_path))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
