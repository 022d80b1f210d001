"""A model of two layers whose embedding and head are two matrices, as a pipeline of plain PyTorch needs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def untied_model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = json.loads(small_model.read_text()) | {"tie_word_embeddings": False}
    path = tmp_path_factory.mktemp("untied") / "config.json"
    path.write_text(json.dumps(config))
    return path
