"""A model of ``transformers``, trained by Shoal in some layout and exported, is the one that a plain loop trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.conftest import Run, Train
from tests.thinned import rest
from tests.train.huggingface.models import FAMILIES, load, save_random
from torch import Tensor, nn

from shoal.cli.main import main
from shoal.facts.config.file import load as load_config
from shoal.launch.local import prepared
from shoal.train.data.collection import Collection
from shoal.train.data.input import open_loader
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.optimizer import learning_rate

STEPS = 5
OPTIONS = {
    "recipe__steps": STEPS,
    "recipe__warmup": 2,
    "recipe__lr": 1e-3,
    "recipe__router_bias": 0.0,
    "checkpoint__every": STEPS,
    "evaluate__batches": 0,
    "evaluate__samples": 0,
    "cluster__on": "4xcpu",
    "fault__timeout": 120,
}
LAYOUTS = ("fsdp=2", "tp=2", "pp=2", "cp=2")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
# Of every family at least one with every test run; the others, with all that takes long.
QUICK = {
    *(("llama", layout) for layout in LAYOUTS),
    ("gemma2", "pp=2"),
    ("gemma3_text", "cp=2"),
    ("mistral", "tp=2"),
    ("qwen2", "pp=2"),
    ("qwen3", "cp=2"),
    ("phi3", "fsdp=2"),
    ("gpt2", "tp=2"),
    ("gpt_neox", "fsdp=2"),
    ("mixtral", "dp=2,ep=2"),
    ("qwen3_moe", "fsdp=2,ep=2"),
    ("deepseek_v3", "dp=2,ep=2"),
}
ALL = [
    *((family, layout) for family in FAMILIES for layout in LAYOUTS),
    *((family, layout) for family in EXPERTS for layout in ("dp=2,ep=2", "fsdp=2,ep=2")),
]
CASES = rest(ALL, QUICK.__contains__)


@pytest.mark.parametrize("family,layout", CASES)
def test_five_steps_are_those_of_a_plain_loop(family: str, layout: str, train: Train, tmp_path: Path) -> None:
    reference = save_random(family, tmp_path / "model")
    weights = str(tmp_path / "model")
    run = train("run", layout, model__path=weights, model__init_from=weights, **OPTIONS)
    assert run.report.code == 0, run.report.message

    losses = plain_loop(reference, run)
    assert run.losses == pytest.approx(losses, abs=1e-5)

    assert export(run.directory.path, tmp_path / "exported") == 0
    exported = load(tmp_path / "exported")
    tokens = torch.randint(0, 257, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = exported(tokens).logits, reference.eval()(tokens).logits
        untrained = load(tmp_path / "model")(tokens).logits
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - untrained).abs().max() > 1e-3  # five steps are seen


def export(run: Path, into: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", str(run), "--to", "hf", str(into), *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def plain_loop(model: nn.Module, run: Run) -> list[float]:
    """What anybody would write: cross-entropy, clipping, AdamW without decay of vectors."""
    config = load_config(run.directory.config).config
    recipe = config.recipe
    dataset = Collection.open(prepared(config.data, Console(stderr=True), config.evaluate))
    loader = open_loader(config, dataset, open_tokenizer("bytes"))
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
    )
    losses = []
    for step in range(1, STEPS + 1):
        batch = loader.rows(step, range(recipe.batch))
        loss = cross_entropy(model(batch.tokens).logits, batch.targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
