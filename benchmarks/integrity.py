"""Damaged checkpoints: does reading refuse them? Shoal's in every way a disk may fail, beside torch's DCP.

A small model's checkpoint, written by several ranks, is damaged again and again; each time it is read as a training run
would. It counts as refused if reading says so and not one element has been given a value that was never written. The
same bits of the same elements are then flipped in a checkpoint of DCP with the same tensors.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damages import Damages, done, element
from record import record
from torch import Tensor

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.launch import local
from shoal.launch.ranks import run_ranks
from shoal.models.decoder import build
from shoal.models.initial import fill
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.train import optimizer as optimizers
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.read import Checkpoint, Wanted
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.optimizer import LossScale
from shoal.train.state import State

MODEL = PRESETS["tiny"].model_copy(
    update={"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 61}
)
SECONDS = 120.0
Tensors = dict[tuple[str, str], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=200, help="beside DCP")
    parser.add_argument("--layout", default="dp=2,fsdp=2")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    local.warm_workers((*local.PRELOAD, "integrity"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(Layout.parse(options.layout).world, write, (options.layout, folder), SECONDS)
        place = DirectoryStorage(folder)
        damages = Damages(place.at(4), place.at(3), options.seed)
        drawn, refused, silent = campaign(place.at(4), damages, options.damages)
        ours, theirs = beside_dcp(place.at(4), folder / "dcp", damages, options.flips)
    record(
        "integrity",
        layout=options.layout,
        seed=options.seed,
        damages=options.damages,
        refused=sum(refused.values()),
        by_kind={kind: {"damages": count, "refused": refused[kind]} for kind, count in sorted(drawn.items())},
        accepted=silent,
        flips_beside_dcp=options.flips,
        flips_refused_by_shoal=ours,
        flips_refused_by_dcp=theirs,
    )


def write(rank: int, world: int, store: dist.Store, layout: str, folder: Path) -> None:
    """The checkpoints of two steps."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"), store)
    placed = apply(build(MODEL), mesh, TuneSection(), partial(fill, model=MODEL, seed=0), seq=8)
    pieces = placed.gradients.pieces
    optimizer = optimizers.build(pieces, Recipe())
    state = State(MODEL, placed, optimizer, Recipe(), LossScale(), mesh)
    saver = Saver("disk", DirectoryStorage(folder), state.new_stage(), mesh, "integrity")
    for step in range(1, 5):
        for number, piece in enumerate(pieces):
            # Different values everywhere, so that no two pieces are alike.
            numbers = torch.Generator().manual_seed(1000 * step + number)
            piece.tensor.grad = torch.rand(piece.tensor.shape, generator=numbers)
        optimizer.step()
        if step >= 3:
            saver.start(state.manifest(step, step * 8, {}), state.states())
            saver.finish()
            assert not saver.take_results()[0].error
    mesh.hosts.wait_for_first_rank()


def campaign(path: Path, damages: Damages, count: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """How many were drawn and refused, by kind; and those that were not."""
    written = whole(Checkpoint(path))
    drawn: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    accepted = []
    for damage in damages.draw(count):
        drawn[damage.kind] += 1
        with done(damage, path, damages.content):
            if refuses(path, written):
                refused[damage.kind] += 1
            else:
                accepted.append(f"{damage.kind}: {damage.what}")
    Checkpoint(path).verify()
    return drawn, refused, accepted


def refuses(path: Path, written: Tensors) -> bool:
    """Whether reading everything raises, having given no element a value other than the one that was written."""
    into = {key: torch.full_like(tensor, torch.nan) for key, tensor in written.items()}
    try:
        checkpoint = Checkpoint(path, threads=1)
        checkpoint.read([Wanted(*key, (0,) * tensor.dim(), tensor) for key, tensor in into.items()])
    except Damaged:
        return all(bool(((into[key] == written[key]) | into[key].isnan()).all()) for key in written)
    return False


def whole(checkpoint: Checkpoint) -> Tensors:
    keys = {(piece.state, piece.tensor) for piece in checkpoint.manifest.pieces}
    return {key: checkpoint.tensor(*key) for key in sorted(keys)}


def beside_dcp(path: Path, theirs: Path, damages: Damages, count: int) -> tuple[int, int]:
    """The same bits of the same elements flipped in both: how many each refuses."""
    checkpoint = Checkpoint(path)
    written = whole(checkpoint)
    names = {key: ".".join(key) for key in written}
    dcp.save({names[key]: tensor for key, tensor in written.items()}, checkpoint_id=theirs, no_dist=True)
    (file,) = theirs.glob("*.distcp")
    original = file.read_bytes()
    ours = refused = 0
    for _ in range(count):
        flip = damages.flip()
        with done(damages.flipped(flip), path, damages.content):
            ours += refuses(path, written)
        piece = next(
            piece
            for piece in damages.pieces
            if piece.file == flip.file and 0 <= flip.position - piece.position < piece.bytes
        )
        tensor = written[piece.state, piece.tensor]
        start = original.index(tensor.numpy().tobytes())
        content = bytearray(original)
        shape = tuple(tensor.shape)
        content[start + element(piece, flip.position - piece.position, shape, tensor.itemsize)] ^= (
            1 << flip.bit
        )
        file.write_bytes(content)
        refused += dcp_refuses(theirs, written, names)
    return ours, refused


def dcp_refuses(path: Path, written: Tensors, names: dict[tuple[str, str], str]) -> bool:
    into: dict[str, Any] = {names[key]: torch.zeros_like(tensor) for key, tensor in written.items()}
    try:
        dcp.load(into, checkpoint_id=path, no_dist=True)
    except Exception:  # whatever it says, it did not load
        return True
    same = all(
        torch.equal(into[names[key]].view(torch.uint8), tensor.view(torch.uint8))
        for key, tensor in written.items()
    )
    assert not same, "the flip did not reach a tensor"
    return False


if __name__ == "__main__":
    main()
