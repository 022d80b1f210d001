"""What a rank of many reads of a checkpoint's metadata: commits and resumes with synthetic ranks, and Shoal's own code.

Every rank's pieces are those that the write plan gives it (``write_plan.py``, ``staging.py``); their lists and the
manifest are written and read as a run does, in files. Tensors have no content: the files of bytes are empty and as long
as they would be, so what is measured is the metadata alone.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from blake3 import blake3
from torch import nn

from shoal.facts.layout import Layout
from shoal.facts.layout.buckets import even_share
from shoal.facts.layout.parameter_groups import RankGroup, group_name, parameter_groups
from shoal.facts.layout.ranks import coordinates
from shoal.facts.layout.stages import Stage, cut
from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import intersect, views_by_parameter
from shoal.facts.model.parameters import EMBEDDING, Parameter, by_name, parameters
from shoal.facts.model.presets import PRESETS
from shoal.facts.model.tensor_split import box_slices, tensor_part
from shoal.facts.recipe import Recipe
from shoal.facts.stored_states import Keeps
from shoal.parallel.shards import HeldParameter, Shard, piece_boxes
from shoal.train.checkpoint import parts
from shoal.train.checkpoint.manifest import Manifest, StoredPiece, identity_hash
from shoal.train.checkpoint.peer_memory import file_of
from shoal.train.checkpoint.read import Checkpoint, Wanted
from shoal.train.checkpoint.staging import StagedBox
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.checkpoint.write_plan import parts_by_views

STATES = ("weight", "exp_avg", "exp_avg_sq")
STEP = 100


class SyntheticMesh:
    """A rank's place in a layout, without any group."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank, self.world = layout, rank, layout.world
        self.coords = coordinates(rank, layout)

    def index_in(self, ranks: RankGroup) -> int:
        return self.rank // ranks.stride % ranks.size


class SyntheticRanks:
    """What each rank of a layout holds and writes of a model."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.stages = cut(model, layout.pp)
        self.views = views_by_parameter(model)
        self.groups = parameter_groups(layout, model.experts is not None, lora=False)
        self.of_stage = [self._of_stage(stage) for stage in self.stages]

    def _of_stage(self, stage: Stage) -> list[Parameter]:
        def held(parameter: Parameter) -> bool:
            if parameter.layer is not None:
                return parameter.layer in stage.layers
            return stage.first if parameter.name == EMBEDDING else stage.last

        # A tied head is no tensor of its own.
        return [one for one in by_name(self.model).values() if one.name in self.views and held(one)]

    def shards(self, rank: int) -> list[Shard]:
        mesh = SyntheticMesh(self.layout, rank)
        found = []
        for parameter in self.of_stage[mesh.coords["pp"]]:
            part = tensor_part(parameter, self.layout.tp, mesh.coords["tp"])
            group = self.groups[group_name(parameter)]
            ranks, index = group.sharded.size, mesh.index_in(group.sharded)
            rows, rest = part.box.shape[0], math.prod(part.box.shape[1:])
            share = even_share(rows, ranks)
            first, stop = min(index * share, rows), min((index + 1) * share, rows)
            tensor = nn.Parameter(torch.empty((stop - first) * rest, device="meta"))
            held = HeldParameter(parameter.name, mesh.coords["pp"], tensor, part, group, False)
            found.append(Shard(held, tensor, first * rest, stop * rest, True))
        return [shard for shard in found if shard.stop > shard.start]

    def pieces(self, rank: int) -> list[StoredPiece]:
        """As a save lists them; the hashes are of no bytes."""
        mesh = SyntheticMesh(self.layout, rank)
        written = parts_by_views(self.views, self.shards(rank), mesh)  # type: ignore[arg-type]
        found, position = [], 0
        for state in STATES:
            for part in written:
                lot = StagedBox(state, part, torch.float32, position)
                name = blake3(f"{rank} {state} {position}".encode()).hexdigest()
                found.append(lot.entry(file_of(rank), name))
                position = lot.end
        return found

    def wanted(self, rank: int) -> Iterator[Wanted]:
        """What a rank reads when it resumes, as ``State.restore`` asks for it."""
        for shard in self.shards(rank):
            for (offset, shape), _ in piece_boxes(shard, 0, shard.stop - shard.start):
                for view in self.views[shard.name]:
                    overlap = intersect(view, offset, shape)
                    if overlap is None:
                        continue
                    into = torch.empty(shape, device="meta")[
                        box_slices(overlap.slice_offset, overlap.slice_shape)
                    ]
                    into = into[0] if view.stacked else into.T if view.transposed else into
                    for state in STATES:
                        yield Wanted(state, view.tensor, overlap.tensor_offset, into)


class CountingStorage(DirectoryStorage):
    """Counts what is done to files, and the bytes of metadata that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, durable=False)
        self.operations = self.bytes = 0

    def size(self, step: int, file: str) -> int:
        self.operations += 1
        return super().size(step, file)

    def read(self, step: int, file: str, position: int, into: memoryview) -> None:
        self.operations += 1
        self.bytes += into.nbytes
        super().read(step, file, position, into)

    def write(self, step: int, attempt: str, file: str, content: Iterable[memoryview]) -> str:
        self.operations += 1
        return super().write(step, attempt, file, content)


def write(ranks: SyntheticRanks, place: CountingStorage) -> dict[str, float]:
    """Commit a checkpoint of all ranks, as their savers do; what it cost the first of them."""
    world, operations = ranks.layout.world, 0
    entries, coverages, inline = [], [], []
    began = time.process_time()
    for rank in range(world):
        before, pieces = place.operations, ranks.pieces(rank)
        if parts.listed_apart(len(pieces), world):
            text = parts.list_text(pieces)
            name = parts.list_name(file_of(rank))
            place.write(STEP, "bench", name, [memoryview(text.encode())])
            entries.append(parts.part_of(name, text, pieces))
            coverages.append(parts.coverage(pieces))
        else:
            inline += pieces
        place.write(STEP, "bench", file_of(rank), [])
        os.truncate(place.aside(STEP, "bench") / file_of(rank), sum(piece.bytes for piece in pieces))
        operations = max(operations, place.operations - before)
    synthetic = time.process_time() - began
    began, before = time.process_time(), place.operations
    manifest = _manifest(ranks.model).model_copy(update={"pieces": tuple(inline)})
    if entries:
        manifest = parts.in_parts(manifest, entries, parts.index_of(coverages), set(STATES))
    text = manifest.to_text()
    place.commit(STEP, "bench", text)
    return {
        "pieces": manifest.count,
        "manifest_bytes": len(text),
        "metadata_bytes": len(text) + sum(part.bytes for part in manifest.parts),
        "commit_operations_of_a_rank": operations,
        "commit_operations_of_the_first_rank": operations + place.operations - before,
        "commit_index_cpu_s": round(time.process_time() - began, 3),
        "synthetic_cpu_s": round(synthetic, 1),
    }


def _manifest(model: Model) -> Manifest:
    identity = {f"recipe.{name}": value for name, value in Recipe().model_dump(mode="json").items()}
    assert Keeps.from_identity(identity).alike
    return Manifest(
        step=STEP,
        samples=STEP,
        model=model.model_dump(mode="json"),
        identity=identity,
        recipe=identity_hash(identity),
        scalars={"updates": float(STEP), "loss_scale": 1.0, "quiet_steps": 0.0},
        shapes={parameter.name: parameter.shape for parameter in parameters(model)},
        pieces=(),
    )


def resume(model: str, layout: str, rank: int, path: str) -> dict[str, float]:
    """In this process: what one rank of a layout does to a checkpoint before it reads its tensors."""
    ranks, place = SyntheticRanks(PRESETS[model], Layout.parse(layout)), CountingStorage(Path(path))
    wanted = list(ranks.wanted(rank))
    began, cpu = time.perf_counter(), time.process_time()
    checkpoint = Checkpoint(place, STEP, 2, (rank, ranks.layout.world))
    needed = checkpoint.needed(wanted)
    assert needed, "a rank that needs nothing"
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
        "bytes": place.bytes,
        "operations": place.operations,
        "parts": checkpoint.parts_opened,
        "pieces": len(needed),
    }


def resume_elsewhere(model: str, layout: str, rank: int, path: Path) -> dict[str, float]:
    """In a process of its own, as a rank is."""
    call = f"scale_checkpoint.resume({model!r}, {layout!r}, {rank}, {str(path)!r})"
    code = f"import json; from benchmarks import scale_checkpoint; print(json.dumps({call}))"
    command = [sys.executable, "-c", code]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
