"""A run of one's own loop is saved, and goes on in other layouts and worlds as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks
from tests.train.library.small import (
    BATCH,
    Case,
    Result,
    assert_same,
    build,
    image_loss,
    optimizer_of,
    pieces_of,
    plain,
    rows,
    schedule_of,
)
from transformers import AutoModelForCausalLM

import shoal
from shoal.cli.main import main
from shoal.facts.problem import BadInput
from shoal.train.checkpoint.listing import list_checkpoints
from shoal.train.checkpoint.read import Checkpoint

# Layouts one after the other, each with the step that it goes to.
CHAIN = [
    (2, "fsdp=2", 2),
    (2, "fsdp=2,zero=1,micro=2", 3),
    (4, "dp=2,fsdp=2", 4),
    (2, "dp=2,offload=optimizer:0.5", 5),
    (1, "dp=1,micro=4", 7),
]


def go_on(
    rank: int, world: int, directory: Path, links: list[tuple[str, int]], kind: str = "gpt2"
) -> list[Result]:
    results = []
    for layout, total in links:
        with shoal.run(layout, dir=directory, batch=BATCH, clip=0.5) as run:
            model = build(kind)
            if rank:
                torch.nn.init.zeros_(next(model.parameters()))
            optimizer = optimizer_of(model)
            model, optimizer, loader, scheduler = run.prepare(
                model, optimizer, rows(kind), schedule_of(optimizer)
            )
            losses, norms = [], []
            for _ in range(3):  # epochs, as in the script that was never interrupted
                for batch in run.steps(loader):
                    if run.done == total:
                        break
                    losses.append(float(run.step(model, batch)))
                    norms.append(float(run.grad_norm))
                    scheduler.step()
            saved = run.save()
            assert saved.name == f"step-{total:08d}"
            results.append(Result(losses, norms, pieces_of(run)))
    return results


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Result]]]:
    directory = tmp_path_factory.mktemp("library") / "run"
    results: list[list[Result]] = []
    number = 0
    while number < len(CHAIN):
        world = CHAIN[number][0]
        links = []
        while number < len(CHAIN) and CHAIN[number][0] == world:
            links.append(CHAIN[number][1:])
            number += 1
        ranks = run_ranks(world, go_on, directory, links)
        results += [[one[link] for one in ranks] for link in range(len(links))]
    return directory, results


def test_a_chain_of_layouts_is_one_run(chained: tuple[Path, list[list[Result]]]) -> None:
    losses, norms, values, gradients = plain(Case("gpt2", "", clip=0.5, scheduled=True), 7)
    begin = 0
    for results in chained[1]:
        taken = len(results[0].losses)
        for one in results:
            assert one.losses == pytest.approx(losses[begin : begin + taken], abs=1e-12)
            assert one.norms == pytest.approx(norms[begin : begin + taken], abs=1e-12)
        begin += taken
    assert begin == 7
    last = [Result(losses, norms, one.pieces) for one in chained[1][-1]]
    assert_same(last, (losses, norms, values, gradients))


@pytest.mark.parametrize("kind, axis", [("llama", "tp"), ("qwen3", "pp")])
def test_tensor_ranks_and_stages_save_for_all_others(tmp_path: Path, kind: str, axis: str) -> None:
    links = [(f"{axis}=2", 2), ("fsdp=2", 3), (f"{axis}=2,micro=2", 4)]
    results = run_ranks(2, go_on, tmp_path, links, kind)
    expected = plain(Case(kind, "", clip=0.5, scheduled=True), 4)
    for one in results:
        assert [loss for link in one for loss in link.losses] == pytest.approx(expected[0], abs=1e-12)
    assert_same([Result(*expected[:2], one[-1].pieces) for one in results], expected)


def export_each(rank: int, world: int, into: Path) -> None:
    for kind, layout in (
        ("llama", "tp=2"),
        ("qwen3", "pp=2,offload=optimizer"),
        ("vision", "fsdp=2,zero=1"),
    ):
        with shoal.run(layout, dir=into / f"run-{kind}", batch=BATCH) as run:
            model = build(kind)
            model, _, loader = run.prepare(model, optimizer_of(model), rows(kind))
            for batch in run.steps(loader, total=2):
                run.step(model, batch, loss=image_loss if kind == "vision" else None)
            place = run.export(into / kind)
            if kind != "vision":
                run.export(into / f"{kind}-bf16", dtype=torch.bfloat16)
            with pytest.raises(BadInput, match="not empty"):  # on every rank
                run.export(place)


def test_a_run_is_exported_for_transformers(tmp_path: Path) -> None:
    run_ranks(2, export_each, tmp_path)
    for kind in ("llama", "qwen3"):
        values = plain(Case(kind, ""), 2)[2]
        for place, tolerance in ((tmp_path / kind, 1e-12), (tmp_path / f"{kind}-bf16", 1e-2)):
            loaded = AutoModelForCausalLM.from_pretrained(place)
            assert loaded.config.use_cache and loaded.config.architectures == [type(build(kind)).__name__]
            assert loaded.dtype == (torch.float64 if tolerance < 1e-3 else torch.bfloat16)
            found = dict(loaded.named_parameters())
            assert found.keys() == values.keys()
            for name, value in values.items():
                assert (found[name].double() - value).abs().max() <= tolerance * value.abs().max(), name
    vision, values = load_file(tmp_path / "vision" / "model.safetensors"), plain(Case("vision", ""), 2)[2]
    assert sorted(one.name for one in (tmp_path / "vision").iterdir()) == ["model.safetensors"]
    assert all(torch.allclose(vision[name], value, rtol=0, atol=1e-12) for name, value in values.items())


def test_of_a_peft_model_its_adapters_are_exported(tmp_path: Path) -> None:
    """Its weights under PEFT's names would be a directory that transformers loads as random ones."""
    from peft import LoraConfig, PeftModel, get_peft_model

    build("llama").float().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    tokens = torch.arange(8)[None]
    with shoal.run("dp=1", dir=tmp_path / "run", batch=BATCH) as run:
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        trained = [one for one in model.parameters() if one.requires_grad]
        model, _, loader = run.prepare(model, torch.optim.AdamW(trained, lr=1e-2), rows("llama"))
        for batch in run.steps(loader, total=2):
            run.step(model, batch)
        run.export(tmp_path / "adapter")
        with torch.no_grad():
            expected = model(input_ids=tokens).logits
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert held and all("lora_" in name for name in held)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        before = base(input_ids=tokens).logits
        after = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(input_ids=tokens).logits
    assert torch.allclose(after, expected, rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-4


def test_every_byte_is_accounted_for(chained: tuple[Path, list[list[Result]]]) -> None:
    """As a checkpoint of ``shoal train``: listed and verified by the same command."""
    found = list_checkpoints(chained[0])
    assert [one.step for one in found] == [2, 3, 4, 5, 7] and not any(one.damage for one in found)
    checkpoint = Checkpoint(found[-1].place, 7)
    checkpoint.verify()
    assert checkpoint.states == {"weight", "exp_avg", "exp_avg_sq"}
    assert set(checkpoint.manifest.shapes) == {name for name, _ in build("gpt2").named_parameters()}


def test_only_its_script_can_export_it(
    chained: tuple[Path, list[list[Result]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for to in ("hf", "peft"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", "export", str(chained[0]), str(tmp_path / to), "--to", to])
        assert ended.value.code == 2 and "run.export(DIR)" in capsys.readouterr().err


def test_another_model_is_refused(chained: tuple[Path, list[list[Result]]]) -> None:
    with shoal.run("dp=1", dir=chained[0]) as run:
        model = build("llama")
        with pytest.raises(BadInput, match="GPT2LMHeadModel"):
            run.prepare(model, optimizer_of(model))


def test_a_damaged_checkpoint_is_never_continued(tmp_path: Path) -> None:
    for total in (1, 2):
        go_on(0, 1, tmp_path, [("dp=1", total)])
    (file,) = [
        path for path in (tmp_path / "checkpoints" / "step-00000002").iterdir() if path.suffix != ".json"
    ]
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert len(go_on(0, 1, tmp_path, [("dp=1", 3)])[0].losses) == 2
    assert (tmp_path / "checkpoints" / "damaged-step-00000002").is_dir()


class Counting(torch.nn.Module):
    """Has a buffer of integers, a frozen part and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.norm(x))).square().mean()


def test_buffers_and_frozen_parts_are_saved_too(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Counting()
        with shoal.run("dp=1", dir=tmp_path) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            if not seed:
                for number in range(3):
                    run.step(model, (torch.randn(6, 4) + number,))
                run.save()
        kept.append({name: value.clone() for name, value in model.state_dict().items()})
    assert kept[0].keys() == kept[1].keys() and int(kept[1]["norm.num_batches_tracked"]) == 3
    for name, value in kept[0].items():
        assert torch.equal(value, kept[1][name]), name
