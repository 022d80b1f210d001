"""What one micro-batch holds on any rank of a pipeline: its blocks, logits, norm and residual stream."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shoal.facts.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from shoal.facts.layout.offload import leaves_early, waiting
from shoal.facts.layout.parameter_groups import DENSE
from shoal.facts.model import Model
from shoal.facts.model.parameters import BLOCKS, EMBEDDING, HEAD, block_parameters
from shoal.facts.recipe import frozen_names
from shoal.predict.memory.activations import block_activations, norm_backward, norm_keeps
from shoal.predict.memory.block_workload import BlockActivations, BlockWorkload
from shoal.predict.memory.logits import Logits, logits
from shoal.predict.rank_parameters import in_block
from shoal.predict.workload import Workload


class MicroBatchBytes(NamedTuple):
    work: BlockWorkload
    # By whether there are experts, and whether a window is shorter than the sequence.
    blocks: dict[BlockKind, BlockActivations]
    logits: Logits
    norm: float  # what the norm after the last block keeps, and its result where the head keeps that
    result: float  # that result, where it is only there while the loss is computed; as the head reads it
    norm_backward: float  # and the fullest moment of its backward pass
    tables: float  # of rotary positions
    stream: float  # one residual stream
    dropped: float  # which features of the embedding dropout took away


def parameters_are_sharded(workload: Workload) -> bool:
    group = workload.groups[DENSE]
    return group.sharded.size > 1 and (group.zero == 3 or workload.stack.unsharded == "fsdp")


def rank_bytes(workload: Workload) -> BytesPerParameter:
    """Shards rest as wide as they are updated; where that is elsewhere, as they are used."""
    away = waiting(workload.layout.offload, "optimizer") is not None
    sharded = parameters_are_sharded(workload) and not away
    return bytes_per_parameter(workload.recipe, workload.stack, sharded, workload.one_pass)


def micro_batch_bytes(workload: Workload) -> MicroBatchBytes:
    layout, recipe = workload.layout, workload.recipe
    sharded = parameters_are_sharded(workload)
    hold = rank_bytes(workload)
    work = BlockWorkload(
        tokens=workload.tokens,
        rows=workload.micro,
        seq=recipe.seq,
        tp=layout.tp,
        sp=layout.sp and layout.tp > 1,
        compute=hold.compute,
        stack=workload.stack,
        recompute=layout.recompute,
        cpu=workload.cluster.device.name == "cpu",
        dropout=recipe.dropout > 0,
        cp=layout.cp,
        context=layout.cp_kind if layout.cp > 1 else None,
        adapters=None if workload.lora is None else tuple(workload.lora.targets),
        compiled=workload.compiled,
        fp8=recipe.precision == "fp8",
        ep=layout.ep,
    )
    handed_on = hold.gradient
    if sharded:
        handed_on = hold.compute if layout.pp == 1 else hold.reduce
    elif leaves_early(layout) and layout.shards == 1:
        handed_on = hold.compute  # what leaves the device is not widened for it
    return _counted(
        workload.model, work, hold, handed_on, sharded, frozen_names(workload.model, workload.recipe)
    )


# Whether a block has experts; whether its window is shorter than the sequence; what of it is frozen, by names within.
BlockKind = tuple[bool, bool, frozenset[str]]


@lru_cache(maxsize=65536)
def block_kind(model: Model, layer: int, seq: int, frozen: frozenset[str]) -> BlockKind:
    prefix = f"{BLOCKS}{layer}."
    still = frozenset(name.removeprefix(prefix) for name in frozen if name.startswith(prefix))
    return model.has_experts(layer), (model.layer_window(layer) or seq) < seq, still


def _reading(model: Model, work: BlockWorkload, kind: BlockKind) -> BlockWorkload:
    """What a block keeps where some of it is frozen: inputs of those projections that are trained."""
    experts, _, still = kind
    if not still or work.adapters is not None:
        return work
    names = [in_block(one.name) for one in block_parameters(model, experts) if len(one.shape) == 2]
    trained = tuple(name.rsplit(".", 2)[-2] for name in names if name not in still)
    norms = not any("norm" in name for name in still)
    return replace(work, adapters=trained, norms=norms)


@lru_cache(maxsize=65536)
def _counted(
    model: Model,
    work: BlockWorkload,
    hold: BytesPerParameter,
    handed_on: float,
    sharded: bool,
    frozen: frozenset[str],
) -> MicroBatchBytes:
    kinds = {block_kind(model, layer, work.seq, frozen) for layer in range(model.layers)}
    head = EMBEDDING if model.tied else HEAD
    stream, read = (hold.compute * model.hidden * count for count in (work.stream, work.tokens))
    fused = work.stack.loss == "fused"
    rotary = model.latent.rope_dim if model.latent else int(model.head_dim * model.rope_fraction)
    return MicroBatchBytes(
        work=work,
        blocks={
            kind: block_activations(model, kind[0], kind[1], _reading(model, work, kind)) for kind in kinds
        },
        logits=logits(
            model,
            tokens=work.tokens,
            tp=work.tp,
            hold=hold,
            handed_on=handed_on,
            gathered=sharded,
            stack=work.stack,
            trained=head not in frozen,
        ),
        norm=norm_keeps(model, work) * work.stream + (0.0 if fused else read),
        result=read + (stream if work.sp else 0.0) if fused else 0.0,
        norm_backward=norm_backward(model, work),
        tables=hold.wide * rotary * work.tokens if model.positions == "rotary" else 0.0,
        stream=stream,
        dropped=model.hidden * work.stream if work.dropout or work.stack.dropout else 0.0,
    )
