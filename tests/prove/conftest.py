"""A prover of a four-layer model: small enough for eight ranks on two cores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.facts.config.file import load
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.launch.local import prepared
from shoal.prove.parity import Prover, Rehearse
from shoal.prove.parity_rank import run_parity_rank

STEPS = 2


@pytest.fixture(scope="session")
def make_prover(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Prover]:
    """``make_prover("fp64", recipe__dropout=0.1)``: equal calls share their reference run."""
    home = tmp_path_factory.mktemp("parity")
    # Tied, with fewer key/value heads than the widest tensor group and a vocabulary that nothing divides.
    shape = PRESETS["tiny"].model_copy(
        update={"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 265}
    )
    model = home / "config.json"
    model.write_text(json.dumps(write_config(shape)))
    values = {
        "model.path": model,
        "data.source": corpus,
        "data.cache": home / "cache",
        "data.packing": "false",  # rows, and so ranks and micro-batches, differ in their number of targets
        "recipe.seq": 16,
        "recipe.batch": 8,
        "recipe.steps": 10,
        "recipe.dropout": 0.1,
        "recipe.clip": 0.1,
        "cluster.on": "1xcpu",
        "fault.timeout": 20,
    }
    provers: dict[str, Prover] = {}

    def make(precision: str = "fp64", run: Rehearse = run_parity_rank, **overrides: Any) -> Prover:
        changed = {**values, **{name.replace("__", "."): value for name, value in overrides.items()}}
        settings = [f"{name}={value}" for name, value in changed.items()]
        key = f"{precision} {settings}"
        if key not in provers:
            config = load(None, settings, "dp=1").config
            dataset = prepared(config.data, Console(stderr=True))
            folder = tmp_path_factory.mktemp("reference")
            provers[key] = Prover(config, dataset, STEPS, precision, folder)
        prover = provers[key]
        return replace(prover, rehearse=run)  # the same dictionary of references

    return make


@pytest.fixture(scope="session")
def small_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The config.json of another family's preset, made small."""

    def make(preset: str) -> str:
        update: dict[str, Any] = {
            "layers": 4,
            "hidden": 32,
            "heads": 4,
            "head_dim": 8,
            "ffn": 64,
            "vocab": 264,
        }
        shape = PRESETS[preset]
        update["kv_heads"] = 4 if shape.kv_heads == shape.heads else 2
        update["max_positions"] = 64
        if shape.window_layers is not None:
            update |= {"window": 5, "window_layers": (0, 2)}
        if shape.experts is not None:
            update["experts"] = shape.experts.model_copy(update={"count": 8, "active": 2, "ffn": 16})
        path = tmp_path_factory.mktemp(preset) / "config.json"
        path.write_text(json.dumps(write_config(shape.model_copy(update=update))))
        return str(path)

    return make
