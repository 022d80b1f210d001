"""Every Shoal form on the library's page is run as it stands there, on two processes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
FORMS = re.findall(r"^```python\n(# Shoal: [^\n]*\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def run_forms(rank: int, world: int, directory: Path, forms: list[str]) -> list[tuple[int, float]]:
    """The steps and the last loss of each."""
    import transformers
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import shoal

    os.chdir(directory)

    def build_model() -> torch.nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
        )
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model

    dataset = [{"input_ids": (torch.arange(8) * 3 + row) % 50} for row in range(32)]
    found = []
    for form in forms:
        names: dict[str, Any] = {"shoal": shoal, "torch": torch, "F": F, "DataLoader": DataLoader}
        names |= {"build_model": build_model, "dataset": dataset, "__name__": "script"}
        exec(form, names)
        found.append((names["run"].done, float(names["loss"])))
    return found


def test_every_shoal_form_runs(tmp_path: Path) -> None:
    assert len(FORMS) == 9 and len(re.findall(r"^### From", PAGE, re.MULTILINE)) == 5
    first, second = run_ranks(2, run_forms, tmp_path, FORMS)
    assert first == second
    assert [steps for steps, _ in first] == [4, 4, 3, 3, 8, 4, 4, 4, 6]
    assert all(0 < loss < 4.5 for _, loss in first)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]


def test_the_plan_of_the_page_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    import shoal

    (proof,) = re.findall(
        r"^```python\n(# From one process: [^\n]*\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
    (taught,) = [form.split("\n\n\nwith ")[0] for form in FORMS if "class Mlp" in form]
    names: dict[str, Any] = {"shoal": shoal, "torch": torch, "__name__": "script"}
    exec(f"{taught}\n\n\n{proof}", names)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["tp=2", "True"],
        ["fsdp=2,offload=optimizer", "True"],
    ]
