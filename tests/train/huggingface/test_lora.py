"""Adapters beside a model of ``transformers``, with ``peft`` as the oracle: its files in and out, merged weights, and a
plain loop that trains its model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import Train
from tests.train.huggingface.models import load, save_random
from tests.train.huggingface.test_round_trip import OPTIONS, STEPS, plain_loop
from torch import Tensor, nn

from shoal.cli.main import main
from shoal.facts.model import Adapters
from shoal.facts.model.presets import at
from shoal.facts.problem import BadInput
from shoal.models.initial import whole
from shoal.train.huggingface.peft_files import PeftFiles

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def with_adapter(model: nn.Module, directory: Path) -> nn.Module:
    """The model and the adapter that lies there, to be trained further."""
    found: nn.Module = peft.PeftModel.from_pretrained(model, str(directory), is_trainable=True)
    return found


def save_adapter(model: nn.Module, into: Path, kind: str = "lora", rank: int = 3, **changes: Any) -> None:
    """One that was trained for a while; ``changes`` are made to its config's file."""
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=rank, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM", use_dora=kind == "dora"
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(str(into))
    written = into / "adapter_config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), **changes}))


def options(base: Path, adapter: Path | None = None, kind: str = "lora") -> dict[str, Any]:
    lora: dict[str, Any] = {"kind": kind, "rank": 3, "alpha": 6, "targets": TARGETS}
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in lora.items())
    table += f', init_from = "{adapter}"' if adapter is not None else ""
    return {
        **OPTIONS,
        "model__path": str(base),
        "model__init_from": str(base),
        "model__lora": f"{{{table}}}",
    }


def export(run: Path, into: Path, to: str = "hf") -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", str(run), str(into), "--to", to])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def logits(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, 257, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: Tensor = model.eval()(tokens).logits
    return found


@pytest.mark.parametrize(
    "family,layout,kind",
    [
        ("llama", "fsdp=2", "lora"),
        ("qwen2", "tp=2", "lora"),
        ("qwen3", "pp=2", "lora"),
        ("llama", "tp=2", "dora"),
        ("qwen2", "fsdp=2", "dora"),
        ("gemma2", "fsdp=2", "lora"),
        ("gemma3_text", "tp=2", "lora"),
    ],
)
def test_an_adapter_goes_on_as_in_a_plain_loop_and_back(
    family: str, layout: str, kind: str, train: Train, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    save_adapter(save_random(family, base), adapter, kind)
    reference = with_adapter(load(base), adapter)
    before = logits(reference)
    run = train("run", layout, **options(base, adapter, kind))
    assert run.report.code == 0, run.report.message
    assert run.losses == pytest.approx(plain_loop(reference, run), abs=1e-5)
    trained = logits(reference)
    assert (trained - before).abs().max() > 1e-3  # five steps are seen

    assert export(run.directory.path, tmp_path / "peft", "peft") == 0
    assert (logits(with_adapter(load(base), tmp_path / "peft")) - trained).abs().max() < 1e-5
    assert export(run.directory.path, tmp_path / "merged") == 0
    assert (logits(load(tmp_path / "merged")) - trained).abs().max() < 1e-5
    # What was frozen is not in the checkpoint; what it is, is.
    manifest = run.checkpoint().manifest
    assert all(".lora_" in name for name in manifest.shapes)
    assert manifest.identity["model.init_from"] == str(base)


def test_dropout_is_of_training_alone(train: Train, tmp_path: Path) -> None:
    """Two layouts draw the same masks; what is written knows none, but for PEFT's own note of it."""
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    save_adapter(save_random("llama", base), adapter, lora_dropout=0.5)
    values = options(base, adapter)
    without = train("without", **values)
    values["model__lora"] = values["model__lora"].replace("rank", "dropout = 0.2, rank")
    alone, run = train("alone", **values), train("run", "tp=2", **values)
    assert run.losses == pytest.approx(alone.losses, abs=1e-5)
    assert all(abs(one - other) > 1e-4 for one, other in zip(run.losses, without.losses, strict=True))

    assert export(run.directory.path, tmp_path / "peft", "peft") == 0
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_dropout"] == 0.2
    assert export(run.directory.path, tmp_path / "merged") == 0
    found = logits(with_adapter(load(base), tmp_path / "peft")), logits(load(tmp_path / "merged"))
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_lengths_of_rows_begin_as_those_of_the_frozen_weights(train: Train, tmp_path: Path) -> None:
    base = tmp_path / "model"
    model = save_random("qwen2", base)
    values = options(base, kind="dora") | {"recipe__steps": 1, "recipe__lr": 1e-12}
    run = train("run", "fsdp=2,tp=2", **values)
    weights = model.state_dict()
    for name in (one for one in run.checkpoint().manifest.shapes if "magnitude" in one):
        weight = weights[name.replace("lora_magnitude_vector", "weight")]
        found = run.checkpoint().tensor("weight", name)
        assert torch.allclose(found, weight.norm(dim=1), rtol=1e-6), name


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        ("all-linear", (*TARGETS[:2], "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        (r".*\.(q|v)_proj", ("q_proj", "v_proj")),
        (r".*\.1\..*\.q_proj", None),
    ],
    ids=["a word", "a pattern", "one layer"],
)
def test_targets_that_peft_finds_by_itself(
    targets: str, named: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """PEFT writes what a word has found as paths, and a pattern as it is; of one layer alone they are refused."""
    model = save_random("qwen2", tmp_path / "model")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(str(tmp_path / "adapter"))
    adapters = Adapters(rank=3, alpha=6.0, targets=named or ("q_proj",))
    shape = at(str(tmp_path / "model")).model_copy(update={"adapters": adapters})
    if named is None:
        with pytest.raises(BadInput, match=r"q_proj.lora_A.weight is None in .*, here \(3, 32\)"):
            PeftFiles(tmp_path / "adapter", shape)
        return
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.v_proj.lora_A.weight"
    part = torch.zeros(3, 32)
    PeftFiles(tmp_path / "adapter", shape).fill([(name, whole(name, part))])
    assert torch.equal(part, held[f"base_model.model.{name}"])
    fewer = shape.model_copy(update={"adapters": adapters.model_copy(update={"targets": ("q_proj",)})})
    with pytest.raises(BadInput, match="v_proj"):
        PeftFiles(tmp_path / "adapter", fewer)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    save_adapter(save_random("llama", tmp_path / "model"), tmp_path / "adapter")
    with pytest.raises(BadInput, match="holds an adapter") as refused:
        at(str(tmp_path / "adapter"))
    (problem,) = refused.value.problems
    assert f'init_from = "{tmp_path / "adapter"}"' in problem.fix


def test_families_that_fuse_projections_are_merged(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "model"
    save_random("gpt2", base)
    values = options(base) | {"model__lora": '{rank = 3, alpha = 6, targets = ["k_proj", "down_proj"]}'}
    run = train("run", "tp=2", **values)
    assert export(run.directory.path, tmp_path / "peft", "peft") == 2
    assert "fuses projections" in capsys.readouterr().err
    assert export(run.directory.path, tmp_path / "merged") == 0
    ours, theirs = load(tmp_path / "merged").state_dict(), load(base).state_dict()
    changed = {name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])}
    assert changed == {
        f"transformer.h.{layer}.{name}.weight" for layer in (0, 1) for name in ("attn.c_attn", "mlp.c_proj")
    }
    delta = ours["transformer.h.0.attn.c_attn.weight"] - theirs["transformer.h.0.attn.c_attn.weight"]
    checkpoint = run.checkpoint()
    a, b = (
        checkpoint.tensor("weight", f"model.layers.0.self_attn.k_proj.lora_{factor}.weight")
        for factor in "AB"
    )
    assert torch.allclose(delta[:, 32:64], (2.0 * b @ a).T, atol=1e-6)  # [in, out], keys in the middle
    assert not delta[:, :32].any() and not delta[:, 64:].any()


def test_a_run_goes_on_in_another_layout_and_writes_text(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "model"
    save_random("llama", base)
    values = options(base) | {"checkpoint__every": 2, "checkpoint__keep": 9}
    alone = train("alone", **values)
    run = train("run", "fsdp=2,zero=1", **values)
    for place in run.directory.checkpoints.iterdir():
        if place.name != "step-00000002":
            shutil.rmtree(place)
    run = train("run", "tp=2", **values)
    assert len(run.losses) == STEPS and run.losses == pytest.approx(alone.losses, abs=1e-5)
    ours, theirs = run.checkpoint(), alone.checkpoint()
    for name in theirs.manifest.shapes:
        assert torch.allclose(ours.tensor("weight", name), theirs.tensor("weight", name), atol=1e-5), name

    assert export(run.directory.path, tmp_path / "merged") == 0
    capsys.readouterr()
    written = []
    for place in (run.directory.path, tmp_path / "merged"):
        with pytest.raises(SystemExit) as ended:
            main(["generate", str(place), "the shoal", "--temperature", "0", "--tokens", "8", "--json"])
        assert ended.value.code == 0
        written.append(json.loads(capsys.readouterr().out)["text"])
    assert written[0] == written[1]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run.directory.path), "--step", "4", "--layout", "dp=1"])
    assert ended.value.code == 0

    shutil.rmtree(base)  # what the adapters stand beside
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(run.directory.path), "the shoal"])
    assert ended.value.code == 2
    assert f"beside the weights of {base}" in capsys.readouterr().err


@pytest.mark.long
def test_a_base_in_files_is_the_same_run(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a model directory, stopped and resumed in another layout; merged, evaluated and continued from."""
    base = tmp_path / "model"
    save_random("qwen2", base)
    values = options(base, kind="dora") | {"checkpoint__every": 2, "checkpoint__keep": 9}
    alone = train("alone", **values)
    run = train("run", "fsdp=2,offload=params@nvme", **values)
    assert run.losses == pytest.approx(alone.losses, abs=1e-5)
    for place in run.directory.checkpoints.iterdir():
        if place.name != "step-00000002":
            shutil.rmtree(place)
    run = train("run", "dp=1,recompute=full,offload=params:0.7@nvme", **values)
    assert len(run.losses) == STEPS and run.losses == pytest.approx(alone.losses, abs=1e-5)
    assert not list((run.directory.path / "scratch").glob("*"))
    for name in ("alone", "run"):
        assert export(tmp_path / name, tmp_path / f"{name}-merged") == 0
    ours, theirs = (load(tmp_path / f"{name}-merged").state_dict() for name in ("run", "alone"))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    capsys.readouterr()
    said = []
    for name in ("alone", "run"):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", str(tmp_path / name), "--json"])
        assert ended.value.code == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["sets"][0]["loss"] == pytest.approx(said[1]["sets"][0]["loss"], abs=1e-5)
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run.directory.path), "--step", "4", "--layout", "offload=params@nvme"])
    assert ended.value.code == 0
    values["model__init_from"], values["recipe__steps"] = str(run.directory.path), 2
    further = train("further", "offload=params@nvme", **values)
    assert further.report.code == 0, further.report.message


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"r": 4}, "model.lora.rank"),
        ({"lora_alpha": 8}, "model.lora.alpha"),
        ({"target_modules": ["q_proj"]}, "model.lora.targets"),
        ({"use_dora": True}, "model.lora.kind"),
        ({"use_rslora": True}, "use_rslora"),
        ({"peft_type": "IA3"}, "no LoRA adapter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_adapter_is_refused(changes: dict[str, Any], said: str, train: Train, tmp_path: Path) -> None:
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    save_adapter(save_random("llama", base), adapter, **changes)
    with pytest.raises(BadInput, match=said):
        train("run", **options(base, adapter))
    assert not (tmp_path / "run").exists()
