"""One rank's part of a parity run: a few steps, with every gradient and weight recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.facts.model.checkpoint_views import canonical_parameters
from shoal.launch.init_rank import init_rank
from shoal.parallel.full_tensors import Collector
from shoal.parallel.router_tally import ExpertLoad
from shoal.parallel.shards import Shard, gradient, weight
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.train.data.collection import Collection
from shoal.train.evaluate import heldout_loss, write_samples
from shoal.train.first_weights import first_weights
from shoal.train.program import Program
from shoal.train.scratch_files import open_files

PROMPT_TOKENS, WRITTEN_TOKENS = 8, 8

# A tensor's gradient may be zero except for rounding (a key bias, for one), and in a coarse precision a bias that
# starts at zero consists of such gradients' signs. Relative to itself rounding would look like an error, so the
# denominator is at least this fraction of the largest tensor of its kind.
FLOOR = {"gradient": 1e-3, "parameter": 1e-3}
COARSE_FLOOR = {"gradient": 1e-2, "parameter": 1e-1}
COARSE = ("bf16", "fp8")


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference's, relative to its largest element."""

    step: int
    what: str  # "gradient" or "parameter"
    tensor: str
    amount: float


@dataclass
class ParityRank:
    """The results on a layout's first rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    heldout: float | None = None
    written: str = ""
    routed: list[ExpertLoad | None] = field(default_factory=list)  # by step: tokens sent to each expert
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class ParityRequest:
    """What to run, the same for all ranks."""

    job: Job
    dataset: Path
    steps: int
    folder: Path  # where the reference's tensors are stored
    reference: bool  # write them, or compare with them


def run_parity_rank(rank: int, world: int, store: SignedStore, script: ParityRequest) -> ParityRank | None:
    """One rank's part; the first rank returns the results."""
    job = script.job
    mesh = init_rank(job, rank, rank, store)
    files = open_files(job, script.folder, rank)
    program = Program(job, Collection.open(script.dataset), mesh, first_weights(job), files)
    program.compute_reference(program.reference(1, script.steps, job.config.recipe.batch))
    collector = Collector(program.pieces, mesh)
    seen = ParityRank()
    tensors = _Reference(script)
    for step in range(1, script.steps + 1):
        batches = [program.loader.rows(step, places).to(mesh.device) for places in program.positions(step)]
        targets, _ = program.step.agree(program.own_targets(batches))
        measured = program.step.compute_gradients(step, batches, targets)
        tensors.look(job, collector, step, "gradient", gradient, seen)
        result = program.step.update(step, measured)
        seen.losses.append(result.loss)
        seen.norms.append(result.grad_norm)
        seen.routed.append(result.experts)
    tensors.look(job, collector, script.steps, "parameter", weight, seen)
    with program.evaluated_weights():
        _evaluate(program, seen)
    if files is not None:
        files.close()
    mesh.close()
    return seen if rank == 0 else None


class _Reference:
    """The reference's tensors: one file per step for gradients, and one for the final weights."""

    def __init__(self, script: ParityRequest) -> None:
        self.folder, self.writing = script.folder, script.reference

    def look(
        self,
        job: Job,
        collector: Collector,
        step: int,
        what: str,
        value: Callable[[Shard], Tensor],
        seen: ParityRank,
    ) -> None:
        """Store every tensor of a kind, in forward order, or compare it with the stored one."""
        recipe = job.config.recipe
        names = [name for name, _, _ in canonical_parameters(job.network) if not recipe.frozen(name)]
        path = self.folder / f"{what}-{step}.safetensors"
        if self.writing:
            kept = {name: collector.whole(name, value) for name in names}
            tensors = {
                name: tensor.detach().cpu().contiguous()
                for name, tensor in kept.items()
                if tensor is not None
            }
            largest = max((float(tensor.abs().max()) for tensor in tensors.values()), default=0.0)
            save_file(tensors, path, {"largest": json.dumps(largest)})
            return
        share = (COARSE_FLOOR if job.config.recipe.precision in COARSE else FLOOR)[what]
        with safe_open(path, framework="pt") as file:
            floor = share * json.loads(file.metadata()["largest"])
            for name in names:
                ours = collector.whole(name, value)
                if ours is not None:
                    amount = difference(ours.detach().cpu(), file.get_tensor(name), floor)
                    seen.differences.append(Difference(step, what, name, amount))


def difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """The largest difference of two tensors, relative to the largest element of the second."""
    if torch.equal(ours, theirs):
        return 0.0
    apart = (ours.double() - theirs.double()).abs().max()
    return float(apart / max(float(theirs.double().abs().max()), floor))


def _evaluate(program: Program, seen: ParityRank) -> None:
    """The held-out loss and greedily generated text, on which every layout has to agree as well."""
    loader, recipe, mesh = program.loader, program.job.config.recipe, program.mesh
    if loader.heldout is None:
        return
    at_once = program.job.layout.accumulation(recipe.batch)
    seen.heldout = heldout_loss(program.placed, loader.heldout, mesh, recipe.batch, program.micro, at_once)
    prompt = loader.heldout_rows([0]).tokens[0, :PROMPT_TOKENS]
    (written,) = write_samples(
        program.placed, program.tokenizer, mesh, [prompt], WRITTEN_TOKENS, 0.0, recipe.seed, len(seen.losses)
    )
    seen.written = written[1]
