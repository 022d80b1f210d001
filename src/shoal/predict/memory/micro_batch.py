"""What one micro-batch holds on any rank of a pipeline: its blocks, logits, norm and residual stream."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.facts.holdings import Holdings, holdings
from shoal.facts.model import Model
from shoal.facts.parameter_groups import DENSE
from shoal.predict.memory.activations import (
    BlockActivations,
    BlockWorkload,
    block_activations,
    norm_backward,
    norm_keeps,
)
from shoal.predict.memory.logits import Logits, logits
from shoal.predict.question import Question


class MicroBatchBytes(NamedTuple):
    work: BlockWorkload
    # By whether there are experts, and whether a window is shorter than the sequence.
    blocks: dict[tuple[bool, bool], BlockActivations]
    logits: Logits
    norm: float  # what the norm after the last block keeps, and its result
    norm_backward: float  # and the fullest moment of its backward pass
    tables: float  # of rotary positions
    stream: float  # one residual stream


def bytes_per_parameter(question: Question) -> Holdings:
    recipe = question.recipe
    return holdings(recipe.precision, recipe.states, recipe.reduce, recipe.optimizer, question.stack)


def parameters_are_sharded(question: Question) -> bool:
    group = question.groups[DENSE]
    return group.sharded.size > 1 and (group.zero == 3 or question.stack.unsharded == "fsdp")


def micro_batch_bytes(question: Question) -> MicroBatchBytes:
    layout, recipe, hold = question.layout, question.recipe, bytes_per_parameter(question)
    work = BlockWorkload(
        tokens=question.tokens,
        rows=question.micro,
        seq=recipe.seq,
        tp=layout.tp,
        sp=layout.sp and layout.tp > 1,
        compute=hold.compute,
        stack=question.stack,
        recompute=layout.recompute,
        cpu=question.cluster.device.name == "cpu",
        dropout=recipe.dropout > 0,
        context=layout.cp_kind if layout.cp > 1 else None,
        adapters=None if question.lora is None else tuple(question.lora.targets),
    )
    return _counted(question.model, work, hold, parameters_are_sharded(question))


@lru_cache(maxsize=65536)
def _counted(model: Model, work: BlockWorkload, hold: Holdings, sharded: bool) -> MicroBatchBytes:
    windowed = {(model.layer_window(layer) or work.seq) < work.seq for layer in range(model.layers)}
    experts = {model.has_experts(layer) for layer in range(model.layers)}
    rotary = model.latent.rope_dim if model.latent else int(model.head_dim * model.rope_fraction)
    return MicroBatchBytes(
        work=work,
        blocks={
            (sparse, window): block_activations(model, sparse, window, work)
            for sparse in experts
            for window in windowed
        },
        logits=logits(model, tokens=work.tokens, tp=work.tp, hold=hold, gathered=sharded, stack=work.stack),
        norm=norm_keeps(model, work) * work.stream + hold.compute * model.hidden * work.tokens,
        norm_backward=norm_backward(model, work),
        tables=hold.wide * rotary * work.tokens if model.positions == "rotary" else 0.0,
        stream=hold.compute * model.hidden * work.stream,
    )
