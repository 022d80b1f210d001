"""Activation bytes of one micro-batch on any pipeline rank: its blocks, logits, final norm and residual stream."""

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
from shoal.predict.memory.adapted import adapted_activations
from shoal.predict.memory.adapted_experts import adapted_experts
from shoal.predict.memory.block_workload import BlockActivations, BlockWorkload
from shoal.predict.memory.logits import Logits, logits
from shoal.predict.rank_parameters import in_block
from shoal.predict.workload import Workload

# A split embedding saves for each token its row here, and whether it is here.
PLACE_BYTES = 8 + 1


class BlockKind(NamedTuple):
    experts: bool
    window: bool  # attention window shorter than the sequence
    entry: bool  # the network's first block, with nothing trained before it
    frozen: frozenset[str] = frozenset()  # names within the block of parameters frozen by recipe groups


class MicroBatchBytes(NamedTuple):
    work: BlockWorkload
    blocks: dict[BlockKind, BlockActivations]
    logits: Logits
    norm: float  # saved by the final norm, and its output if the head saves that
    result: float  # the final norm's output as the head reads it, if it lives only during the loss
    norm_backward: float  # peak of the final norm's backward pass
    tables: float  # rotary position tables
    stream: float  # one copy of the residual stream
    dropped: float  # dropout mask of the embedding
    places: float  # rows of a split embedding that the tokens are looked up in


def parameters_are_sharded(workload: Workload) -> bool:
    group = workload.groups[DENSE]
    return group.sharded.size > 1 and (group.zero == 3 or workload.stack.unsharded == "fsdp")


def rank_bytes(workload: Workload) -> BytesPerParameter:
    """Bytes per parameter. Shards are as wide as the update; if that is offloaded, as wide as the compute."""
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
        adapters=None if workload.lora is None else workload.lora.adapters_of(workload.model),
        compiled=workload.compiled,
        fp8=recipe.precision == "fp8",
        ep=layout.ep,
        nodes=workload.expert_nodes.across.size,
        parts=workload.expert_parts,
        crossed=workload.crossing,
    )
    handed_on = hold.gradient
    if sharded:
        handed_on = hold.compute if layout.pp == 1 else hold.reduce
    elif leaves_early(layout) and layout.shards == 1:
        handed_on = hold.compute  # gradients leave for the host unwidened
    later = workload.recipe.loss_facts.of_log_probabilities
    frozen = frozen_names(workload.model, workload.recipe)
    return _counted(workload.model, work, hold, handed_on, sharded, later, frozen)


@lru_cache(maxsize=65536)
def block_kind(model: Model, layer: int, seq: int, frozen: frozenset[str], lora: bool) -> BlockKind:
    prefix = f"{BLOCKS}{layer}."
    still = frozenset(name.removeprefix(prefix) for name in frozen if name.startswith(prefix))
    window = (model.layer_window(layer) or seq) < seq
    return BlockKind(model.has_experts(layer), window, lora and layer == 0, still)


@lru_cache(maxsize=1024)
def block_kinds(model: Model, seq: int, frozen: frozenset[str], lora: bool) -> frozenset[BlockKind]:
    return frozenset(block_kind(model, layer, seq, frozen, lora) for layer in range(model.layers))


def _block(model: Model, kind: BlockKind, work: BlockWorkload) -> BlockActivations:
    if work.adapters is None:
        return block_activations(model, kind.experts, kind.window, _reading(model, work, kind))
    if kind.experts and model.experts is not None:
        return adapted_experts(model, model.experts, kind.window, kind.entry, work.adapters, work)
    return adapted_activations(model, kind.window, kind.entry, work.adapters, work)


def _reading(model: Model, work: BlockWorkload, kind: BlockKind) -> BlockWorkload:
    """A block with frozen parameters: only trained projections save their input."""
    if not kind.frozen:
        return work
    names = [in_block(one.name) for one in block_parameters(model, kind.experts) if len(one.shape) == 2]
    trained = frozenset(name.rsplit(".", 2)[-2] for name in names if name not in kind.frozen)
    norms = not any("norm" in name for name in kind.frozen)
    return replace(work, trained=trained, norms=norms)


@lru_cache(maxsize=65536)
def _counted(
    model: Model,
    work: BlockWorkload,
    hold: BytesPerParameter,
    handed_on: float,
    sharded: bool,
    later: bool,
    frozen: frozenset[str],
) -> MicroBatchBytes:
    lora = work.adapters is not None
    kinds = block_kinds(model, work.seq, frozen, lora)
    head = EMBEDDING if model.tied else HEAD
    stream, read = (hold.compute * model.hidden * count for count in (work.stream, work.tokens))
    fused = work.stack.loss == "fused"
    rotary = model.latent.rope_dim if model.latent else int(model.head_dim * model.rope_fraction)
    tables = 0 if model.positions != "rotary" else 1 if model.window_theta is None else 2
    return MicroBatchBytes(
        work=work,
        blocks={kind: _block(model, kind, work) for kind in kinds},
        logits=logits(
            model,
            tokens=work.tokens,
            tp=work.tp,
            hold=hold,
            handed_on=handed_on,
            gathered=sharded,
            stack=work.stack,
            later=later,
            trained=head not in frozen,
        ),
        norm=norm_keeps(model, work) * work.stream + (0.0 if fused else read),
        result=read + (stream if work.sp and not later else 0.0) if fused else 0.0,
        norm_backward=norm_backward(model, work),
        tables=tables * hold.wide * rotary * work.tokens,
        stream=stream,
        dropped=model.hidden * work.stream if work.dropout or work.stack.dropout else 0.0,
        places=PLACE_BYTES * work.tokens if work.tp > 1 and not lora and EMBEDDING not in frozen else 0.0,
    )
