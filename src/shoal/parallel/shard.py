"""Sharded parameters, gradients and optimizer states (``zero=3``) with torch's FSDP2.

Each rank of the ``fsdp`` group (of ``fsdp``·``cp`` ranks with context parallelism) holds some rows of every parameter.
A unit of modules (``facts.groups``) is all-gathered before use and freed after; its gradients are reduce-scattered
behind the backward pass of the units before it. With replicas (``dp``), the sums are then all-reduced over them once
per step.

Routed experts are units of their own, sharded over the ranks that hold the same experts: each has some experts of the
stack. Where no two ranks of a replica hold the same experts, the strategies for unsharded parameters handle them.

A pipeline runs every unit once per micro-batch, so parameters stay gathered for the whole step and gradients stay
unsharded until the stage's last backward pass. They accumulate in the reduction dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOf

from shoal.facts.config import TuneSection
from shoal.facts.layout.buckets import Unit, even_share, sharded_dimension, units
from shoal.facts.layout.parameter_groups import EXPERTS, ParameterGroup
from shoal.facts.layout.updates import rows_of_each
from shoal.facts.nf4 import unpacked_width
from shoal.models.initial import Slice
from shoal.models.nf4 import PACKED
from shoal.parallel.experts import mixtures
from shoal.parallel.float8_gather import Float8Gather
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.params import GatheredFromHome, UnitFromHome, read_ahead
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.replica_sums import ReplicaSums
from shoal.parallel.shards import HeldParameter, Shard, counts, hand, slice_of, updated
from shoal.parallel.stage_module import StageModule, fill_storage, local_tensor


def shard(
    segment: StageModule,
    mesh: Mesh,
    tune: TuneSection,
    compute: torch.dtype,
    reduce_dtype: torch.dtype,
    groups: Mapping[str, ParameterGroup],
) -> None:
    """Shard a segment that is still on the meta device.

    ``tune.persist_below``: units with fewer elements stay gathered between their forward and backward pass.
    ``tune.prefetch``: how many units to all-gather ahead of the one being computed, in both passes.
    """
    layout, network = mesh.layout, segment.network
    experts = groups.get(EXPERTS)
    routed_apart = experts is not None and experts.fully_sharded
    # FSDP takes a module's parameters except those in another unit and these.
    left = set() if routed_apart else _routed(segment)
    # Parameters are gathered in the compute dtype; gradients are still summed in the dtype every layout uses.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    ranks = mesh.sharding
    expert_ranks = mesh.expert_sharding if layout.ep > 1 and routed_apart else ranks
    cut = units(
        segment.stage.layers,
        layout.unit,
        segment.stage.first,
        segment.stage.last,
        network.shape.tied and not segment.copied_head,
    )
    order: list[list[FSDPModule]] = []  # for each unit, the modules FSDP knows it by
    for unit in reversed(cut):  # the root, which takes the rest, comes last
        modules = _modules(segment, unit)
        routed: list[nn.Module] = [one.experts for module in modules for one in mixtures(module)]
        apart: list[FSDPModule] = []
        if routed_apart and routed and unit.modules != ("",):
            freed = layout.pp == 1 and not Unit(()).stays(_elements(routed), tune.persist_below)
            fully_shard(
                routed,
                mesh=expert_ranks,
                mp_policy=policy,
                reshard_after_forward=freed,
                shard_placement_fn=_cut_stack(experts.sharded.size if experts else 1),
            )
            apart = [cast(FSDPModule, routed[0])]
        freed = layout.pp == 1 and not unit.stays(_elements(modules, left), tune.persist_below)
        fully_shard(modules, mesh=ranks, mp_policy=policy, reshard_after_forward=freed, ignored_params=left)
        order.insert(0, [cast(FSDPModule, modules[0]), *apart])
        if unit.looked_up:
            order[0][0].set_unshard_in_backward(False)
    root = cast(FSDPModule, segment)
    if [root] not in order:
        fully_shard(segment, mesh=ranks, mp_policy=policy, reshard_after_forward=False, ignored_params=left)
    if network.lm_head is not None:
        register_fsdp_forward_method(network.lm_head, "scores")
    sum_gradients(segment)
    if layout.pp > 1:
        keep_gathered(segment)
    _prefetch(order, tune.prefetch)


def sum_gradients(root: nn.Module) -> None:
    """Make FSDP sum gradients, not average them: losses are already divided by the step's number of targets."""
    for module in _sharded_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def keep_gathered(root: nn.Module) -> None:
    """Keep parameters gathered between the passes of a step; gradients are reduced at its end."""
    sharded = cast(FSDPModule, root)
    sharded.set_requires_gradient_sync(False)
    sharded.set_reshard_after_backward(False)
    sharded.set_is_last_backward(False)


def _modules(segment: StageModule, unit: Unit) -> list[nn.Module]:
    """The unit's modules, without those this model does not have."""
    if unit.modules == ("",):
        return [segment]
    children = dict(segment.network.named_modules())
    return [children[path] for path in unit.modules if path in children]


def _unsharded(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of the module that no unit has taken yet."""
    return [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]


def _elements(modules: Iterable[nn.Module], but: Collection[nn.Parameter] = ()) -> int:
    found = (parameter for module in modules for parameter in _unsharded(module))
    return sum(_values(parameter) for parameter in found if parameter not in but)


def _values(parameter: nn.Parameter) -> int:
    """The number of values in a parameter; for a packed one, the values its bytes encode."""
    if parameter.dtype != PACKED:
        return parameter.numel()
    return parameter.shape[:-1].numel() * unpacked_width(parameter.shape[-1])


def _cut_stack(ranks: int) -> Callable[[nn.Parameter], ShardOf]:
    """How FSDP cuts a layer's stack of experts, [experts, out, in]."""
    return lambda weight: ShardOf(sharded_dimension(weight.shape, ranks))


def _routed(module: nn.Module) -> set[nn.Parameter]:
    return {weight for mixture in mixtures(module) for weight in mixture.experts.parameters()}


def _sharded_modules(segment: nn.Module) -> list[FSDPModule]:
    return [module for module in segment.modules() if isinstance(module, FSDPModule)]


def _prefetch(order: list[list[FSDPModule]], ahead: int) -> None:
    """Set up prefetching. ``order`` lists units in forward order, each as its modules.

    In both passes a unit starts with its first module, which triggers the all-gathers of its other modules and of the
    ``ahead`` next units.
    """
    for number, (first, *others) in enumerate(order):
        after, before = order[number + 1 : number + 1 + ahead], order[max(0, number - ahead) : number][::-1]
        first.set_modules_to_forward_prefetch([*others, *chain(*after)])
        # With an empty list FSDP would prefetch the previous unit by default; naming the unit itself is a no-op.
        first.set_modules_to_backward_prefetch([*chain(*before)] or [first])
        for other in others:
            other.set_modules_to_backward_prefetch([other])


class ShardedRoot(NamedTuple):
    """The root module of FSDP's units, and the module that parameter names are relative to."""

    module: nn.Module
    named: nn.Module


class UnitOfPieces(NamedTuple):
    """An FSDP unit's first module, and what this rank updates of it."""

    module: FSDPModule
    pieces: list[Shard]


class FullyShard:
    """Sums gradients over the ranks of a replica, then over the replicas.

    Optimizer, clipping and checkpoints see this rank's rows as plain tensors that share storage with FSDP's shards.
    """

    def __init__(
        self,
        roots: Mapping[int, ShardedRoot],
        held: list[HeldParameter],
        mesh: Mesh,
        reduce_dtype: torch.dtype,
        in_float8: Sequence[Float8Gather] = (),
        frozen: Sequence[HeldParameter] = (),
        staged: StagedFiles | None = None,
    ) -> None:
        """``roots``, one per stage, have left the meta device; ``held`` has FSDP's own parameters.

        ``in_float8``: the parameters that are all-gathered in fp8. ``frozen``: parameters that FSDP gathers and no
        optimizer updates. ``staged`` reads the rows that are stored in files.
        """
        self.roots = {stage: root.module for stage, root in roots.items()}
        self.replicas = mesh.layout.dp > 1
        self.pipelined = mesh.layout.pp > 1
        self.landing = ReplicaSums(mesh.device)
        self.casts = reduce_dtype != held[0].parameter.dtype
        if self.replicas and self.casts:
            for module in self._modules():
                module.set_all_reduce_hook(self.landing)
        # The first all-gather makes FSDP pad its rows into tensors that it keeps from then on.
        homes = {one.parameter: one for one in (*held, *frozen) if one.home is not None}
        gathered = [_gather_once(root, homes) for root in roots.values()]
        found = {label: weight for of_root in gathered for label, weight in of_root.weights.items()}
        units = [unit for of_root in gathered for unit in of_root.units]
        self.ahead = None
        if staged is not None:
            self.ahead = read_ahead(units, staged)
            for root in roots.values():
                self.ahead.watch(root.module)
        self.gathered = [found[one.label] for one in held]
        for one in in_float8:
            one.drop_storage()
        if self.pipelined:
            # FSDP would upcast a gradient when the backward pass leaves its unit. Gradients computed outside any pass
            # it sees are upcast only at the end of the step, after several micro-batches have accumulated in the
            # compute dtype.
            for parameter in self.gathered:
                parameter.grad_dtype = reduce_dtype
        self.parameters = {one.label: cast(DTensor, one.parameter) for one in held}
        self.held = {one.label: one for one in held}
        pieces = [piece(one, mesh) for one in held]
        # A parameter with fewer rows than ranks leaves some ranks without any.
        self.pieces = [piece for piece in pieces if piece.start < piece.stop]

    def start_step(self) -> None:
        if self.ahead is not None:
            self.ahead.drop()
        for parameter in self.parameters.values():
            parameter.grad = None
        for piece in self.pieces:
            piece.tensor.grad = piece.summed = None

    def before_backward(self, stage: int, last: bool) -> None:
        self.landing.begin()
        if self.replicas and not self.pipelined:
            self._root(stage).set_requires_all_reduce(last)

    def after_backward(self, stage: int, last: bool) -> None:
        if self.pipelined and last:
            _reduce_now(self._root(stage))
        self.landing.end()

    def finish_step(self) -> None:
        if self.ahead is not None:
            self.ahead.drop()  # prefetched before the update, so stale
        for piece in self.pieces:
            gradient = self.parameters[piece.held.label].grad
            if gradient is not None:
                hand(piece, _as_updated(piece, local_tensor(gradient)))
                if piece.working is not None:
                    self.parameters[piece.held.label].grad = None
            elif piece.away is None and piece.squares is None:
                piece.tensor.grad = torch.zeros_like(piece.tensor) if piece.summed is None else piece.summed

    def reduced_together(self) -> list[UnitOfPieces]:
        """The pieces of each of FSDP's units: their gradients are parts of one buffer."""
        pieces = {self.parameters[piece.held.label]: piece for piece in self.pieces}
        found: dict[Any, UnitOfPieces] = {}
        for module in self._modules():
            group = _group(module)
            # None: it has no parameters. Found: it is of a unit of several modules.
            if group is not None and group not in found:
                weights = [one.sharded_param for one in group.fsdp_params]
                found[group] = UnitOfPieces(module, [pieces[one] for one in weights if one in pieces])
        return list(found.values())

    def copied_as_they_leave(self, unit: UnitOfPieces) -> bool:
        """Have the buffer of this unit's reduced gradients freed, which all of them leave; returns whether they must
        be copied first, because FSDP has not.
        """
        if self.replicas:
            unit.module.set_all_reduce_hook(self.landing)
        return self.replicas and not self.casts

    def after_update(self) -> None:
        """Drop what is still gathered: it is stale. Only strict mode, which reduces nothing here, leaves any."""
        if self.pipelined:
            for module in self._modules():
                module.reshard()

    def adding_up(self) -> list[Tensor]:
        """This replica's accumulated sums between micro-batches, with replicas. FSDP has no public way to read them."""
        groups = [_group(module) for module in self._modules()]
        sums = [group._partial_reduce_output for group in groups if group is not None]
        return [one for one in sums if one is not None]

    def weights(self) -> list[tuple[str, Slice]]:
        return [(piece.name, _slice(piece)) for piece in self.pieces]

    def computed_with(self) -> list[nn.Parameter]:
        return self.gathered

    def _root(self, stage: int) -> FSDPModule:
        return cast(FSDPModule, self.roots[stage])

    def _modules(self) -> list[FSDPModule]:
        return [module for root in self.roots.values() for module in _sharded_modules(root)]


def _as_updated(piece: Shard, gradient: Tensor) -> Tensor:
    """A gradient in the precision of the master weights that it updates here; FSDP leaves it in the weights'."""
    return gradient.to(piece.tensor.dtype) if piece.away is None else gradient


class GatheredOnce(NamedTuple):
    weights: dict[str, nn.Parameter]  # the weights the network computes with, by name
    units: list[UnitFromHome]  # the offloaded part of each unit, in forward order


def _gather_once(root: ShardedRoot, homes: Mapping[nn.Parameter, HeldParameter]) -> GatheredOnce:
    """Run one all-gather so that FSDP creates the parameters the network computes with; later only their storage is
    freed.

    From then on, rows of offloaded parameters (``homes``) are on the device only while they are gathered.
    """
    found = GatheredOnce({}, [])
    seen: set[Any] = set()
    for module in _sharded_modules(root.module):
        group = _group(module)
        if group is None or group in seen:
            continue  # a unit of several modules
        seen.add(group)
        resting = [one for one in group.fsdp_params if one.sharded_param in homes]
        for one in resting:
            fill_storage(one.sharded_param)
        module.unshard()
        for name, parameter in root.named.named_parameters():
            if not isinstance(parameter, DTensor):
                found.weights[name] = parameter
        module.reshard()
        asked = []
        for one in resting:
            # Private: FSDP asks this very tensor which hooks it has, the first time it pads it.
            rows, held = one.sharded_param._local_tensor, homes[one.sharded_param]
            asked.append(GatheredFromHome(rows, one.padded_sharded_param_size, held))
            one._init_extensions()
        found.units.append(UnitFromHome(asked, group._reshard_after_forward))
    return found


def _group(module: FSDPModule) -> Any:
    """FSDP's own record of a unit's parameters, None if it has none. Private; present in torch 2.11 to 2.13."""
    return cast(Any, module)._get_fsdp_state()._fsdp_param_group


def piece(held: HeldParameter, mesh: Mesh) -> Shard:
    """This rank's rows of an FSDP parameter."""
    ranks, index, box = held.group.sharded.size, mesh.index_in(held.group.sharded), held.part.box
    tensor, working = updated(held, local_tensor(held.parameter))
    if sharded_dimension(box.shape, ranks):
        part = rows_of_each(box, ranks, index)
        own = replace(held, part=replace(held.part, box=part))
        assert part.shape == tuple(tensor.shape)
        return Shard(own, tensor, 0, part.size, counts(own, mesh), working)
    rows, rest = box.shape[0], math.prod(box.shape[1:])
    share = even_share(rows, ranks)
    first = min(index * share, rows)
    stop = min(first + share, rows)
    assert tensor.numel() == (stop - first) * rest
    return Shard(held, tensor, first * rest, stop * rest, counts(held, mesh), working)


def frozen_pieces(held: Iterable[HeldParameter], mesh: Mesh) -> list[Shard]:
    """This rank's rows of frozen parameters that FSDP gathers."""
    pieces = [piece(one, mesh) for one in held]
    return [own for own in pieces if own.start < own.stop]


def frozen_weights(held: Iterable[HeldParameter], mesh: Mesh) -> list[tuple[str, Slice]]:
    """Slices of frozen parameters that FSDP gathers: this rank's rows."""
    found = []
    for one in held:
        if one.parameter.dtype == PACKED:
            found.append((one.name, _packed_rows(one, mesh)))
        elif (own := piece(one, mesh)).start < own.stop:
            found.append((own.name, _slice(own)))
    return [(name, part) for name, part in found if part.local.numel()]


def _packed_rows(held: HeldParameter, mesh: Mesh) -> Slice:
    ranks, index, box = held.group.sharded.size, mesh.index_in(held.group.sharded), held.part.box
    rows = local_tensor(held.parameter) if held.home is None else held.home
    if sharded_dimension(box.shape, ranks):
        return slice_of(rows, box.whole, rows_of_each(box, ranks, index).offset, held.home_file)
    first = min(index * even_share(box.shape[0], ranks), box.shape[0])
    return slice_of(rows, box.whole, (box.offset[0] + first, *box.offset[1:]), held.home_file)


def _slice(piece: Shard) -> Slice:
    first = piece.start // math.prod(piece.box.shape[1:])
    values = piece.tensor.data if piece.working is None else piece.working
    offset = piece.box.offset[0] + first, *piece.box.offset[1:]
    return slice_of(values, piece.box.whole, offset, piece.held.home_file)


def _reduce_now(root: FSDPModule) -> None:
    """Reduce a segment's accumulated gradients and free its gathered parameters.

    FSDP does this at the end of a backward pass, but weight gradients may be computed after it, and there is no public
    way to ask later. torch's own pipelines call this private function; torch 2.11 to 2.13 have it.
    """
    state: Any = root._get_fsdp_state()
    if not hasattr(state, "_root_post_backward_final_callback"):
        raise RuntimeError(
            f"torch {torch.__version__} offers no way to reduce FSDP's gradients after a backward pass"
        )
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    root.set_is_last_backward(True)
    state._root_post_backward_final_callback()
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    root.set_is_last_backward(False)
