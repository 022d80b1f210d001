"""Place a module that Shoal did not build: any ``nn.Module``, modified in place.

The strategies are those of ``apply``: the same reducers over the same groups of ranks. The difference is the input: a
module that is whole, with values on every rank and names of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import DENSE, ParameterGroup, RankGroup, parameter_groups
from shoal.facts.model.tensor_split import Box, TensorPart
from shoal.facts.problem import BadInput
from shoal.parallel.batch_norm import batch_norms, share_statistics
from shoal.parallel.mesh import Mesh
from shoal.parallel.module_blocks import innermost
from shoal.parallel.module_pipeline import ModuleExecutor, ModuleStage
from shoal.parallel.module_stages import is_within, tensor_owners
from shoal.parallel.recompute import recompute
from shoal.parallel.replicate import Replicate
from shoal.parallel.shard import FullyShard, ShardedRoot, keep_gathered, sum_gradients
from shoal.parallel.shard import piece as sharded_piece
from shoal.parallel.shards import (
    ComposedReducer,
    HeldParameter,
    NoReducer,
    Reducer,
    Shard,
    counts,
    gradient,
)
from shoal.parallel.zero import ShardedStates

ONLY_STAGE = 0


class PlacedModule:
    """This rank's part of a module, and how its gradients become those of all ranks."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[nn.Module],
        gradients: Reducer,
        kept: list[Shard],
        names: list[str],
        stage: ModuleStage | None = None,
    ) -> None:
        """``kept``: pieces that no optimizer updates but checkpoints contain. ``names``: all trained parameters.

        ``stage``: the pipeline stage; None if the whole module is here.
        """
        self.module, self.blocks, self.gradients = module, blocks, gradients
        self.kept, self.names = kept, names
        self.pieces = gradients.pieces
        self._whole = {
            one.label: one.parameter for one in _held(gradients) if not isinstance(one.parameter, DTensor)
        }
        self._sharded = {
            one.label: one.parameter for one in _held(gradients) if isinstance(one.parameter, DTensor)
        }
        self.stage = stage
        self.executor: ModuleExecutor | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}  # whole shapes of all that checkpoints contain
        self.tensor_ranks: dist.ProcessGroup | None = None
        self.summed: list[Shard] = []  # pieces whose gradients tensor ranks sum
        self.tied: list[Shard] = []  # pieces that another stage has too
        self.ends: dist.ProcessGroup | None = None  # this stage and that one
        self._called = {one.label: one.name for one in _held(gradients)}
        self._reached: set[str] = set()
        for label, parameter in self._whole.items():
            parameter.register_post_accumulate_grad_hook(self._noting(label))

    def start_step(self) -> None:
        self._reached.clear()
        self.gradients.start_step()

    def backward(self, loss: Tensor, last: bool) -> None:
        """``last``: no other backward pass follows in this step, so gradients can be reduced while this one runs."""
        self.gradients.before_backward(ONLY_STAGE, last)
        loss.backward()
        self.gradients.after_backward(ONLY_STAGE, last)

    def send_rest(self) -> None:
        """Send the gradients that were held back in case another backward pass followed."""
        for part in _parts(self.gradients):
            if not isinstance(part, FullyShard):
                part.after_backward(ONLY_STAGE, last=True)

    def reached(self) -> tuple[list[int], int]:
        """For each of ``names``, 1 if a gradient arrived here since the step began, else 0; and how many local
        parameters got none.
        """
        have = {label for label, parameter in self._sharded.items() if parameter.grad is not None}
        called = {self._called[label] for label in have | self._reached}
        return [int(name in called) for name in self.names], len({*self._called.values()} - called)

    def finish_step(self, reached: list[int]) -> None:
        """``reached``: for each of ``names``, on how many ranks a gradient arrived. Parameters without one stay
        unchanged.
        """
        self.gradients.finish_step()
        without = {name for name, often in zip(self.names, reached, strict=True) if not often}
        for piece in self.pieces:
            if piece.name in without:
                piece.tensor.grad = None
        for piece in self.summed:
            if piece.tensor.grad is not None:
                dist.all_reduce(piece.tensor.grad, group=self.tensor_ranks)
        for piece in self.tied:
            if piece.name not in without:
                dist.all_reduce(gradient(piece), group=self.ends)

    def after_update(self) -> None:
        self.gradients.after_update()
        if isinstance(self.module, FSDPModule):
            # An evaluation has no backward pass after it, so it leaves the root gathered.
            self.module.reshard()

    def _noting(self, label: str) -> Callable[[nn.Parameter], None]:
        def note(parameter: nn.Parameter) -> None:
            self._reached.add(label)

        return note


def place_module(
    module: nn.Module,
    mesh: Mesh,
    blocks: list[nn.Module],
    shapes: dict[str, tuple[int, ...]],
    trained: list[str],
    tune: TuneSection | None = None,
    parts: Mapping[str, TensorPart] | None = None,
    arrived: set[Tensor] | None = None,
    summed: Collection[str] = (),
    stage: ModuleStage | None = None,
) -> PlacedModule:
    """Place a module, with the first rank's values. ``blocks``: units of ``zero=3`` and of recomputation.

    ``shapes``: shapes of all that a checkpoint contains. ``trained``: names on all ranks together. ``parts``: this
    rank's part of parameters that tensor ranks have split already; those are in ``arrived``. ``summed``: names of
    parameters whose gradients tensor ranks sum. ``stage``: the pipeline stage, whose values are all here.
    """
    if not trained:
        raise BadInput(
            "the model has no parameter that is trained", "requires_grad_(True) on what is to be trained"
        )
    arrived = set() if arrived is None else arrived
    layout, tune, parts = mesh.layout, tune or TuneSection(), parts or {}
    dense = parameter_groups(layout, experts=False, lora=False)[DENSE]
    everywhere = whole_everywhere(layout)
    # All ranks must create a group, even those that have no use for it.
    all_data = mesh.group_of(everywhere.replicated) if stage is not None or batch_norms(module) else None
    blocks = [block for block in blocks if _is_here(block)]
    recompute(innermost(blocks), layout.recompute, generators=True)
    alone = [one for one in module.parameters() if one.dim() == 0] if dense.fully_sharded else []
    root = module if stage is None else stage
    if dense.fully_sharded:
        _shard(root, blocks, mesh, alone, arrived)
    take_in((one for one in tensors_of(module) if stage is None or not one.is_meta), mesh.device, arrived)
    if all_data is not None:
        norms = [norm for norm in batch_norms(module) if _is_here(norm)]
        share_statistics(norms, all_data, everywhere.replicated.size)

    def held(name: str, parameter: nn.Parameter, buffer: bool = False) -> HeldParameter:
        shape = tuple(parameter.shape)
        part = parts.get(name) or TensorPart(
            Box(shape, (0,) * len(shape), shape), layout.tp, mesh.coords["tp"]
        )
        # FSDP takes no scalars, and frozen parameters have no optimizer states to shard.
        shared = isinstance(parameter, DTensor) or (parameter.requires_grad and not dense.fully_sharded)
        group = dense if shared else everywhere
        if stage is None:
            return HeldParameter(name, ONLY_STAGE, parameter, part, group, copied=False)
        known = stage.names[name]
        copied = known != name or (buffer and not stage.holds(name) and not stage.stage.first)
        return HeldParameter(known, stage.stage.index, parameter, part, group, copied, own_name=name)

    every = [held(name, one) for name, one in module.named_parameters() if not one.is_meta]
    updated = [one for one in every if one.parameter.requires_grad]
    for one in updated:
        if not isinstance(one.parameter, DTensor):
            one.parameter.grad_dtype = one.parameter.dtype
    tied = set() if stage is None else stage.shared
    gradients = _reducer(root, module, updated, mesh, tune, tied)
    kept = [_kept(one, mesh) for one in every if not one.parameter.requires_grad]
    buffers = [held(name, cast(nn.Parameter, one), True) for name, one in _buffers(module) if not one.is_meta]
    kept += [_kept(one, mesh) for one in buffers]
    placed = PlacedModule(module, blocks, gradients, [one for one in kept if one is not None], trained, stage)
    placed.shapes = shapes
    placed.tensor_ranks = mesh.group("tp")
    placed.summed = [piece for piece in placed.pieces if piece.name in summed]
    if stage is not None:
        stage.take_part()
        placed.executor = ModuleExecutor(stage, mesh, gradients)
        if tied:
            placed.ends = mesh.subgroup("pp", [[0, layout.pp - 1]])
            placed.tied = [piece for piece in placed.pieces if piece.name in tied]
    return placed


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of everything that a checkpoint contains."""
    return {name: tuple(one.shape) for name, one in (*module.named_parameters(), *_buffers(module))}


def _is_here(block: nn.Module) -> bool:
    """Whether a block is in this rank's stage."""
    meta = {one.is_meta for one in block.parameters()}
    if len(meta) > 1:
        raise BadInput(
            f"wrap: a {type(block).__name__} is in several stages of the pipeline", "wrap= smaller modules"
        )
    return True not in meta


def whole_everywhere(layout: Layout) -> ParameterGroup:
    """The group of parameters that every data rank holds whole, whatever the layout shards."""
    ranks = RankGroup("dp·fsdp·cp", layout.data_ranks * layout.cp, layout.tp)
    return ParameterGroup("whole", RankGroup("fsdp", 1, layout.tp), ranks, 3, True)


def take_in(tensors: Iterable[Tensor], device: torch.device, arrived: set[Tensor]) -> None:
    """Move parameters and buffers to their device and broadcast the first rank's values: random weights differ by rank.

    ``arrived``: tensors already done; these are added to it.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor) or tensor in arrived:
            continue
        if tensor.is_meta:
            raise BadInput(
                "the model is on the meta device and has no values",
                "build it on the CPU, or load its weights, before run.prepare",
            )
        tensor.data = tensor.data.to(device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            values = tensor.data.contiguous()
            dist.broadcast(values, 0)
            tensor.data = values
        arrived.add(tensor)


def take_in_stage(stage: ModuleStage, device: torch.device, arrived: set[Tensor]) -> None:
    """Move a stage's tensors to its device with the first rank's values. Tensors of other stages are broadcast too,
    for the ranks that hold them, and keep only their shape here.
    """
    for tensor, owners in tensor_owners(stage.module).items():
        if all(is_within(path, stage.absent) for path, _, _ in owners) and not tensor.is_meta:
            dist.broadcast(tensor.data.to(device).contiguous(), 0)
        else:
            take_in([tensor], device, arrived)
    stage.let_go()


def tensors_of(*modules: nn.Module) -> list[Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _shard(
    root: nn.Module, blocks: list[nn.Module], mesh: Mesh, alone: list[nn.Parameter], arrived: set[Tensor]
) -> None:
    """Shard block by block, so that the device holds at most one unsharded block of a large model at a time."""
    unit, pipelined = mesh.layout.unit, mesh.layout.pp > 1
    # Other stages' parameters are only shapes.
    left = {*alone, *(one for one in root.parameters() if pipelined and one.is_meta)}
    # From last to first, so that nested blocks come before the ones around them.
    for start in reversed(range(0, len(blocks), unit)):
        modules = blocks[start : start + unit]
        take_in(tensors_of(*modules), mesh.device, arrived)
        _check_alike(modules)
        fully_shard(modules, mesh=mesh.sharding, reshard_after_forward=not pipelined, ignored_params=left)
    take_in((one for one in tensors_of(root) if not pipelined or not one.is_meta), mesh.device, arrived)
    _check_alike([root])
    # The rest, embeddings and norms, is used at both ends of a step.
    fully_shard(root, mesh=mesh.sharding, reshard_after_forward=False, ignored_params=left)
    sum_gradients(root)
    if pipelined:
        keep_gathered(root)


def _check_alike(modules: list[nn.Module]) -> None:
    every = [one for module in modules for one in module.parameters() if one.dim() and not one.is_meta]
    rest = [one for one in every if not isinstance(one, DTensor)]
    if len(found := {parameter.dtype for parameter in rest}) > 1:
        words = ", ".join(sorted(str(one).removeprefix("torch.") for one in found))
        raise BadInput(
            f"parameters of a block are {words}: FSDP gathers one type at a time",
            "model.to(one dtype), wrap= those of the other apart, or zero=1",
        )


def _reducer(
    root: nn.Module,
    module: nn.Module,
    trained: list[HeldParameter],
    mesh: Mesh,
    tune: TuneSection,
    tied: Collection[str],
) -> Reducer:
    """``tied``: parameters cut alike on the two stages that have them."""
    bucket_bytes = round(tune.bucket_mb * 2**20)
    together: dict[object, list[HeldParameter]] = {}
    for one in trained:
        # A bucket has one dtype; FSDP's units have their own.
        own = one.name if one.name in tied else ""
        key = None if one.group.fully_sharded else (one.group, one.parameter.dtype, own)
        together.setdefault(key, []).append(one)

    def reducer(held: list[HeldParameter]) -> Reducer:
        group = held[0].group
        if group.fully_sharded:
            roots = {held[0].stage: ShardedRoot(root, module)}
            return FullyShard(roots, held, mesh, held[0].parameter.dtype)
        if group.sharded.size > 1:
            return ShardedStates(held, mesh, bucket_bytes, None)
        if group.replicated.size > 1:
            return Replicate(held, mesh, bucket_bytes)
        return NoReducer(held, mesh)

    parts = [(held, reducer(held)) for held in together.values()]
    if not parts:
        return NoReducer([], mesh)  # all of the stage's parameters are frozen
    return ComposedReducer(trained, parts) if len(parts) > 1 else parts[0][1]


def _parts(gradients: Reducer) -> list[Reducer]:
    return gradients.parts if isinstance(gradients, ComposedReducer) else [gradients]


def _held(gradients: Reducer) -> list[HeldParameter]:
    found: dict[str, HeldParameter] = {}
    for part in _parts(gradients):
        if isinstance(part, FullyShard):
            found.update(part.held)
        elif isinstance(part, ShardedStates | Replicate | NoReducer):
            found.update({one.label: one for one in part.held})
    return list(found.values())


def _kept(held: HeldParameter, mesh: Mesh) -> Shard | None:
    if isinstance(held.parameter, DTensor):
        found = sharded_piece(held, mesh)
        return found if found.start < found.stop else None
    return Shard(held, held.parameter, 0, held.parameter.numel(), counts(held, mesh))


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that a state dict contains; the others are computed from the config."""
    stored = module.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in module.named_buffers() if name in stored]
