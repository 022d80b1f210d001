"""Adapters in models with experts, as ``peft`` has them: files in and out, five steps, merged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.conftest import Train
from tests.train.huggingface.models import load, save_random
from tests.train.huggingface.test_lora import export, logits, with_adapter
from tests.train.huggingface.test_round_trip import OPTIONS, plain_loop
from torch import nn

from shoal.facts.model import Adapters
from shoal.facts.model.presets import at
from shoal.facts.problem import BadInput
from shoal.parallel.packed import rounded
from shoal.train.huggingface.peft_files import PeftFiles

ATTENTION = ["q_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "kv_b_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def save_adapter(model: nn.Module, into: Path, modules: list[str] | str, weights: list[str]) -> None:
    """One that was trained for a while. ``weights``: of projections that PEFT finds by these alone."""
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=modules,
        target_parameters=[f"{one}.weight" for one in weights] or None,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(str(into))


def options(directory: Path, adapter: Path | None, targets: list[str], **others: Any) -> dict[str, Any]:
    lora = {"rank": 3, "alpha": 6, "targets": targets, **others}
    lora |= {} if adapter is None else {"init_from": str(adapter)}
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in lora.items())
    return {
        **OPTIONS,
        "model__path": str(directory),
        "model__init_from": str(directory),
        "model__lora": f"{{{table}}}",
    }


@pytest.mark.parametrize(
    ("family", "layout", "modules", "weights"),
    [
        ("deepseek_v3", "fsdp=2,ep=2", LATENT, MLP),
        ("mixtral", "tp=2", ATTENTION, []),
        pytest.param("qwen3_moe", "pp=2", ATTENTION, [], marks=pytest.mark.long),
        pytest.param("deepseek_v3", "fsdp=2,tp=2,ep=2", [], MLP, marks=pytest.mark.long),
        pytest.param("mixtral", "fsdp=2,ep=2,offload=params@nvme", ATTENTION, [], marks=pytest.mark.long),
    ],
)
def test_an_adapter_goes_on_as_in_a_plain_loop_and_back(
    family: str, layout: str, modules: list[str], weights: list[str], train: Train, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    save_adapter(save_random(family, base), adapter, modules, weights)
    reference = with_adapter(load(base), adapter)
    before = logits(reference)
    run = train("run", layout, **options(base, adapter, [*modules, *weights]))
    assert run.report.code == 0, run.report.message
    assert run.losses == pytest.approx(plain_loop(reference, run), abs=1e-5)
    trained = logits(reference)
    assert (trained - before).abs().max() > 1e-3  # five steps are seen
    assert export(run.directory.path, tmp_path / "peft", "peft") == 0
    assert (logits(with_adapter(load(base), tmp_path / "peft")) - trained).abs().max() < 1e-5
    assert export(run.directory.path, tmp_path / "merged") == 0
    assert (logits(load(tmp_path / "merged")) - trained).abs().max() < 1e-5


def test_merged_experts_of_four_bits_are_as_they_were_used(train: Train, tmp_path: Path) -> None:
    base = tmp_path / "model"
    wide = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    theirs = save_random("qwen3_moe", base, **wide).state_dict()
    run = train("run", "fsdp=2,ep=2", **options(base, None, ATTENTION, base="nf4"))
    assert run.report.code == 0, run.report.message
    assert export(run.directory.path, tmp_path / "merged") == 0
    ours = load(tmp_path / "merged").state_dict()
    for name in (one for one in theirs if ".experts." in one):
        packed = rounded(theirs[name].flatten(0, 1), torch.float32).view_as(theirs[name])
        assert torch.equal(ours[name], packed) and not torch.equal(packed, theirs[name]), name
    name = "model.layers.1.mlp.gate.weight"
    assert torch.equal(ours[name], theirs[name])


def test_what_peft_has_no_counterpart_for(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DoRA beside shared experts: refused as PEFT's files, merged all the same."""
    base = tmp_path / "model"
    save_random("deepseek_v3", base)
    run = train("run", "tp=2", **options(base, None, [*LATENT, "up_proj"], kind="dora"))
    assert export(run.directory.path, tmp_path / "peft", "peft") == 2
    assert "PEFT has no DoRA beside up_proj" in capsys.readouterr().err
    assert export(run.directory.path, tmp_path / "merged") == 0


@pytest.mark.parametrize(
    ("family", "modules", "what"),
    [
        ("qwen3_moe", [*ATTENTION, *MLP], "routed experts"),
        ("mixtral", "all-linear", "routed experts and routers"),
        ("mixtral", ["q_proj", "w1", "w2", "w3"], "routed experts"),
        ("deepseek_v3", [*LATENT, "gate"], "routers"),
    ],
)
def test_adapters_of_what_stays_frozen_are_refused_in_one_line(
    family: str, modules: Any, what: str, train: Train, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    save_adapter(save_random(family, base), adapter, modules, [])
    targets = LATENT if family == "deepseek_v3" else ATTENTION
    with pytest.raises(BadInput, match=f"has adapters of {what}, which stay frozen") as refused:
        train("run", **options(base, adapter, targets))
    assert len(refused.value.problems) == 1
    assert f"target_modules={json.dumps(targets)}" in refused.value.problems[0].fix


def test_names_that_peft_found_nothing_for_are_no_targets(tmp_path: Path) -> None:
    """Lists for dense models are used with Mixtral as well, where nothing has an MLP's names."""
    save_adapter(save_random("mixtral", tmp_path / "model"), tmp_path / "adapter", [*ATTENTION, *MLP], [])
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {*MLP} < {*written["target_modules"]}
    adapters = Adapters(rank=3, alpha=6.0, targets=tuple(ATTENTION))
    shape = at(str(tmp_path / "model")).model_copy(update={"adapters": adapters})
    PeftFiles(tmp_path / "adapter", shape)
    fewer = shape.model_copy(update={"adapters": adapters.model_copy(update={"targets": ("q_proj",)})})
    with pytest.raises(BadInput, match="has targets") as refused:
        PeftFiles(tmp_path / "adapter", fewer)
    assert refused.value.problems[0].fix == f"model.lora.targets = {json.dumps(sorted(ATTENTION))}"


def test_all_linear_is_every_projection_but_what_stays_frozen(train: Train, tmp_path: Path) -> None:
    base = tmp_path / "model"
    save_random("qwen3_moe", base)
    run = train("run", **options(base, None, []) | {"model__lora": '{rank = 3, targets = "all-linear"}'})
    assert run.report.code == 0, run.report.message
    names = {name.rsplit(".", 3)[1] for name in run.checkpoint().manifest.shapes}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
