"""What one rank communicates in a step, composed from each strategy's traffic.

``calls`` is for planning: cheap, and close where buckets are concerned. ``traffic`` is to the byte and to the call what
a rank of the running engine is counted to issue.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.facts.parameter_groups import DENSE
from shoal.facts.ranks import AXES, coordinates, line, stride
from shoal.facts.traffic import Traffic, show_ranks
from shoal.predict import context, control, expert, pipeline, replicate, shard, tensor
from shoal.predict.call import Call
from shoal.predict.question import Question
from shoal.predict.rank_parameters import EMBEDDING, RankParameters, named_tensors, rank_parameters, trained


def calls(question: Question, stage: int = 0) -> tuple[Call, ...]:
    """What a rank of pipeline rank ``stage`` issues in a step, all its chunks together, equal calls merged."""
    here = rank_parameters(question.layout, question.model, question.cut_by, stage)
    return (
        *replicate.calls(question, here),
        *shard.calls(question, here),
        *_exchanges(question, here),
        *_even_sums(question, here),
    )


def _exchanges(question: Question, here: RankParameters) -> tuple[Call, ...]:
    """What needs no list of tensors."""
    return (
        *tensor.calls(question, here),
        *context.calls(question, here),
        *expert.calls(question, here),
        *pipeline.calls(question, here),
        *control.calls(question),
    )


def _even_sums(question: Question, here: RankParameters) -> list[Call]:
    """The sums beyond the data ranks, each of which takes an even share where states are sharded."""
    ranks = question.groups[DENSE].sharded.size
    _, over_tensor, over_copies = trained(question, here)
    found = tensor.shared(question, over_tensor // ranks or None, over_copies // ranks or None)
    if here.end and question.lora is None:
        table = (here.embedding if here.first else here.head).tensors[0]
        found += pipeline.ends(question, table.size // ranks)
    return found


def traffic(question: Question, rank: int | None = None) -> list[Traffic]:
    """One rank's collectives of a step, sorted by operation and group, as ``CollectiveCounter`` counts them.

    Without ``rank``: of the pipeline ranks the one that moves the most bytes, and there the first rank, which has the
    largest part of the vocabulary. With ``lora``, which is not run yet, buckets and shares are those of ``calls``.
    """
    layout = question.layout
    if rank is None:
        rank = busiest_stage(question) * stride("pp", layout)
    return merged(_exact(question, rank), question, rank)


def busiest_stage(question: Question) -> int:
    """The pipeline rank that moves the most bytes in a step; the first of equals."""
    moved = [
        sum(call.bytes * call.count for call in calls(question, stage)) for stage in range(question.layout.pp)
    ]
    return moved.index(max(moved))


def _exact(question: Question, rank: int) -> list[Call]:
    layout, model = question.layout, question.model
    place = coordinates(rank, layout)
    if question.lora is not None:
        return list(calls(question, place["pp"]))
    here = rank_parameters(layout, model, question.cut_by, place["pp"], place["tp"])
    stages = [named_tensors(here, model, stage) for stage in here.stages]
    mine = shard.owned(question, stages, place["fsdp"] * layout.cp + place["cp"])
    sums = {kind: [size for one, size in mine if one.summed == kind] for kind in ("tensor", "copies")}
    copies = [size for one, size in mine if one.name == EMBEDDING] if here.end else []
    return [
        *replicate.exact(question, stages),
        *shard.exact(question, here, stages),
        *_exchanges(question, here),
        *tensor.shared(question, *(sum(sizes) if sizes else None for sizes in sums.values())),
        *pipeline.ends(question, sum(copies) if copies else None),
    ]


def merged(found: Iterable[Call], question: Question, rank: int) -> list[Traffic]:
    """Calls added up by operation and group, these under the names that a running rank has for them."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for call in found:
        if call.count:
            key = call.op, shown(call.group, question, rank)
            count, total = sums.get(key, (0, 0))
            sums[key] = count + call.count, total + call.count * call.bytes
    return sorted(Traffic(*key, *totals) for key, totals in sums.items())


def shown(group: str, question: Question, rank: int) -> str:
    """A group as the counter shows it: by its axis or, where it is none of those, by its ranks."""
    layout, model = question.layout, question.model
    if group == "control":
        return _control(question)
    if group == "pp":
        return show_ranks(line(rank, "pp", layout))
    if group == "pp ends":
        along = line(rank, "pp", layout)
        return show_ranks([along[0], along[-1]])
    if group == "tp copies":
        along, sharing = line(rank, "tp", layout), layout.tp // model.kv_heads
        first = coordinates(rank, layout)["tp"] // sharing * sharing
        return show_ranks(along[first : first + sharing])
    return group


def _control(question: Question) -> str:
    """On CPUs the group of all ranks is also that of the only axis, where there is but one."""
    axes = [axis for axis in AXES if getattr(question.layout, axis) > 1]
    return axes[0] if len(axes) == 1 and question.cluster.device.name == "cpu" else "world"
