"""A fresh installation for each test of the gateway."""

from pathlib import Path
from typing import Any

import pytest

from keepgrad.policy import model
from tests.gateway.harness import site


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def place(tmp_path: Path, tiny: Path) -> Any:
    made = site(tmp_path, tiny)
    yield made
    made.ledger.close()
