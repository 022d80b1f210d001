"""The order of computations on each pipeline rank: one short rule per schedule.

A rule lists steps: an action and one of the rank's chunks (0 is the first of its stages). Micro-batches are implicit,
because each chunk takes them in order: the third ``F`` of a chunk is the forward of micro-batch 2. So every schedule
also accumulates a stage's gradients in the same order.

Some rules need whole rounds of micro-batches. They are written for enough of them, and non-existent micro-batches are
removed afterwards. That is always safe, because a computation depends only on its own micro-batch.

Idle times below are for F = I = W = 1, B = 2 and no time for communication, as measured by the tests; p is the number
of ranks. No order can idle less than p - 1, because the last rank cannot start earlier.
"""

from __future__ import annotations

from collections import deque

from shoal.facts.layout import V_SHAPED
from shoal.facts.layout.stages import require_chunks, stages_of_rank
from shoal.facts.problem import BadInput
from shoal.facts.schedules.instruction import Action, Instruction, Program

Step = tuple[Action, int]

F, B, I, W = Action.FORWARD, Action.BACKWARD, Action.INPUT, Action.WEIGHT  # noqa: E741 (the papers' letters)

# A whole backward pass takes the turns of both its halves, and either half takes the turn of a whole one.
TURNS = {F: (F,), B: (B, I, W), I: (B, I), W: (W,)}


def compute_order(schedule: str, pp: int, chunks: int, micro_batches: int) -> list[Program]:
    """The computations of every pipeline rank, in order."""
    require_chunks(schedule, chunks)
    if pp < 1 or micro_batches < 1:
        raise BadInput(f"pp={pp} with {micro_batches} micro-batches", "at least one of each")
    return [rank_order(schedule, pp, chunks, micro_batches, rank) for rank in range(pp)]


def rank_order(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> Program:
    """The computations of one rank, in order."""
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
    to_the_end = pp - 1 - rank  # ranks that a micro-batch still has to pass through
    rounds = -(-micro_batches // pp)
    chunk_order = [chunk for _ in range(rounds) for chunk in range(chunks) for _ in range(pp)]
    if schedule == "zb":
        return _zero_bubble(chunk_order, ahead=(chunks - 1) * pp + to_the_end, delay=rank)
    if schedule == "interleaved":
        return _one_forward_one_backward(chunk_order, ahead=(chunks - 1) * pp + 2 * to_the_end)
    return _one_forward_one_backward([0] * micro_batches, ahead=to_the_end)


def _numbered(steps: list[Step], stages: list[int], micro_batches: int) -> Program:
    """Attach stages and micro-batches to steps, dropping micro-batches that do not exist."""
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
    """A single rank has nothing to wait for: each micro-batch goes forward and backward in turn."""
    down = [(F, chunk) for chunk in range(chunks)]
    return (down + [(B, chunk) for chunk in reversed(range(chunks))]) * micro_batches


def _one_forward_one_backward(chunk_order: list[int], ahead: int) -> list[Step]:
    """Some forwards ahead, then forward and backward in turn, then the backwards that are left.

    ``1f1b`` (PipeDream-Flush): just enough warm-up forwards to reach the last rank. It idles 3(p - 1), as ``gpipe``
    does, but holds at most p micro-batches. ``interleaved`` (Megatron-LM): p micro-batches at a time pass through one
    chunk after another. A chunk is 1/v of a rank's work, so 3(p - 1) steps of a chunk are 1/v of that idle time; in
    return activations travel v times as often, and ranks hold more of them.
    """
    ahead = min(ahead, len(chunk_order))
    last = max(chunk_order)
    forwards = [(F, chunk) for chunk in chunk_order]
    backwards = [(B, last - chunk) for chunk in chunk_order]
    return forwards[:ahead] + _in_turn(forwards[ahead:], backwards)


def _zero_bubble(chunk_order: list[int], ahead: int, delay: int) -> list[Step]:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism): backward in halves, where the second half fills idle time.

    The input gradient goes upstream at once. The weight gradient runs ``delay`` micro-batches later, more on later
    ranks than on early ones, so that every rank holds as many micro-batches as the first rank of ``1f1b`` does (with
    one chunk: p) and has work left for the end. It idles p - 1, from p micro-batches on. With several chunks, the same
    rule applies to the interleaved order.
    """
    ahead = min(ahead, len(chunk_order))
    last = max(chunk_order)
    forwards = [(F, chunk) for chunk in chunk_order]
    inputs = [(I, last - chunk) for chunk in chunk_order]
    weights = [(W, last - chunk) for chunk in chunk_order]
    delay = min(delay, len(chunk_order))
    late = inputs[:delay] + _in_turn(inputs[delay:], weights)
    # One forward before each input gradient, as long as there are any.
    steps, waiting = forwards[:ahead], deque(forwards[ahead:])
    for step in late:
        if step[0] is I and waiting:
            steps.append(waiting.popleft())
        steps.append(step)
    return steps


def _in_turn(left: list[Step], right: list[Step]) -> list[Step]:
    """Alternate left and right; what remains of the right comes last."""
    pairs = [step for pair in zip(left, right, strict=False) for step in pair]
    return pairs + right[len(left) :]


def _zero_bubble_v(pp: int, micro_batches: int, rank: int) -> list[Step]:
    """ZB-V (same paper): chunk 0 on the way down the ranks, chunk 1 on the way back up.

    The loss is computed on the rank that started, so the first backward follows the first forward at once, and all
    ranks hold the same: 2p half-sized chunks, as much as the first rank of ``1f1b``. It idles p - 1, only the ramp:
    with 2p micro-batches or more every rank works without a pause from its first step to its last.
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

    Such a pair (``F0 B1``, ``F1 B0``) is independent, so one's communication can overlap the other's computation.
    Backward is split only while the pipeline fills and drains. It idles p - 1 at 2p micro-batches or more, and holds
    one half-sized chunk more than ``zbv``.
    """
    to_the_end = pp - 1 - rank
    fill = [(F, 0)] * (2 * to_the_end) + [(F, 0), (F, 1)] * (rank + 1) + [(I, 1), (W, 1), (F, 1)] * to_the_end
    steady = [(F, 0), (B, 1), (F, 1), (B, 0)] * (micro_batches - 2 * pp + rank + 1)
    steady += [(B, 1), (F, 1), (B, 0)] * to_the_end
    # Of the last 2(rank + 1) alternating backwards, the second half is split: weight gradients fill the gaps.
    last = [1, 0] * (rank + 1)
    drain: list[Step] = [(B, chunk) for chunk in last[: rank + 1]]
    drain += [(I, chunk) for chunk in last[rank + 1 :]]
    waiting = deque(last[rank + 1 :])
    for _ in range(to_the_end):
        drain += [(W, waiting.popleft()), (I, 0)]
        waiting.append(0)
    return fill + steady + drain + [(W, chunk) for chunk in waiting]
