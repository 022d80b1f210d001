"""Program: one rank's part of a job's computation, shared by training, proofs and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.facts.bytes_per_parameter import takes_narrow_gradients
from shoal.facts.config import TuneSection
from shoal.facts.layout.updates import Sharing
from shoal.facts.model import Model
from shoal.facts.optimizers import WHOLE
from shoal.facts.precision import gradient_width
from shoal.facts.recipe import Recipe, Scaling
from shoal.models.decoder import Network, build
from shoal.models.initial import Fill
from shoal.models.lora import add_adapters
from shoal.models.losses import loss_of
from shoal.models.router import RouterLosses
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import Files
from shoal.parallel.whole_matrices import WholeMatrices
from shoal.plan.resolve import Job
from shoal.train import optimizer as optimizers
from shoal.train.data.collection import Collection
from shoal.train.data.input import open_loader
from shoal.train.data.loader import Batch
from shoal.train.data.samples import AnySamples
from shoal.train.data.tokenizers import Tokenizer, open_tokenizer
from shoal.train.evaluate import chosen_rows
from shoal.train.in_backward import UpdatesInBackward
from shoal.train.reference import Reference, ReferenceStore
from shoal.train.step import Step

BACKEND = "inductor"  # for torch.compile


class Program:
    """Data, the placed network, its optimizer and the step that runs it."""

    def __init__(
        self, job: Job, data: Collection, mesh: Mesh, fill: Fill, files: Files | None = None
    ) -> None:
        """``files``: storage for what the layout offloads ``@nvme``."""
        config, recipe = job.config, job.config.recipe
        self.job, self.mesh = job, mesh
        self.tokenizer: Tokenizer = open_tokenizer(config.data.tokenizer, config.data.end_token)
        self.loader = open_loader(config, data, self.tokenizer)
        self.micro = job.layout.micro_batch(recipe.batch)

        network = blueprint(job.network, recipe)
        compile_with = BACKEND if job.compilation.on else None
        self.step = assemble(network, recipe, config.tune, mesh, fill, config.run.strict, compile_with, files)
        self.placed, self.pieces = self.step.placed, self.step.pieces
        self.optimizer, self.scale = self.step.optimizer, self.step.scale

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside the context, the network has the weights to evaluate: its own, or their average."""
        average = self.step.average
        if average is None or not self.job.config.evaluate.ema:
            return nullcontext()
        return average.in_use(self.placed)

    def positions(self, step: int) -> list[range]:
        """This rank's places in the global batch of a step, one range per micro-batch."""
        return self.job.layout.positions(self.loader.clock.at(step), self.mesh.data_index)

    def reference(self, first: int, last: int, most: int, store: ReferenceStore | None = None) -> Reference:
        """What the loss of these steps, and of ``most`` samples of each validation set, is compared with, if
        anything.
        """
        wanted: list[tuple[AnySamples, Sequence[int]]] = []
        if self.job.config.recipe.loss_facts.reference:
            wanted.append((self.loader.samples, self.loader.used_in(first, last)))
            wanted += [(one, chosen_rows(one, most)) for one in self.loader.validation.values()]
        return Reference(wanted, self.job.config.recipe, self.mesh, store)

    def compute_reference(self, reference: Reference, wants_stop: Callable[[], bool] = lambda: False) -> bool:
        """Compute it with the initial weights in the network. Returns whether it finished without being stopped."""
        at_once = self.job.layout.accumulation(self.job.config.recipe.batch)
        return reference.compute(self.placed, self.micro, at_once, wants_stop)

    def own_targets(self, batches: list[Batch]) -> int:
        """This rank's part of the step's number of targets: rows shared by several ranks count once."""
        return sum(batch.count for batch in batches) if self.mesh.first_of_replica else 0


def blueprint(model: Model, recipe: Recipe) -> Network:
    """The whole network on the meta device, where it takes no memory."""
    compute, rest = compute_dtype(recipe), parameter_dtype(recipe)
    # Divided by the global batch's size, so that losses of its parts only need to be summed.
    router = RouterLosses(recipe.router_aux / recipe.batch, recipe.router_z / recipe.tokens_per_step)
    network = build(
        model,
        recipe.dropout,
        compute,
        dtype=rest,
        length=recipe.seq,
        z_loss=recipe.z_loss,
        router=router,
        loss=loss_of(recipe),
    )
    if model.adapters is not None:
        add_adapters(network, model.adapters)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not recipe.frozen(name))
    return network


def assemble(
    network: Network,
    recipe: Recipe,
    tune: TuneSection,
    mesh: Mesh,
    fill: Fill,
    strict: bool = False,
    compile_with: str | None = None,
    files: Files | None = None,
) -> Step:
    """Place the network and build its optimizer: all of a rank's computation, whatever the data."""
    placed = apply(
        network,
        mesh,
        tune,
        fill,
        recipe.seq,
        reduce_dtype(recipe),
        strict,
        compile_with=compile_with,
        fp8=float8_scaling(recipe),
        one_pass=mesh.layout.one_pass(recipe.batch)
        and takes_narrow_gradients(recipe.precision, recipe.optimizer),
        files=files,
        blockwise=recipe.blockwise,
    )
    pieces, whole = placed.gradients.pieces, None
    if recipe.optimizer in WHOLE:
        bucket_bytes = round(tune.bucket_mb * 2**20)
        sharing = Sharing(network.shape, mesh.layout, recipe.seq, gradient_width(recipe), bucket_bytes)
        whole = WholeMatrices(pieces, sharing, mesh, placed.shared.ends)
    optimizer = optimizers.build(pieces, recipe, whole)
    scale = optimizers.LossScale.for_precision(recipe.precision)
    step = Step(placed, optimizer, recipe, mesh, scale)
    if tune.optimizer_in_backward:
        step.early = UpdatesInBackward(placed, optimizer, recipe)
    return step


DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # only matmuls are fp8; everything between them is bf16
    "int8": torch.bfloat16,  # only moments are int8; their weights are bf16
}


def compute_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of activations, and of weights when they are used."""
    return DTYPES[recipe.precision]


def float8_scaling(recipe: Recipe) -> Scaling | None:
    """How operands of matmuls are scaled; None: matmuls run in the compute precision."""
    return recipe.fp8 if recipe.precision == "fp8" else None


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of stored weights and optimizer states; fp64 is a reference and uses it for everything."""
    return torch.float64 if recipe.precision == "fp64" else DTYPES[recipe.states]


def reduce_dtype(recipe: Recipe) -> torch.dtype | None:
    """The dtype of gradient reductions; None keeps the gradients' own."""
    wanted = torch.float64 if recipe.precision == "fp64" else DTYPES[recipe.reduce]
    return None if wanted == parameter_dtype(recipe) else wanted
