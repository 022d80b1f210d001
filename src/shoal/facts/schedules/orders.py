"""The order in which each pipeline rank computes: one short rule per schedule.

A rule lists steps: an action and one of the rank's chunks (0 is the first of its stages). Micro-batches are not
named, because each chunk takes them in order: the third ``F`` of a chunk is the forward of micro-batch 2.
That also makes every schedule add up a stage's gradients in the same order.

Some rules need whole rounds of micro-batches. They are written for enough of them, and the micro-batches that are
not there are left out afterwards. That is always safe: a computation depends only on its own micro-batch.

Idle times below are for F = I = W = 1, B = 2 and no time for communication, where the tests measure them; p is
the number of ranks. No order can have less than p - 1, since the last rank cannot start before.
"""

from __future__ import annotations

from collections import deque

from shoal.facts.layout import V_SHAPED
from shoal.facts.layout.stages import require_chunks, stages_of_rank
from shoal.facts.problem import BadInput
from shoal.facts.schedules.instruction import Action, Instruction, Program

Step = tuple[Action, int]

F, B, I, W = Action.FORWARD, Action.BACKWARD, Action.INPUT, Action.WEIGHT  # noqa: E741 (the papers' letters)

# A whole backward pass takes the turn of both its halves, and either half that of a whole one.
TURNS = {F: (F,), B: (B, I, W), I: (B, I), W: (W,)}


def compute_order(schedule: str, pp: int, chunks: int, micro_batches: int) -> list[Program]:
    """The computations of every pipeline rank, in order."""
    require_chunks(schedule, chunks)
    if pp < 1 or micro_batches < 1:
        raise BadInput(f"pp={pp} with {micro_batches} micro-batches", "at least one of each")
    return [rank_order(schedule, pp, chunks, micro_batches, rank) for rank in range(pp)]


def rank_order(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> Program:
    """Those of one rank."""
    steps = _steps(schedule, pp, chunks, micro_batches, rank)
    return _numbered(steps, stages_of_rank(pp, chunks, schedule, rank), micro_batches)


def _steps(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> list[Step]:
    if pp == 1:
        return _alone(chunks, micro_batches)
    if schedule == "gpipe":
        return [(F, 0)] * micro_batches + [(B, 0)] * micro_batches
    if schedule in V_SHAPED:
        enough = max(micro_batches, 2 * pp)
        return _zero_bubble_v(pp, enough, rank) if schedule == "zbv" else _dual_pipe_v(pp, enough, rank)
    to_the_end = pp - 1 - rank  # ranks that a micro-batch still has to pass
    rounds = -(-micro_batches // pp)
    chunk_order = [chunk for _ in range(rounds) for chunk in range(chunks) for _ in range(pp)]
    if schedule == "zb":
        return _zero_bubble(chunk_order, ahead=(chunks - 1) * pp + to_the_end, delay=rank)
    if schedule == "interleaved":
        return _one_forward_one_backward(chunk_order, ahead=(chunks - 1) * pp + 2 * to_the_end)
    return _one_forward_one_backward([0] * micro_batches, ahead=to_the_end)


def _numbered(steps: list[Step], stages: list[int], micro_batches: int) -> Program:
    """Steps with their stages and micro-batches, without the micro-batches that are not there."""
    done: list[dict[Action, int]] = [dict.fromkeys(TURNS, 0) for _ in stages]
    program = []
    for action, chunk in steps:
        counts = done[chunk]
        micro = counts[action]
        for each in TURNS[action]:
            counts[each] += 1
        if micro < micro_batches:
            program.append(Instruction(action, stages[chunk], micro))
    return program


def _alone(chunks: int, micro_batches: int) -> list[Step]:
    """Without other ranks there is nothing to wait for: one micro-batch after the other, through and back."""
    down = [(F, chunk) for chunk in range(chunks)]
    return (down + [(B, chunk) for chunk in reversed(range(chunks))]) * micro_batches


def _one_forward_one_backward(chunk_order: list[int], ahead: int) -> list[Step]:
    """Some forwards ahead, then forward and backward in turn, then the backwards that are left.

    ``1f1b`` (PipeDream-Flush): just enough ahead to reach the last rank. It idles 3(p - 1), as ``gpipe`` does, but
    holds at most p micro-batches. ``interleaved`` (Megatron-LM): p micro-batches at a time pass through one chunk
    after the other. A chunk is 1/v of a rank's work, so 3(p - 1) steps of a chunk are 1/v of that idle time; in
    return activations travel v times as often, and ranks hold more of them.
    """
    ahead = min(ahead, len(chunk_order))
    last = max(chunk_order)
    forwards = [(F, chunk) for chunk in chunk_order]
    backwards = [(B, last - chunk) for chunk in chunk_order]
    return forwards[:ahead] + _in_turn(forwards[ahead:], backwards)


def _zero_bubble(chunk_order: list[int], ahead: int, delay: int) -> list[Step]:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism): backward in halves, the second half fills idle time.

    The gradient of the input goes upstream at once. The gradient of the weights runs ``delay`` micro-batches later,
    on later ranks more than on early ones, so that every rank holds as many micro-batches as the first rank of
    ``1f1b`` does (with one chunk: p), and has work left for the end. It idles p - 1, from p micro-batches on.
    With several chunks it is the same rule over the interleaved order.
    """
    ahead = min(ahead, len(chunk_order))
    last = max(chunk_order)
    forwards = [(F, chunk) for chunk in chunk_order]
    inputs = [(I, last - chunk) for chunk in chunk_order]
    weights = [(W, last - chunk) for chunk in chunk_order]
    delay = min(delay, len(chunk_order))
    late = inputs[:delay] + _in_turn(inputs[delay:], weights)
    # Forwards go with the input gradients: one before each, as long as there are any.
    steps, waiting = forwards[:ahead], deque(forwards[ahead:])
    for step in late:
        if step[0] is I and waiting:
            steps.append(waiting.popleft())
        steps.append(step)
    return steps


def _in_turn(left: list[Step], right: list[Step]) -> list[Step]:
    """One of the left, one of the right, and so on; what is over of the right comes last."""
    pairs = [step for pair in zip(left, right, strict=False) for step in pair]
    return pairs + right[len(left) :]


def _zero_bubble_v(pp: int, micro_batches: int, rank: int) -> list[Step]:
    """ZB-V (same paper): chunk 0 on the way down the ranks, chunk 1 on the way back up.

    The loss is computed on the rank that started, so the first backward follows the first forward at once, and
    all ranks hold the same: 2p half-sized chunks, as much as the first rank of ``1f1b``. It idles p - 1, nothing
    but the ramp: with 2p micro-batches or more every rank works without a pause from its first step to its last.
    """
    to_the_end = pp - rank
    warm_up = (
        [(F, 0)] * (2 * to_the_end - 1) + [(F, 1), (F, 0)] * rank + [(F, 1), (I, 1), (W, 1)] * to_the_end
    )
    steady: list[Step] = []
    forwards_left = micro_batches - (2 * pp - 1 - rank)
    for turn in range(micro_batches - pp):
        steady += [(F, 0)] if turn < forwards_left else []
        steady += [(I, 0), (W, 0), (F, 1), (I, 1), (W, 1)]
    drain = [(I, 0), (I, 1)] * rank + [(I, 0), (W, 0)] * to_the_end + [(W, 1)] * rank + [(W, 0)] * rank
    return warm_up + steady + drain


def _dual_pipe_v(pp: int, micro_batches: int, rank: int) -> list[Step]:
    """DualPipeV (DeepSeek; DualPipe cut in half by Sea AI Lab): a forward of one chunk beside a backward of the other.

    Such a pair (``F0 B1``, ``F1 B0``) shares nothing, so that one's communication can hide behind the other's
    computation. Backward is split only where the pipeline fills and drains. It idles p - 1 at 2p micro-batches or
    more, and holds one half-sized chunk more than ``zbv``.
    """
    to_the_end = pp - 1 - rank
    fill = [(F, 0)] * (2 * to_the_end) + [(F, 0), (F, 1)] * (rank + 1) + [(I, 1), (W, 1), (F, 1)] * to_the_end
    steady = [(F, 0), (B, 1), (F, 1), (B, 0)] * (micro_batches - 2 * pp + rank + 1)
    steady += [(B, 1), (F, 1), (B, 0)] * to_the_end
    # Of the last 2(rank + 1) backwards in turn, the second half is split: weights wait for the gaps.
    last = [1, 0] * (rank + 1)
    drain: list[Step] = [(B, chunk) for chunk in last[: rank + 1]]
    drain += [(I, chunk) for chunk in last[rank + 1 :]]
    waiting = deque(last[rank + 1 :])
    for _ in range(to_the_end):
        drain += [(W, waiting.popleft()), (I, 0)]
        waiting.append(0)
    return fill + steady + drain + [(W, chunk) for chunk in waiting]
