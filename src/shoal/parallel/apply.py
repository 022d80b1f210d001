"""Apply a layout's strategies to a network from outside the model, in one function that reads top to bottom."""

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
from shoal.parallel.deferred import Deferred
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
from shoal.parallel.offload.params import ParameterFetcher, allocate_host_storage, resting_names
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
    """Place a network built on the meta device, in the dtype of its optimizer states. Each rank allocates only its
    part.

    ``fill`` initialises the parameters that this rank updates. ``reduce_dtype`` is the dtype of gradient reductions;
    None keeps each gradient's own. ``group_of`` overrides the layout's parameter groups. ``compile_with`` is
    torch.compile's backend for the blocks; None runs them eager. ``fp8`` is how the operands of the blocks' matmuls are
    scaled; None keeps matmuls in the compute precision. ``one_pass``: a step has a single micro-batch, so gradients
    never accumulate and may keep the dtype they were computed in. ``files`` stores the tensors offloaded ``@nvme``.
    ``blockwise``: the optimizer quantises its states in blocks, which no shard boundary may cut
    (``facts/blockwise.py``).
    """
    layout, model = mesh.layout, network.shape
    compute, states = network.model.compute, next(network.parameters()).dtype
    lora = model.adapters is not None
    groups = parameter_groups(layout, model.experts is not None, lora)
    fully, away = groups[DENSE].fully_sharded, waiting(layout.offload, "optimizer")
    resting = waiting(layout.offload, "params")
    summed = reduce_dtype or states
    # Pipeline: keep only the blocks of this rank's stages. A tied embedding is needed at both ends of a pipeline, so it
    # gets two copies. Strict mode makes two copies as well, because it rounds the gradient of each end separately.
    own_head = layout.pp > 1 or strict
    segments = split_stages(network, my_stages(model, layout, mesh.coords["pp"], seq), own_head)
    blocks = [block for segment in segments for block in segment.network.model.layers.values()]

    # Precision: FSDP keeps shards in the dtype of the update and gathers them in the compute dtype. Everywhere else,
    # and where the host runs the update, the network reads a narrow working copy.
    if compute.itemsize < states.itemsize:
        for segment in segments:
            if not fully or away is not None:
                _cast(segment.network, compute)
            elif model.experts is not None and not groups[EXPERTS].fully_sharded:
                for mixture in experts.mixtures(segment.network):
                    _cast(mixture.experts, compute)
            # Frozen weights are only read, so they never need wider master weights.
            _cast(segment.network, compute, trained=False)

    # Tensor: keep this rank's slice of every matrix.
    if (group := mesh.group("tp")) is not None:
        for segment in segments:
            tensor.split(segment.network, model, layout.tp, mesh.coords["tp"], group, layout.sp)

    # QLoRA: freeze the base in 4 bits. No shard boundary cuts a quantisation block of 64 values, so the bytes are the
    # same in every layout.
    if model.adapters is not None and model.adapters.base == "nf4":
        pack_weights(blocks)

    # Context: keep this rank's tokens of every row; attention still covers the whole row.
    split_sequence(blocks, mesh)
    for segment in segments:
        share_rows(segment.network, mesh)
    # Experts: keep this rank's routed experts and exchange tokens with the ranks that hold the others.
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
    # Split backward passes; not in strict mode, which takes each weight gradient where autograd delivers it, one
    # micro-batch at a time.
    split_backward = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD and not strict
    deferred = Deferred(layout.tp if layout.sp else 1) if split_backward else None
    compiled = None
    if compile_with is not None:
        compiled = CompiledBlocks(
            blocks, layout.recompute, compile_with, mesh.group_of(meeting_in_blocks(layout)), deferred
        )

    # Activation offload: outermost, so that it sees only what recomputation still saves.
    if kept_away is not None:
        activations.watch(segments)

    # Shard: FSDP, block by block. Parameters get storage only now, and only for this rank's shard.
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
                # A gradient that never accumulates may stay in the dtype it was computed in.
                parameter.grad_dtype = compute if one_pass and not strict else states
    float8 = None if fp8 is None else Float8Scales(blocks, fp8, mesh, sharded=fully)
    in_float8 = gather_in_float8(blocks, fp8, layout.shards) if fp8 is not None and fully else []
    # Weight offload: weights live off the device and are fetched as they are used.
    staged = None
    if resting is not None and resting.nvme and files is not None:
        staged = StagedFiles(files, memory)
    homes = allocate_host_storage(segments, names, memory, staged)
    fetched = None if resting is None else ParameterFetcher(segments, homes, mesh.device)
    every = held_parameters(
        segments, model, mesh, group_of, states, away is not None, homes.tensors, homes.files
    )
    held, still = (
        [one for one in every if one.parameter.requires_grad == trained] for trained in (True, False)
    )
    # Gradients: one reducer per parameter group: sharded, replicated or neither.
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
    # Frozen parameters: only after FSDP has set up its shards, because FSDP moves the rows.
    still = [replace(one, states=None) for one in still]  # only read: no master weights
    in_shards = [one for one in still if one.group.fully_sharded]
    whole = [one for one in still if not one.group.fully_sharded]
    frozen = [*frozen_weights(in_shards, mesh), *whole_weights(whole)]
    if lora:
        in_shards, whole = [], []  # a frozen base under adapters is in no checkpoint
    elif still and segments[0].stage.first:
        # Ranks and stages communicate in the backward pass, so it must run through every block, frozen or not.
        segments[0].network.model.embed_tokens.register_forward_hook(
            lambda _, args, output: with_gradient(output)
        )

    # Run: the schedule, instruction by instruction.
    routers = RouterTally(segments, model, mesh)
    executor = Executor(segments, mesh, exact or gradients, deferred, strict, compiled is not None, routers)
    # In strict mode the sum of two gradients is rounded once, as it is where one rank holds both.
    shared = SharedGradients(model, mesh, own_head, None if strict else reduce_dtype)
    # Optimizer offload: send gradients to the host as soon as they are complete.
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
    # ZeRO-1/2 all-gathers and fp8 scales read weights right after an update, so they must wait for it.
    reads_ahead = None
    if float8 is None and not any(isinstance(part, ShardedStates) for part in parts):
        # Weights in files are read one unit further ahead.
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
    """Group parameters by the reducer that sums them: one list per parameter group, and one for all that FSDP shards.

    FSDP walks a segment once, whichever ranks share a unit, so its groups stay together.
    """
    together: dict[ParameterGroup | None, list[HeldParameter]] = {}
    for one in held:
        together.setdefault(None if one.group.fully_sharded else one.group, []).append(one)
    return list(together.values())


def _leave_early(
    part: Reducer, offloaded: OffloadedStates, shared: SharedGradients, compute: torch.dtype
) -> None:
    """Send gradients to the host during the backward pass, wherever they are already complete there."""
    if isinstance(part, FullyShard):
        for unit in part.reduced_together():
            # A gradient that stays is copied out of its unit's buffer if others leave: it would keep all of it alive.
            if any(piece.away is not None or piece.working is not None for piece in unit.pieces):
                copied = part.copied_as_they_leave(unit)
                for piece in unit.pieces:
                    parameter = part.parameters[piece.held.label]
                    offloaded.take_early(parameter, piece, shared.sums(piece), copied)
            else:
                for piece in unit.pieces:
                    offloaded.make_room_with(part.parameters[piece.held.label], piece)
    elif isinstance(part, ShardedStates) and part.every_pass and part.replicas is None:
        for piece in part.pieces:
            if piece.away is not None:
                piece.away.early = not shared.sums(piece)
        part.leave_early(offloaded.leave, offloaded.make_room)
    elif isinstance(part, NoReducer):
        for piece in part.pieces:
            if piece.away is not None and not shared.sums(piece):
                # A single data rank: the host accumulates, so the device adds nothing to this gradient.
                piece.held.parameter.grad_dtype = compute
                offloaded.take_early(piece.held.parameter, piece, stays=False)


def _cast(module: nn.Module, dtype: torch.dtype, trained: bool = True) -> None:
    """Cast meta-device parameters to ``dtype`` and keep tied ones tied. ``trained=False`` casts only frozen ones.

    ``module.to`` would not do: it swaps storageless tensors and fails if anything else holds a reference to one.
    """
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter.requires_grad and not trained:
                continue
            if parameter not in cast:
                cast[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(child, name, cast[parameter])
