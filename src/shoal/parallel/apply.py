"""Apply a layout's strategies to a network from outside the model, in one function from top to bottom."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
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
from shoal.models.initial import Fill
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
)
from shoal.parallel.offload.params import ParameterFetcher, make_homes, resting_names
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.offload.states import OffloadedStates
from shoal.parallel.packed import pack_weights
from shoal.parallel.pipeline import my_stages
from shoal.parallel.placed import Placed
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
    held_parameters,
    unsharded_pieces,
    whole_weights,
)
from shoal.parallel.shared_gradients import SharedGradients
from shoal.parallel.stage_module import (
    before_backward,
    materialize,
    split_stages,
    with_gradient,
)
from shoal.parallel.strict import StrictReducer
from shoal.parallel.zero import ShardedStates


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
    """Place a network built on the meta device, in the precision of its states. No rank ever holds more than its part.

    ``fill`` gives the parameters that this rank updates their values. ``reduce_dtype``: the type in which gradients are
    reduced, None for their own. ``group_of`` overrides the layout's parameter groups. ``compile_with``: torch.compile's
    backend for the blocks, None to run them eager. ``fp8``: how operands of the blocks' products are scaled, None for
    products in the compute precision. ``one_pass``: a step has one micro-batch, so that nothing is ever added to a
    gradient and it can stay as it was computed. ``files``: where tensors offloaded ``@nvme`` go. ``blockwise``: the
    optimizer keeps its states in blocks, which no rank's share may cut (``facts/blockwise.py``).
    """
    layout, model = mesh.layout, network.shape
    compute, states = network.model.compute, next(network.parameters()).dtype
    lora = model.adapters is not None
    groups = parameter_groups(layout, model.experts is not None, lora)
    fully, away = groups[DENSE].fully_sharded, waiting(layout.offload, "optimizer")
    resting = waiting(layout.offload, "params")
    summed = reduce_dtype or states
    # Pipeline: keep the blocks of this rank's stages only. A tied embedding is needed at both ends of a pipeline, so
    # it has two copies; strict mode makes two as well, because it rounds each end's gradient by itself.
    own_head = layout.pp > 1 or strict
    segments = split_stages(network, my_stages(model, layout, mesh.coords["pp"], seq), own_head)
    blocks = [block for segment in segments for block in segment.network.model.layers.values()]

    # Precision: FSDP keeps shards as wide as they are updated and gathers them as narrow as they are used. Everywhere
    # else, and where the host updates, the network reads a narrow working copy.
    if compute.itemsize < states.itemsize:
        for segment in segments:
            if not fully or away is not None:
                _cast(segment.network, compute)
            elif model.experts is not None and not groups[EXPERTS].fully_sharded:
                for mixture in experts.mixtures(segment.network):
                    _cast(mixture.experts, compute)
            # Frozen weights are only read, so they never need the wider master.
            _cast(segment.network, compute, trained=False)

    # Tensor: keep this rank's slice of every matrix.
    if (group := mesh.group("tp")) is not None:
        for segment in segments:
            tensor.split(segment.network, model, layout.tp, mesh.coords["tp"], group, layout.sp)

    # QLoRA: freeze the base in 4 bits. No cut goes through a block of 64 values, so the bytes are the same in every
    # layout.
    if model.adapters is not None and model.adapters.base == "nf4":
        pack_weights(blocks)

    # Context: keep this rank's tokens of every row, and attend to all of them.
    split_sequence(blocks, mesh)
    for segment in segments:
        share_rows(segment.network, mesh)
    # Experts: keep this rank's routed experts, and exchange tokens with the ranks of the others.
    if layout.ep > 1:
        for segment in segments:
            experts.split(segment.network, model, mesh)

    memory = HostMemory(mesh.device)
    if files is None and any(part.nvme for part in layout.offload):
        raise ValueError(f"layout {layout} offloads to NVMe, but no files were opened for it")
    kept_away = waiting(layout.offload, "activations")
    to_disk = files if kept_away is not None and kept_away.nvme else None
    activations = ActivationOffload(memory, kept_away.fraction if kept_away is not None else 0.0, to_disk)
    recompute(blocks, layout.recompute, activations.contexts)
    compiled = None
    if compile_with is not None:
        compiled = CompiledBlocks(
            blocks, layout.recompute, compile_with, mesh.group_of(meeting_in_blocks(layout))
        )

    # Offload of activations: outermost, so that it sees only what recomputation still keeps.
    if kept_away is not None:
        activations.watch(segments)

    # Shard: FSDP, block by block. Only now do parameters get storage, and only for this rank's part.
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
                # A gradient to which nothing is added may stay as narrow as it was computed.
                parameter.grad_dtype = compute if one_pass and not strict else states
    float8 = None if fp8 is None else Float8Scales(blocks, fp8, mesh, sharded=fully)
    in_float8 = gather_in_float8(blocks, fp8, layout.shards) if fp8 is not None and fully else []
    # Offload of weights: they rest off the device and are fetched as they are used.
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
    # Gradients: one reducer per parameter group, for ranks that shard, replicate or neither.
    bucket_bytes = round(tune.bucket_mb * 2**20)
    roots = {segment.stage.index: ShardedRoot(segment, segment.network) for segment in segments}

    def reducer(held: list[HeldParameter]) -> Reducer:
        group = held[0].group
        if group.fully_sharded:
            return FullyShard(roots, held, mesh, summed, in_float8, frozen=still, staged=staged)
        if group.sharded.size > 1:
            return ShardedStates(held, mesh, bucket_bytes, reduce_dtype, blockwise)
        if group.replicated.size > 1 and not strict:
            return Replicate(held, mesh, bucket_bytes, reduce_dtype)
        return NoReducer(held, mesh)

    summed_alike = _summed_alike(held)
    parts = [reducer(one) for one in summed_alike]
    gradients = parts[0]
    if len(parts) != 1:
        gradients = ComposedReducer(held, list(zip(summed_alike, parts, strict=True)))
    exact = StrictReducer(gradients, held, mesh) if strict else None
    # Frozen parameters: after FSDP has set up its shards, because it moves the rows.
    still = [replace(one, states=None) for one in still]  # read as they are: no master behind them
    in_shards = [one for one in still if one.group.fully_sharded]
    whole = [one for one in still if not one.group.fully_sharded]
    frozen = [*frozen_weights(in_shards, mesh), *whole_weights(whole)]
    if lora:
        in_shards, whole = [], []  # a base under adapters is in no checkpoint
    elif still and segments[0].stage.first:
        # Ranks and stages communicate in the backward pass, so it must go through every block, frozen or not.
        segments[0].network.model.embed_tokens.register_forward_hook(
            lambda _, args, output: with_gradient(output)
        )

    # Run: strict mode takes a weight's gradient where autograd delivers it, micro-batch by micro-batch.
    split_backward = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD and not strict
    routers = RouterTally(segments, model, mesh)
    executor = Executor(
        segments, mesh, exact or gradients, split_backward, strict, compiled is not None, routers
    )
    # In strict mode a sum of two gradients is rounded once, as it is where both are on one rank.
    shared = SharedGradients(model, mesh, own_head, None if strict else reduce_dtype)
    # Offload of optimizer states: gradients leave for the host as early as they are complete.
    offloaded = None
    if away is not None:
        in_files = files if away.nvme else None
        offloaded = OffloadedStates(gradients.pieces, memory, away.fraction, states, in_files, staged)
        if layout.pp == 1:
            for part in parts:
                _leave_early(part, offloaded, shared, compute)
                if isinstance(part, NoReducer):
                    for number, block in enumerate(blocks, 1):
                        behind = number if number < len(blocks) else None  # the ends come together
                        before_backward(block, partial(offloaded.let_go_but, behind))
            blocks[-1].register_forward_pre_hook(offloaded.let_go)
    # Gathers of ZeRO-1 and 2, and fp8 scales, read weights right after an update: they must wait for it.
    reads_ahead = None
    if float8 is None and not any(isinstance(part, ShardedStates) for part in parts):
        # What is read from files is, one unit further.
        further = 1 + (staged is not None)
        reads_ahead = layout.unit * (tune.prefetch + further) if fully else int(fetched is not None)
    placed = Placed(
        segments=segments,
        weights=[*frozen, *gradients.weights()],
        frozen=frozen,
        still=[*frozen_pieces(in_shards, mesh), *unsharded_pieces(whole, mesh)],
        parts=parts,
        gradients=exact or gradients,
        shared=shared,
        executor=executor,
        routers=routers,
        exact=exact,
        compiled=compiled,
        float8=float8,
        host=memory,
        files=files,
        offloaded=offloaded,
        fetched=fetched,
        reads_ahead=reads_ahead,
    )
    placed.fill_frozen(fill)
    placed.fill(fill)
    if tight:
        give_back_large_blocks(LARGE)
    return placed


def _summed_alike(held: list[HeldParameter]) -> list[list[HeldParameter]]:
    """Parameters by the reducer that sums their gradients: one per group, and one for all that FSDP shards.

    FSDP walks through a segment once, whichever ranks share a unit, so its groups stay together.
    """
    together: dict[ParameterGroup | None, list[HeldParameter]] = {}
    for one in held:
        together.setdefault(None if one.group.fully_sharded else one.group, []).append(one)
    return list(together.values())


def _leave_early(
    part: Reducer, offloaded: OffloadedStates, shared: SharedGradients, compute: torch.dtype
) -> None:
    """Send gradients to the host during the backward pass, where they are complete by then."""
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
                # A single data rank: the host adds up, so nothing is added here.
                piece.held.parameter.grad_dtype = compute
                offloaded.take_early(piece.held.parameter, piece, stays=False)


def _cast(module: nn.Module, dtype: torch.dtype, trained: bool = True) -> None:
    """Give parameters on the meta device another precision; tied ones stay tied. ``trained``: not only frozen ones.

    Not by ``module.to``: it swaps tensors without storage, and refuses where something else holds a reference.
    """
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter.requires_grad and not trained:
                continue
            if parameter not in cast:
                cast[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(child, name, cast[parameter])
