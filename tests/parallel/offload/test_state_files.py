"""States in files: read ahead and written behind through a ring that is smaller than they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import ReferenceType, ref

import pytest
import torch
from tests.ranks import run_ranks
from tests.thinned import thinned
from torch import Tensor

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.layout.offload import STRETCHES
from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import is_adapter
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.initial import Fill, Slice, fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload import direct_files, state_files
from shoal.parallel.offload.direct_files import DirectFiles, ScratchDamaged
from shoal.parallel.shards import weight
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

TINY, SEQ, STEPS = PRESETS["tiny"], 16, 3
PIECE, STRETCH = 8192, 4096  # bytes, elements


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectFiles]:
    """In pieces so small that a matrix has many, and with a ring that is far smaller than the states."""
    for module in (direct_files, state_files):
        monkeypatch.setattr(module, "PIECE", PIECE)
    monkeypatch.setattr(state_files, "RING", STRETCHES * STRETCH)
    opened = DirectFiles(tmp_path)
    yield opened
    opened.close()


def made(layout: str, files: DirectFiles | None = None, model: Model = TINY, **recipe: Any) -> Step:
    asked = Recipe(**{"seq": SEQ, "batch": 4, "steps": 10, "precision": "fp64", "clip": 0.5, **recipe})
    mesh, values = Mesh(Layout.parse(layout), 0, torch.device("cpu")), partial(fill, model=model, seed=0)
    return assemble(blueprint(model, asked), asked, TuneSection(), mesh, values, files=files)


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_frozen_base_is_made_one_parameter_at_a_time(
    base: Literal["bf16", "nf4"], files: DirectFiles
) -> None:
    """And its files have, to the bit, what memory would have."""
    adapters = Adapters(rank=2, alpha=4.0, targets=("q_proj", "down_proj"), base=base)
    model = TINY.model_copy(
        update={"hidden": 64, "heads": 4, "head_dim": 16, "ffn": 128, "adapters": adapters}
    )
    given: list[ReferenceType[Tensor]] = []
    together: list[int] = []

    def watched(slices: list[tuple[str, Slice]]) -> None:
        given.extend(ref(part.local) for name, part in slices if not is_adapter(name))
        together.append(sum(one() is not None for one in given))
        fill(slices, model=model, seed=0)

    asked = Recipe(seq=SEQ, batch=4, steps=10, precision="fp32")

    def frozen(layout: str, give: Fill) -> dict[str, Tensor]:
        mesh = Mesh(Layout.parse(layout), 0, torch.device("cpu"))
        opened = files if "nvme" in layout else None
        step = assemble(blueprint(model, asked), asked, TuneSection(), mesh, give, files=opened)
        assert all((part.read is not None) == ("nvme" in layout) for _, part in step.placed.frozen)
        return {name: part.values for name, part in step.placed.frozen}

    found = frozen("offload=params@nvme", watched)
    assert max(together) == 1
    expected = frozen("dp=1", partial(fill, model=model, seed=0))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_modules_of_one_unit_are_gathered_before_their_files_are_written(tmp_path: Path) -> None:
    """Without a tied head the last block and the last norm are one: it is gathered once, and not from its files."""
    run_ranks(2, _last_unit, tmp_path)


def _last_unit(rank: int, world: int, directory: Path) -> None:
    (directory / str(rank)).mkdir()
    files, model = DirectFiles(directory / str(rank)), TINY.model_copy(update={"tied": False})
    asked = Recipe(seq=SEQ, batch=4, steps=10, precision="fp64")
    mesh, values = (
        Mesh(Layout.parse("fsdp=2,offload=params@nvme"), rank, torch.device("cpu")),
        partial(fill, model=model, seed=0),
    )
    step = assemble(blueprint(model, asked), asked, TuneSection(), mesh, values, files=files)
    assert all(bool(part.values.isfinite().all()) for _, part in step.placed.weights)
    files.close()


def batches(step: Step, number: int) -> list[Batch]:
    micro, made = step.mesh.layout.micro_batch(4), []
    for first in range(0, 4, micro):
        rows = torch.arange(first, first + micro)
        tokens = (torch.arange(SEQ) * 7 + rows[:, None] * 13 + number) % TINY.vocab
        positions = torch.arange(SEQ).expand(micro, SEQ).contiguous()
        made.append(Batch(tokens, tokens.roll(-1, 1), positions, None, rows, tokens.numel()))
    return made


def trained(step: Step) -> tuple[list[float], list[Tensor]]:
    """Losses, and all that the optimizer keeps."""
    losses = [step(number, batches(step, number), 4 * SEQ).loss for number in range(1, STEPS + 1)]
    kept = []
    for piece in step.pieces:
        kept.append(weight(piece).detach().clone())
        for kind, state in sorted(step.optimizer.state[piece.tensor].items()):
            kept.append((state if piece.filed is None or not state.ndim else piece.filed.read(kind)).clone())
    return losses, kept


@pytest.mark.parametrize(
    ("layout", "recipe"),
    thinned(
        [
            ("offload=optimizer@nvme", {}),
            ("micro=1,offload=optimizer:0.5@nvme", {}),
            ("offload=optimizer@nvme", {"optimizer": "sgd"}),
            ("micro=2,offload=optimizer@nvme", {"precision": "bf16"}),
            (
                "offload=optimizer@nvme",
                {"precision": "bf16", "states": "bf16"},
            ),  # rounded by where an element is
            # Weights too, and gradients while they wait.
            ("offload=params@nvme", {}),
            ("offload=optimizer@nvme+params:0.5@nvme", {"precision": "bf16"}),
            # Squares of gradients that add up in files are summed in another order: without clipping.
            ("micro=1,recompute=full,offload=params:0.4@nvme", {"optimizer": "sgd", "clip": 0.0}),
            ("micro=2,offload=params@nvme", {"precision": "bf16", "clip": 0.0}),
            ("offload=params@nvme", {"precision": "bf16", "states": "bf16"}),
            # Weights alone: states and gradients are in memory.
            ("micro=2,recompute=full,offload=optimizer+params@nvme", {"precision": "bf16"}),
        ],
        3,
    ),
    ids=str,
)
def test_not_a_bit_differs_from_what_is_in_memory(files: DirectFiles, layout: str, recipe: Any) -> None:
    expected = trained(made(layout.replace("@nvme", ""), **recipe))
    step = made(layout, files, **recipe)
    losses, kept = trained(step)
    assert losses == expected[0]
    assert len(kept) == len(expected[1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, expected[1], strict=True))
    updated = Layout.parse(layout).offload[0]
    assert any(piece.filed is not None for piece in step.pieces) == updated.nvme
    assert any(piece.filed is not None or piece.held.home_file is not None for piece in step.pieces)


def test_memory_has_a_bounded_part_of_them(files: DirectFiles) -> None:
    step = made("offload=optimizer@nvme", files)
    trained(step)
    elements = sum(piece.stop - piece.start for piece in step.pieces)
    assert step.nvme_bytes == files.content == 3 * 8 * elements
    ring = step.host_bytes - 8 * elements  # beside gradients
    assert 0 < ring <= 3 * 8 * STRETCHES * STRETCH < 0.3 * step.nvme_bytes
    # What stands for a state takes no memory, and cannot be mistaken for one.
    piece = step.pieces[0]
    assert piece.tensor.untyped_storage().nbytes() == 8 and bool(piece.tensor.isnan().all())
    with pytest.raises(RuntimeError, match="more than one element"), torch.no_grad():
        piece.tensor.add_(1)


def test_what_a_disk_gives_back_wrong_ends_the_step_with_its_name(files: DirectFiles) -> None:
    step = made("offload=optimizer@nvme", files)
    trained(step)
    name = "00004.exp_avg_sq"
    with (files.directory / name).open("r+b") as file:
        file.write(b"other")
    with pytest.raises(ScratchDamaged, match=f"{name} gave back other bytes"):
        step(STEPS + 1, batches(step, 9), 4 * SEQ)


def test_an_update_that_is_refused_changes_nothing(files: DirectFiles) -> None:
    step = made("offload=optimizer@nvme", files)
    trained(step)
    before = [weight(piece).clone() for piece in step.pieces]
    step.refuse_above = lambda: 1e-9
    assert not step(STEPS + 1, batches(step, 9), 4 * SEQ).updated
    assert all(torch.equal(one, weight(piece)) for one, piece in zip(before, step.pieces, strict=True))
    step.refuse_above = lambda: float("inf")
    assert step(STEPS + 2, batches(step, 9), 4 * SEQ).updated
    assert not any(torch.equal(one, weight(piece)) for one, piece in zip(before, step.pieces, strict=True))


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activations_in_files_are_those_in_memory(files: DirectFiles, kind: str) -> None:
    layout = f"micro=2,recompute={kind},offload=activations"
    memory, disk = made(layout), made(f"{layout}@nvme", files)
    assert trained(memory)[0] == trained(disk)[0]
    assert disk.nvme_bytes == memory.host_bytes > 3 * disk.host_bytes > 0
    assert disk.host_bytes == 2 * memory.host_bytes / (TINY.layers - 1), "of two blocks"


def test_a_layout_with_files_and_none_given_is_refused() -> None:
    with pytest.raises(ValueError, match="no files were opened for it"):
        made("offload=optimizer@nvme")
