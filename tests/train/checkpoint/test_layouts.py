"""A checkpoint knows no layout: what any layout writes is the same, and any layout reads it back to the bit."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.train.checkpoint.shapes import small

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.tensor_split import range_boxes
from shoal.facts.recipe import Recipe
from shoal.models.decoder import build
from shoal.models.initial import Slice, fill, no_weights
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import piece_slices
from shoal.parallel.signed_store import SignedStore
from shoal.train import optimizer as optimizers
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.optimizer import LossScale
from shoal.train.state import State

KINDS = {"weight": 0, "exp_avg": 1, "exp_avg_sq": 2}
LAYOUTS = [
    "dp=1",
    "dp=3",
    "dp=2,fsdp=2",
    "dp=2,fsdp=2,zero=1",
    "fsdp=3,zero=2",
    "fsdp=4",
    "tp=4",
    "tp=2,fsdp=2",
    "pp=2,dp=2",
    "pp=2,tp=2",
    "fsdp=2,cp=2",
    "zero=1,cp=2",
]


def _placed(layout: str, rank: int, model: str, filled: bool) -> State:
    """A rank's state. ``filled``: every value is a hash of its name and place in the whole, whichever rank has it."""
    shape = small(model)
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"), domain=RANKS_OF_A_NODE.get(layout))
    first = partial(fill, model=shape, seed=0) if filled else no_weights
    placed = apply(build(shape), mesh, TuneSection(bucket_mb=0.01), first, seq=8)
    optimizer = optimizers.build(placed.gradients.pieces, Recipe())
    state = State(shape, placed, optimizer, Recipe(), LossScale(), mesh)
    if filled:
        for piece in state.pieces:
            held = optimizer.state[piece.tensor]
            held["step"] = torch.tensor(5.0)
            for kind in ("exp_avg", "exp_avg_sq"):
                held[kind] = torch.zeros_like(piece.tensor, requires_grad=False)
                fill(((piece.name, part) for part in piece_slices(piece, held[kind])), shape, KINDS[kind])
    return state


def _save(rank: int, world: int, layout: str, model: str, path: Path) -> None:
    _write(_placed(layout, rank, model, filled=True), world, path)


def _write(state: State, world: int, path: Path) -> None:
    saver = Saver("disk", DirectoryStorage(path), state.new_stage(), state.mesh, "test")
    if world > 1:
        saver.store = SignedStore(torch.distributed.distributed_c10d._get_default_store(), b"s" * 32)
    saver.start(state.manifest(3, 24, {}), state.states())
    saver.finish()
    assert [saved.error for saved in saver.take_results()] == [""]


def _load(rank: int, world: int, layout: str, model: str, path: Path, then_write: Path | None = None) -> None:
    state = _placed(layout, rank, model, filled=False)
    assert state.restore(Checkpoint(DirectoryStorage(path), 3)) == 3
    state.settle()
    for name, part in state.placed.weights:
        wanted = Slice(torch.empty_like(part.local), part.global_shape, part.offset)
        fill([(name, wanted)], state.model, 0)
        assert torch.equal(part.local, wanted.local), (layout, name)
    for piece, kind in itertools.product(state.pieces, ("exp_avg", "exp_avg_sq")):
        held = state.optimizer.state[piece.tensor]
        wanted = torch.empty_like(held[kind])
        fill(((piece.name, part) for part in piece_slices(piece, wanted)), state.model, KINDS[kind])
        assert torch.equal(held[kind], wanted), (layout, piece.name, kind)
        assert held["step"] == 5
    if then_write is not None:
        _write(state, world, then_write)


def _contents(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = Checkpoint(DirectoryStorage(path), 3)
    keys = {(piece.state, piece.tensor) for piece in checkpoint.manifest.pieces}
    return {key: checkpoint.tensor(*key) for key in keys}


WITH_EXPERTS = [
    "dp=1",
    "dp=2,ep=2",
    "fsdp=4,ep=2",
    "dp=2,fsdp=2,zero=1,ep=4",
    "dp=2,tp=2,ep=2",
    "dp=2,pp=2,ep=2",
    "fsdp=4,ep=4",
]
RANKS_OF_A_NODE = {"fsdp=4,ep=4": 2}


@pytest.mark.parametrize(
    "model", ["tiny", "gpt2", "pythia-6.9b", pytest.param("mixtral-8x7b", marks=pytest.mark.long)]
)
def test_any_layout_reads_what_any_other_wrote(model: str, tmp_path: Path) -> None:
    """Every layout reads what the last one wrote, and writes it again: tied, transposed and fused tensors too."""
    others = WITH_EXPERTS if model == "mixtral-8x7b" else ["dp=1", "dp=2,fsdp=2,zero=1", "tp=2,fsdp=2"]
    layouts = LAYOUTS if model == "tiny" else others
    last = tmp_path / "first"
    run_ranks(Layout.parse(layouts[0]).world, _save, layouts[0], model, last)
    whole = _contents(last)
    for layout in [*layouts[1:], layouts[0]]:
        path = tmp_path / layout
        run_ranks(Layout.parse(layout).world, _load, layout, model, last, path)
        found = _contents(path)
        assert found.keys() == whole.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, whole[key]), (layout, key)
        last = path


def test_ranks_write_equal_shares(tmp_path: Path) -> None:
    for layout in ("dp=2,fsdp=2", "dp=3", "fsdp=4"):
        world = Layout.parse(layout).world
        run_ranks(world, _save, layout, "tiny", tmp_path / layout)
        sizes = [file.stat().st_size for file in (tmp_path / layout / "step-00000003").glob("*.bin")]
        assert len(sizes) == world
        assert max(sizes) < 1.1 * min(sizes), sizes


def test_a_range_of_elements_is_a_few_boxes() -> None:
    for shape in ((7,), (3, 4), (2, 3, 4), (1, 1, 5)):
        array = torch.arange(torch.Size(shape).numel()).view(shape)
        for start, stop in itertools.combinations(range(array.numel() + 1), 2):
            boxes = list(range_boxes(shape, start, stop))
            found = [
                array[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in boxes
            ]
            assert torch.cat(found).tolist() == list(range(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
