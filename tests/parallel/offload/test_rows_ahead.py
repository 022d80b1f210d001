"""Rows in files, under FSDP: all but the first of a pass are on their way before they are asked for."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Experts, Model
from shoal.facts.model.parameters import block_of
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import DirectFiles
from shoal.parallel.offload.rows_ahead import RowsAhead
from shoal.parallel.shards import weight
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

SHAPE = Model(**{**PRESETS["tiny"].model_dump(), "layers": 4})
EXPERTS = SHAPE.model_copy(
    update={"family": "qwen3_moe", "experts": Experts(count=4, active=2, ffn=16), "qk_norm": True}
)
SEQ, ROWS = 16, 4

# Blocks in the order that a micro-batch asks for them: was each on its way by then? The last unit stays gathered.
PASS = [(0, False), (1, True), (2, True), (3, True), (2, True), (1, True), (0, True)]
PASS_OF_TWO = [(0, False), (1, False), (2, True), (3, True), (0, True), (1, True)]
# Experts are asked for with their blocks; the last unit's, which do not stay, after the unit before it.
PASS_OF_EXPERTS = [(0, False), (1, True), (2, True), (3, True), (2, True), (3, True), (1, True), (0, True)]
PASS_OF_TWO_OF_EXPERTS = [
    *[(0, False), (1, False)] * 2, *[(2, True), (3, True)] * 2, *[(0, True), (1, True)] * 2, (2, True), (3, True),
]  # fmt: skip


def made(shape: Model, layout: str, rank: int, files: DirectFiles | None) -> Step:
    recipe = Recipe(seq=SEQ, batch=ROWS, steps=10, precision="fp64", clip=0.0)
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    values = partial(fill, model=shape, seed=0)
    return assemble(blueprint(shape, recipe), recipe, TuneSection(), mesh, values, files=files)


def batches(step: Step, rank: int) -> list[Batch]:
    found = []
    for places in step.mesh.layout.positions(ROWS, rank):
        rows = torch.tensor(places)
        tokens = (torch.arange(SEQ) * 7 + rows[:, None] * 13) % SHAPE.vocab
        positions = torch.arange(SEQ).expand_as(tokens).contiguous()
        found.append(Batch(tokens, tokens.roll(-1, 1), positions, None, rows, tokens.numel()))
    return found


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        (SHAPE, "fsdp=2,micro=1,offload=params@nvme", 2 * PASS),
        (SHAPE, "fsdp=2,unit=2,recompute=full,offload=params@nvme", PASS_OF_TWO),
        (EXPERTS, "fsdp=2,offload=params@nvme", PASS_OF_EXPERTS),
        (EXPERTS, "fsdp=2,unit=2,offload=params@nvme", PASS_OF_TWO_OF_EXPERTS),
    ],
    ids=["dense", "dense, two blocks at once", "experts", "experts, two blocks at once"],
)
def test_all_but_the_first_of_a_pass_are_on_their_way(
    tmp_path: Path, shape: Model, layout: str, expected: list[tuple[int, bool]]
) -> None:
    for rank, (asked, left) in enumerate(run_ranks(2, _steps, shape, layout, tmp_path)):
        assert asked == expected, rank
        assert left == 0, "on its way, and never asked for"


def _steps(
    rank: int, world: int, shape: Model, layout: str, place: Path
) -> tuple[list[tuple[int, bool]], int]:
    """Two steps, with not a bit of difference from weights in memory: what the second one asked for."""
    (place / str(rank)).mkdir()
    files = DirectFiles(place / str(rank))
    in_memory = made(shape, layout.replace("@nvme", ""), rank, None)
    step = made(shape, layout, rank, files)
    labels = {piece.held.home_file: piece.held.label for piece in step.pieces}
    asked: list[tuple[int | None, bool]] = []
    seen: list[RowsAhead] = []
    give = RowsAhead.give

    def noting(self: RowsAhead, file: Any, rows: Tensor) -> None:
        asked.append((block_of(labels[file]), file in self.coming))
        seen.append(self)
        give(self, file, rows)

    RowsAhead.give = noting  # type: ignore[method-assign]
    for number in (1, 2):
        asked.clear()
        for one in (in_memory, step):
            one(number, batches(one, rank), ROWS * SEQ)
    for mine, theirs in zip(step.pieces, in_memory.pieces, strict=True):
        assert torch.equal(weight(mine), weight(theirs)), mine.name
    files.close()
    return [(block, ahead) for (block, ahead), _ in groupby(asked) if block is not None], len(seen[-1].coming)
