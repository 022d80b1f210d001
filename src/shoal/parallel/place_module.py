"""Place a module that Shoal did not build: any ``nn.Module``, which stays the object that it is.

The strategies are those of ``apply``: the same reducers over the same groups of ranks. What differs is how a network
arrives: whole and with values on every rank, under names of its own.
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
from shoal.parallel.recompute import recompute
from shoal.parallel.replicate import Replicate
from shoal.parallel.shard import FullyShard, ShardedRoot, sum_gradients
from shoal.parallel.shard import piece as sharded_piece
from shoal.parallel.shards import ComposedReducer, HeldParameter, NoReducer, Reducer, Shard, counts
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
    ) -> None:
        """``kept``: what no optimizer updates and a checkpoint has all the same. ``names``: of all that is trained."""
        self.module, self.blocks, self.gradients = module, blocks, gradients
        self.kept, self.names = kept, names
        self.pieces = gradients.pieces
        self._whole = {
            one.label: one.parameter for one in _held(gradients) if not isinstance(one.parameter, DTensor)
        }
        self._sharded = {
            one.label: one.parameter for one in _held(gradients) if isinstance(one.parameter, DTensor)
        }
        self.shapes: dict[str, tuple[int, ...]] = {}  # of all that a checkpoint has, as a whole
        self.tensor_ranks: dist.ProcessGroup | None = None
        self.summed: list[Shard] = []  # of which each tensor rank has a part of the gradient
        self._reached: set[str] = set()
        for label, parameter in self._whole.items():
            parameter.register_post_accumulate_grad_hook(self._noting(label))

    def start_step(self) -> None:
        self._reached.clear()
        self.gradients.start_step()

    def backward(self, loss: Tensor, last: bool) -> None:
        """``last``: no other follows in this step, so that sums can begin while it runs."""
        self.gradients.before_backward(ONLY_STAGE, last)
        loss.backward()
        self.gradients.after_backward(ONLY_STAGE, last)

    def send_rest(self) -> None:
        """What was held back, for another backward pass might have come, is sent now."""
        for part in _parts(self.gradients):
            if not isinstance(part, FullyShard):
                part.after_backward(ONLY_STAGE, last=True)

    def reached(self) -> list[int]:
        """By ``names``, whether a gradient has come to it here since the step began: 1 or 0."""
        have = {label for label, parameter in self._sharded.items() if parameter.grad is not None}
        have |= self._reached
        return [int(name in have) for name in self.names]

    def finish_step(self, reached: list[int]) -> None:
        """``reached``: by ``names``, on how many ranks a gradient came. What has none stays as it is."""
        self.gradients.finish_step()
        without = {name for name, often in zip(self.names, reached, strict=True) if not often}
        for piece in self.pieces:
            if piece.name in without:
                piece.tensor.grad = None
        for piece in self.summed:
            if piece.tensor.grad is not None:
                dist.all_reduce(piece.tensor.grad, group=self.tensor_ranks)

    def after_update(self) -> None:
        self.gradients.after_update()
        if isinstance(self.module, FSDPModule):
            # An evaluation, which no backward pass follows, leaves the root gathered.
            self.module.reshard()

    def _noting(self, label: str) -> Callable[[nn.Parameter], None]:
        def note(parameter: nn.Parameter) -> None:
            self._reached.add(label)

        return note


def place_module(
    module: nn.Module,
    mesh: Mesh,
    blocks: list[nn.Module],
    tune: TuneSection | None = None,
    parts: Mapping[str, TensorPart] | None = None,
    arrived: set[Tensor] | None = None,
    summed: Collection[str] = (),
) -> PlacedModule:
    """Place a module whose values are the first rank's. ``blocks``: units of ``zero=3`` and of recomputation.

    ``parts``: of parameters that tensor ranks have split already, what is here; those are among what has ``arrived``.
    ``summed``: names of parameters whose gradients tensor ranks add up.
    """
    arrived = set() if arrived is None else arrived
    layout, tune, parts = mesh.layout, tune or TuneSection(), parts or {}
    dense = parameter_groups(layout, experts=False, lora=False)[DENSE]
    recompute(innermost(blocks), layout.recompute, generators=True)
    alone = (
        [parameter for parameter in module.parameters() if parameter.dim() == 0]
        if dense.fully_sharded
        else []
    )
    if dense.fully_sharded:
        _shard(module, blocks, mesh, alone, arrived)
    take_in(tensors_of(module), mesh.device, arrived)
    everywhere = whole_everywhere(layout)
    if (norms := batch_norms(module)) and (group := mesh.group_of(everywhere.replicated)) is not None:
        share_statistics(norms, group, everywhere.replicated.size)

    def held(name: str, parameter: nn.Parameter) -> HeldParameter:
        shape = tuple(parameter.shape)
        part = parts.get(name) or TensorPart(
            Box(shape, (0,) * len(shape), shape), layout.tp, mesh.coords["tp"]
        )
        # FSDP takes no scalars, and what is not trained has no states to share out.
        shared = isinstance(parameter, DTensor) or (parameter.requires_grad and not dense.fully_sharded)
        return HeldParameter(name, ONLY_STAGE, parameter, part, dense if shared else everywhere, copied=False)

    every = [held(name, parameter) for name, parameter in module.named_parameters()]
    trained = [one for one in every if one.parameter.requires_grad]
    if not trained:
        raise BadInput(
            "the model has no parameter that is trained", "requires_grad_(True) on what is to be trained"
        )
    for one in trained:
        if not isinstance(one.parameter, DTensor):
            one.parameter.grad_dtype = one.parameter.dtype
    gradients = _reducer(module, trained, mesh, tune)
    kept = [_kept(one, mesh) for one in every if not one.parameter.requires_grad]
    buffers = [held(name, cast(nn.Parameter, buffer)) for name, buffer in _buffers(module)]
    kept += [_kept(one, mesh) for one in buffers]
    names = [one.name for one in trained]
    placed = PlacedModule(module, blocks, gradients, [one for one in kept if one is not None], names)
    placed.shapes = {one.name: one.part.box.whole for one in (*every, *buffers)}
    placed.tensor_ranks = mesh.group("tp")
    placed.summed = [piece for piece in placed.pieces if piece.name in summed]
    return placed


def whole_everywhere(layout: Layout) -> ParameterGroup:
    """Of what every data rank holds as a whole, whatever the layout shards."""
    ranks = RankGroup("dp·fsdp·cp", layout.data_ranks * layout.cp, layout.tp)
    return ParameterGroup("whole", RankGroup("fsdp", 1, layout.tp), ranks, 3, True)


def take_in(tensors: Iterable[Tensor], device: torch.device, arrived: set[Tensor]) -> None:
    """Parameters and buffers to their device, with the first rank's values: random weights differ by rank.

    ``arrived``: those that are there, to which these are added.
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


def tensors_of(*modules: nn.Module) -> list[Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _shard(
    module: nn.Module, blocks: list[nn.Module], mesh: Mesh, alone: list[nn.Parameter], arrived: set[Tensor]
) -> None:
    """Block by block, so that of a large model one block and shards are on the device at a time."""
    unit, left = mesh.layout.unit, set(alone)
    # From the last to the first: what lies inside of another comes before it.
    for start in reversed(range(0, len(blocks), unit)):
        modules = blocks[start : start + unit]
        take_in(tensors_of(*modules), mesh.device, arrived)
        _check_alike(modules)
        fully_shard(modules, mesh=mesh.sharding, reshard_after_forward=True, ignored_params=left)
    take_in(tensors_of(module), mesh.device, arrived)
    _check_alike([module])
    # What is left, embeddings and norms, is used at both ends of a step.
    fully_shard(module, mesh=mesh.sharding, reshard_after_forward=False, ignored_params=left)
    sum_gradients(module)


def _check_alike(modules: list[nn.Module]) -> None:
    rest = [p for module in modules for p in module.parameters() if not isinstance(p, DTensor) and p.dim()]
    if len(found := {parameter.dtype for parameter in rest}) > 1:
        words = ", ".join(sorted(str(one).removeprefix("torch.") for one in found))
        raise BadInput(
            f"parameters of a block are {words}: FSDP gathers one type at a time",
            "model.to(one dtype), wrap= those of the other apart, or zero=1",
        )


def _reducer(module: nn.Module, trained: list[HeldParameter], mesh: Mesh, tune: TuneSection) -> Reducer:
    bucket_bytes = round(tune.bucket_mb * 2**20)
    together: dict[object, list[HeldParameter]] = {}
    for one in trained:
        # A bucket has one type; FSDP's units have theirs.
        key = None if one.group.fully_sharded else (one.group, one.parameter.dtype)
        together.setdefault(key, []).append(one)

    def reducer(held: list[HeldParameter]) -> Reducer:
        group = held[0].group
        if group.fully_sharded:
            roots = {ONLY_STAGE: ShardedRoot(module, module)}
            return FullyShard(roots, held, mesh, held[0].parameter.dtype)
        if group.sharded.size > 1:
            return ShardedStates(held, mesh, bucket_bytes, None)
        if group.replicated.size > 1:
            return Replicate(held, mesh, bucket_bytes)
        return NoReducer(held, mesh)

    parts = [(held, reducer(held)) for held in together.values()]
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
    """Those that a state dict has: the others are computed from the config."""
    stored = module.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in module.named_buffers() if name in stored]
