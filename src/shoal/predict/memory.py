"""The memory ledger: what a rank holds at the fullest moment of a step.

A step has a few moments that can be the fullest: in the loss; in the backward pass of the last block, when everything
is still kept; in that of the first one, when almost all gradients are there; at the update. Each is a sum of what is
there together, and the ledger is the largest of these sums, not a sum of maxima.
"""

from __future__ import annotations

from shoal.facts.ledger import Ledger
from shoal.predict.device import host_share, on_top, workspace
from shoal.predict.gradients import gradients_of
from shoal.predict.instants import Instant, instants
from shoal.predict.offload import waiting
from shoal.predict.places import Place, places
from shoal.predict.question import Question
from shoal.predict.setting import Setting, setting_of
from shoal.predict.states import resting


def ledger(question: Question) -> Ledger:
    """Of the rank of the pipeline that needs the most."""
    pipeline, setting = places(question), setting_of(question)
    every = [_of_rank(setting, pipeline.ranks[rank], rank) for rank in pipeline.fullest]
    return max(every, key=lambda one: one.peak_allocated)


def ledgers(question: Question) -> list[Ledger]:
    """Of every rank of the pipeline."""
    setting = setting_of(question)
    return [_of_rank(setting, place, rank) for rank, place in enumerate(places(question).ranks)]


def _of_rank(setting: Setting, place: Place, rank: int) -> Ledger:
    question = setting.question
    states = resting(question, setting.hold, place, setting.sharded)
    away = waiting(question, states)
    gradients = gradients_of(setting, place)
    fullest = max(
        (one for kind in gradients.passes() for one in instants(setting, place, rank, kind, away)),
        key=Instant.total,
    )
    params, optimizer = round(states.params - away.params), round(states.optimizer - away.optimizer)
    grads, activations = round(fullest.grads), round(fullest.activations)
    logits, buffers = round(fullest.logits), round(fullest.buffers) + workspace(question)
    peak = params + grads + optimizer + activations + logits + buffers
    band = on_top(question, peak + round(gradients.in_other_streams(fullest.grads)))
    return Ledger(
        params=params,
        grads=grads,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        buffers=buffers,
        peak_allocated=peak,
        reserved=band.reserved,
        device_total=band.total,
        device_p90=band.p90,
        capacity=question.cluster.device.memory_bytes,
        worst_stage=rank,
        master=round(states.master * (1 - away.share_of_optimizer)),
        instant=fullest.name,
        host=round(away.host + fullest.host),
        host_capacity=host_share(question.cluster),
        nvme=round(away.nvme + fullest.nvme),
    )
