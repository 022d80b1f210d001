"""What all ranks of a pipeline have in common, worked out once for each question."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.facts.holdings import Holdings
from shoal.facts.model import Model
from shoal.predict.activations import Block, Work, block, norm_backward, norm_keeps
from shoal.predict.logits import Loss, loss
from shoal.predict.question import Question
from shoal.predict.states import held, sharded


class Common(NamedTuple):
    """Bytes of one micro-batch."""

    # By whether there are experts, and whether a window is shorter than the sequence.
    blocks: dict[tuple[bool, bool], Block]
    loss: Loss
    norm: float  # what the norm after the last block keeps, and its result
    norm_backward: float  # and the fullest moment of its backward pass
    tables: float  # of rotary positions
    stream: float  # one residual stream


class Setting(NamedTuple):
    question: Question
    hold: Holdings
    work: Work
    common: Common
    sharded: bool  # parameters rest in shards
    keeps_casts: bool  # autograd keeps the blocks' weights in the compute precision
    casts_again: bool  # they are cast for the backward pass, because the forward pass is repeated


def setting_of(question: Question) -> Setting:
    layout, recipe, hold = question.layout, question.recipe, held(question)
    work = Work(
        question.tokens,
        question.micro,
        recipe.seq,
        layout.tp,
        layout.sp and layout.tp > 1,
        hold.compute,
        question.stack,
        layout.recompute,
        question.cluster.device.name == "cpu",
        recipe.dropout > 0,
        layout.cp_kind if layout.cp > 1 else None,
        None if question.lora is None else tuple(question.lora.targets),
    )
    in_shards = sharded(question)
    casts = hold.cast and not in_shards and question.lora is None
    again = layout.recompute != "none"
    common = _common(question.model, work, hold, in_shards)
    return Setting(question, hold, work, common, in_shards, casts and not again, casts and again)


@lru_cache(maxsize=65536)
def _common(model: Model, work: Work, hold: Holdings, in_shards: bool) -> Common:
    windowed = {(model.layer_window(layer) or work.seq) < work.seq for layer in range(model.layers)}
    experts = {model.has_experts(layer) for layer in range(model.layers)}
    rotary = model.latent.rope_dim if model.latent else int(model.head_dim * model.rope_fraction)
    return Common(
        {(sparse, window): block(model, sparse, window, work) for sparse in experts for window in windowed},
        loss(model, work.tokens, work.tp, hold, in_shards, work.stack),
        norm_keeps(model, work) * work.stream + hold.compute * model.hidden * work.tokens,
        norm_backward(model, work),
        hold.wide * rotary * work.tokens if model.positions == "rotary" else 0.0,
        hold.compute * model.hidden * work.stream,
    )
