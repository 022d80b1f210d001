"""Apply a layout's strategies to a network from outside the model, in one function from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.facts.config import TuneSection
from shoal.facts.layout.offload import waiting
from shoal.facts.layout.parameter_groups import (
    DENSE,
    EXPERTS,
    ParameterGroup,
    meeting_in_blocks,
    parameter_groups,
)
from shoal.facts.recipe import Scaling
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.models.decoder import Network
from shoal.models.initial import Fill, Slice
from shoal.models.nf4 import PACKED
from shoal.parallel import experts, tensor
from shoal.parallel.compile import CompiledBlocks
from shoal.parallel.context import share_rows, split_sequence
from shoal.parallel.execute import Executor
from shoal.parallel.float8_gather import gather_in_float8
from shoal.parallel.float8_scales import Float8Scales
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.activations import ActivationOffload
from shoal.parallel.offload.direct_files import Files
from shoal.parallel.offload.host_memory import (
    LARGE,
    LARGE_AT_FIRST,
    HostMemory,
    give_back_large_blocks,
    give_back_what_is_free,
)
from shoal.parallel.offload.params import ParameterFetcher, make_homes, resting_names
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.offload.states import OffloadedStates
from shoal.parallel.packed import fill_packed, pack_weights
from shoal.parallel.pipeline import my_stages
from shoal.parallel.recompute import recompute
from shoal.parallel.replicate import Replicate
from shoal.parallel.router_tally import RouterTally
from shoal.parallel.shard import FullyShard, ShardedRoot, frozen_pieces, frozen_weights, shard
from shoal.parallel.shards import (
    ComposedReducer,
    GroupOf,
    HeldParameter,
    NoReducer,
    Reducer,
    Shard,
    held_parameters,
    piece_slices,
    set_weight,
    unsharded_pieces,
    whole_weights,
    write_working,
)
from shoal.parallel.shared_gradients import SharedGradients
from shoal.parallel.stage_module import (
    StageModule,
    before_backward,
    local_tensor,
    materialize,
    split_stages,
    with_gradient,
)
from shoal.parallel.strict import StrictReducer
from shoal.parallel.zero import ShardedStates


@dataclass
class Placed:
    """This rank's part of a network: it has storage and values, and knows how to work with the other ranks."""

    segments: list[StageModule]
    weights: list[tuple[str, Slice]]  # every parameter held here, as the network reads it
    frozen: list[tuple[str, Slice]]  # of these, what the optimizer leaves alone
    still: list[Shard]  # of what is frozen, the elements that this rank answers for
    parts: list[Reducer]  # of ``gradients``, one for each way to sum them
    gradients: Reducer
    shared: SharedGradients
    executor: Executor
    routers: RouterTally
    exact: StrictReducer | None  # in strict mode
    compiled: CompiledBlocks | None  # None: blocks run eager
    float8: Float8Scales | None  # None: products are in the compute precision
    host: HostMemory  # where what is offloaded waits
    files: Files | None  # or what the host has no room for either
    offloaded: OffloadedStates | None  # None: the device updates all that this rank updates
    fetched: ParameterFetcher | None  # None: all weights rest on the device
    # How many blocks ahead of the one that is computed weights are read; None: an offloaded update is waited for, and
    # does not go on while the next forward pass begins.
    reads_ahead: int | None

    @property
    def measures(self) -> tuple[str, ...]:
        """What the loss reports beside itself."""
        return self.segments[0].network.loss.measures

    def take_early(self, take: Callable[[Shard, Tensor], None]) -> None:
        """From now on gradients are given away in the backward pass, each as soon as it is complete.

        Not those to which other ranks' are added at the end of a step.
        """
        for part in self.parts:
            chosen = [piece for piece in part.pieces if not self.shared.sums(piece)]
            if isinstance(part, ShardedStates):
                part.take_early(take, chosen)
                continue
            sharded = part.parameters if isinstance(part, FullyShard) else {}
            for piece in chosen:
                parameter: Tensor = sharded.get(piece.held.label, piece.held.parameter)
                parameter.register_post_accumulate_grad_hook(_give(piece, take))

    def start_step(self, micro_batches: int) -> None:
        self.gradients.start_step()
        if self.offloaded is not None:
            self.offloaded.start_step(micro_batches)

    def finish_step(self, batch: int) -> None:
        """Every piece's gradient is the global batch's, of so many sequences, and where it is updated."""
        if self.fetched is not None:
            self.fetched.drop_all()
        self.gradients.finish_step()
        if self.exact is not None:
            self.exact.deliver(batch)
        self.shared.sum(self.gradients.pieces)
        if self.offloaded is not None:
            self.offloaded.leave_rest()

    def fill(self, give: Fill) -> None:
        """Give the network values: to the pieces that are updated here, from which all ranks' weights follow."""
        pieces = self.gradients.pieces
        together = [piece for piece in pieces if piece.away is None]
        give([(piece.name, part) for piece in together for part in piece_slices(piece, piece.tensor)])
        for piece in (piece for piece in pieces if piece.away is not None):
            # Made on the device, as without offload: a host takes minutes for what it makes in a second, and its
            # functions round otherwise.
            values = torch.empty_like(piece.tensor, device=self.host.device)
            give([(piece.name, part) for part in piece_slices(piece, values)])
            set_weight(piece, values)
            del values
            if piece.held.home_file is not None and self.host.device.type == "cpu":
                give_back_what_is_free()
        self.after_update()

    def fill_frozen(self, give: Fill) -> None:
        """Give the frozen weights their values; of a base that adapters are added to, no checkpoint has them."""
        fill_packed(self.frozen, give)
        if plain := [one for one in self.frozen if one[1].local.dtype != PACKED]:
            give(plain)

    def after_update(self, copied: bool = False, returned: bool = False) -> None:
        """The pieces have new values: so have, on all ranks, the weights that the network reads.

        ``copied``: this rank's working copies are up to date. ``returned``: those of offloaded pieces are, or will be.
        """
        pieces = self.gradients.pieces
        if self.fetched is not None:
            self.fetched.drop_all()
        write_working(piece for piece in pieces if not (copied if piece.away is None else returned))
        self.gradients.after_update()
        if self.float8 is not None:
            self.float8.refresh()


def apply(
    network: Network,
    mesh: Mesh,
    tune: TuneSection,
    fill: Fill,
    seq: int,
    reduce_dtype: torch.dtype | None = None,
    strict: bool = False,
    group_of: GroupOf | None = None,
    compile_with: str | None = None,
    fp8: Scaling | None = None,
    one_pass: bool = False,
    files: Files | None = None,
    blockwise: bool = False,
) -> Placed:
    """Place a network that was built on the meta device; ``fill`` gives the parameters updated here their values.

    The network has the precision that its state is kept in. No rank ever holds more than its part. ``reduce_dtype`` is
    the type gradients travel in, None for their own. ``group_of``: to which group a parameter belongs, if not to those
    of the layout. ``compile_with``: torch.compile's backend for the blocks, None to run them eager. ``fp8``: how the
    operands of the blocks' products are scaled, None for products in the compute precision. ``one_pass``: nothing is
    added to a gradient, so that it can stay as it was computed. ``files``: for what is offloaded ``@nvme``.
    ``blockwise``: the optimizer's states come in blocks, which no rank's share cuts (``facts/blockwise.py``).
    """
    layout, model = mesh.layout, network.shape
    compute, states = network.model.compute, next(network.parameters()).dtype
    lora = model.adapters is not None
    groups = parameter_groups(layout, model.experts is not None, lora)
    fully, away = groups[DENSE].fully_sharded, waiting(layout.offload, "optimizer")
    resting = waiting(layout.offload, "params")
    summed = reduce_dtype or states
    # Pipeline: the blocks of this rank's stages, and nothing else. A tied embedding that is needed at both ends of
    # a pipeline has two copies; so it has in strict mode, where each end's gradient is rounded by itself.
    own_head = layout.pp > 1 or strict
    segments = split_stages(network, my_stages(model, layout, mesh.coords["pp"], seq), own_head)
    blocks = [block for segment in segments for block in segment.network.model.layers.values()]

    # Shards rest as wide as they are updated, and are gathered as narrow as they are used. Everywhere else, and where
    # the host updates, the network reads a working copy.
    if compute.itemsize < states.itemsize:
        for segment in segments:
            if not fully or away is not None:
                _cast(segment.network, compute)
            elif model.experts is not None and not groups[EXPERTS].fully_sharded:
                for mixture in experts.mixtures(segment.network):
                    _cast(mixture.experts, compute)
            # What is frozen is only read.
            _cast(segment.network, compute, trained=False)

    # Tensor: of every matrix this rank's box.
    if (group := mesh.group("tp")) is not None:
        for segment in segments:
            tensor.split(segment.network, model, layout.tp, mesh.coords["tp"], group, layout.sp)

    # What is frozen in 4 bits: blocks of 64 values are not cut, so that bytes are the same however a weight is.
    if model.adapters is not None and model.adapters.base == "nf4":
        pack_weights(blocks)

    # Context: of every row this rank's tokens, and attention to all of them.
    split_sequence(blocks, mesh)
    for segment in segments:
        share_rows(segment.network, mesh)
    # Experts: of the routed ones this rank's.
    if layout.ep > 1:
        for segment in segments:
            experts.split(segment.network, mesh)

    memory = HostMemory(mesh.device)
    if files is None and any(part.nvme for part in layout.offload):
        raise ValueError(f"layout {layout} keeps something on disks, and is given no files there")
    kept_away = waiting(layout.offload, "activations")
    to_disk = files if kept_away is not None and kept_away.nvme else None
    activations = ActivationOffload(memory, kept_away.fraction if kept_away is not None else 0.0, to_disk)
    recompute(blocks, layout.recompute, activations.contexts)
    compiled = None
    if compile_with is not None:
        compiled = CompiledBlocks(
            blocks, layout.recompute, compile_with, mesh.group_of(meeting_in_blocks(layout))
        )

    # Offload: around all that makes a block keep less, it sees what is still kept.
    if kept_away is not None:
        activations.watch(segments)

    # Shard or replicate, group by group: who holds, sums and updates what among the data ranks.
    if fully:
        for segment in segments:
            shard(segment, mesh, tune, compute, summed, groups)
    names = frozenset() if resting is None else resting_names(segments, resting.fraction)
    tight = bool(names) and mesh.device.type == "cpu"
    if tight:
        give_back_large_blocks(LARGE_AT_FIRST)
    for segment in segments:
        materialize(segment, mesh.device, names)
        for parameter in segment.parameters():
            if not isinstance(parameter, DTensor) and parameter.requires_grad:
                # Gradients that nothing is added to may stay as they are computed.
                parameter.grad_dtype = compute if one_pass and not strict else states
    float8 = None if fp8 is None else Float8Scales(blocks, fp8, mesh, sharded=fully)
    in_float8 = gather_in_float8(blocks, fp8, layout.shards) if fp8 is not None and fully else []
    # Offload: weights that rest off the device come from there as they are used.
    staged = None
    if resting is not None and resting.nvme and files is not None:
        staged = StagedFiles(files, memory)
    homes = make_homes(segments, names, memory, staged)
    fetched = None if resting is None else ParameterFetcher(segments, homes, mesh.device)
    every = held_parameters(
        segments, model, mesh, group_of, states, away is not None, homes.tensors, homes.files
    )
    held, still = (
        [one for one in every if one.parameter.requires_grad == trained] for trained in (True, False)
    )
    bucket_bytes = round(tune.bucket_mb * 2**20)
    roots = {segment.stage.index: ShardedRoot(segment, segment.network) for segment in segments}

    def reducer(held: list[HeldParameter]) -> Reducer:
        group = held[0].group
        if group.fully_sharded:
            return FullyShard(roots, held, mesh, summed, in_float8)
        if group.sharded.size > 1:
            return ShardedStates(held, mesh, bucket_bytes, reduce_dtype, blockwise)
        if group.replicated.size > 1 and not strict:
            return Replicate(held, mesh, bucket_bytes, reduce_dtype)
        return NoReducer(held, mesh)

    # What FSDP holds is one: it goes through a segment once, whichever ranks share a unit.
    together: dict[ParameterGroup | None, list[HeldParameter]] = {}
    for one in held:
        together.setdefault(None if one.group.fully_sharded else one.group, []).append(one)
    parts = [(of_group, reducer(of_group)) for of_group in together.values()]
    gradients = ComposedReducer(held, parts) if len(parts) != 1 else parts[0][1]
    exact = StrictReducer(gradients, held, mesh) if strict else None
    # Once FSDP has gathered for the first time: only then its rows are where they stay.
    still = [replace(one, states=None) for one in still]  # it is no copy of anything
    in_shards = [one for one in still if one.group.fully_sharded]
    whole = [one for one in still if not one.group.fully_sharded]
    frozen = [*frozen_weights(in_shards, mesh), *whole_weights(whole)]
    if lora:
        in_shards, whole = [], []  # what adapters are added to is in no checkpoint
    elif still and segments[0].stage.first:
        # The backward pass goes through all blocks, whatever is frozen: all ranks meet in it, and so do stages.
        segments[0].network.model.embed_tokens.register_forward_hook(
            lambda _, args, output: with_gradient(output)
        )

    # In strict mode a weight's gradient is taken where autograd gives it, micro-batch by micro-batch.
    split_backward = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD and not strict
    routers = RouterTally(segments, model, mesh)
    executor = Executor(
        segments, mesh, exact or gradients, split_backward, strict, compiled is not None, routers
    )
    # There a sum of two has one rounding, as where both are on one rank.
    shared = SharedGradients(model, mesh, own_head, None if strict else reduce_dtype)
    offloaded = None
    if away is not None:
        in_files = files if away.nvme else None
        offloaded = OffloadedStates(gradients.pieces, memory, away.fraction, states, in_files, staged)
        if layout.pp == 1:
            for _, part in parts:
                _leave_early(part, offloaded, shared, compute)
                if isinstance(part, NoReducer):
                    for block in blocks:
                        before_backward(block, offloaded.let_go_but_last)
            blocks[-1].register_forward_pre_hook(offloaded.let_go)
    # What is gathered, or measured, after an update waits for it.
    reads_ahead = None
    if float8 is None and not any(isinstance(part, ShardedStates) for _, part in parts):
        reads_ahead = layout.unit * (tune.prefetch + 1) if fully else int(fetched is not None)
    placed = Placed(
        segments,
        [*frozen, *gradients.weights()],
        frozen,
        [*frozen_pieces(in_shards, mesh), *unsharded_pieces(whole, mesh)],
        [part for _, part in parts],
        exact or gradients,
        shared,
        executor,
        routers,
        exact,
        compiled,
        float8,
        memory,
        files,
        offloaded,
        fetched,
        reads_ahead,
    )
    placed.fill_frozen(fill)
    placed.fill(fill)
    if tight:
        give_back_large_blocks(LARGE)
    return placed


def _give(piece: Shard, take: Callable[[Shard, Tensor], None]) -> Callable[[Tensor], None]:
    def give(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        take(piece, local_tensor(gradient))
        parameter.grad = None

    return give


def _leave_early(
    part: Reducer, offloaded: OffloadedStates, shared: SharedGradients, compute: torch.dtype
) -> None:
    """Gradients go to the host in the backward pass where they are complete by then."""
    if isinstance(part, FullyShard):
        for piece in part.pieces:
            if piece.working is not None:
                offloaded.take_early(part.parameters[piece.held.label], piece, stays=shared.sums(piece))
    elif isinstance(part, ShardedStates) and part.every_pass and part.replicas is None:
        for piece in part.pieces:
            if piece.away is not None:
                piece.away.early = not shared.sums(piece)
        part.leave_early(offloaded.leave)
    elif isinstance(part, NoReducer):
        for piece in part.pieces:
            if piece.away is not None and not shared.sums(piece):
                # Nothing is added to it here.
                piece.held.parameter.grad_dtype = compute
                offloaded.take_early(piece.held.parameter, piece, stays=False)


def _cast(module: nn.Module, dtype: torch.dtype, trained: bool = True) -> None:
    """Parameters on the meta device, in another precision; those that are one stay one. ``trained``: these too.

    Not by ``module.to``: it swaps tensors without storage, and refuses where something else looks at one.
    """
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter.requires_grad and not trained:
                continue
            if parameter not in cast:
                cast[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(child, name, cast[parameter])
