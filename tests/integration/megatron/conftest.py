"""One trainer process for the tests of a module, left as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.trainer.backends.megatron import distributed
from tests.integration.megatron.support import make_config, make_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama with three query heads per KV head and an odd vocabulary."""
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", autouse=True)
def trainer(tiny: Path) -> Iterator[None]:
    distributed.initialize(make_config(tiny))
    yield
    distributed.shutdown()
