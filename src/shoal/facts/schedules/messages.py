"""Insert sends and receives between computations so that every pair of ranks agrees on their order."""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.layout.stages import rank_of_stage, stages_of_rank
from shoal.facts.schedules.instruction import (
    Instruction,
    Program,
    StageTensor,
    consumer,
    receive,
    send,
    tensor_made,
    tensor_needed,
)
from shoal.facts.schedules.orders import compute_order, rank_order


def instructions(schedule: str, pp: int, chunks: int, micro_batches: int) -> list[Program]:
    """The full program of every rank: computations, sends and receives.

    Sends and receives are asynchronous: both start where they stand, and the computation that needs a received tensor
    waits for it. Messages from one rank to another form a channel; NCCL and gloo match them by order alone, so both
    ends must list them in the same order. A send follows directly the computation that produced its tensor. A receive
    starts one computation before the one that needs it, to overlap with it, or earlier if a message sent later on its
    channel is needed sooner. The two directions between two ranks are two channels: the executor must not let one wait
    behind the other.
    """
    computed = compute_order(schedule, pp, chunks, micro_batches)
    holder = _holders(schedule, pp, chunks)
    leaving = [_sends(program, holder, rank) for rank, program in enumerate(computed)]
    return [_joined(computed[rank], leaving, rank, len(holder)) for rank in range(pp)]


def rank_program(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> Program:
    """The program of one rank; besides it, only the ranks that send to it are computed."""
    holder = _holders(schedule, pp, chunks)
    stages = stages_of_rank(pp, chunks, schedule, rank)
    beside = {holder[near] for stage in stages for near in (stage - 1, stage + 1) if 0 <= near < len(holder)}
    leaving: list[dict[Instruction, tuple[StageTensor, int]]] = [{} for _ in range(pp)]
    for other in {*beside, rank}:
        own, leaving[other] = _rank_sends(schedule, pp, chunks, micro_batches, other)
    own, _ = _rank_sends(schedule, pp, chunks, micro_batches, rank)
    return _joined(own, leaving, rank, len(holder))


@lru_cache(maxsize=32)
def _rank_sends(
    schedule: str, pp: int, chunks: int, micro_batches: int, rank: int
) -> tuple[Program, dict[Instruction, tuple[StageTensor, int]]]:
    """A rank's computations and sends. Cached for a few ranks, since each has several neighbours."""
    own = rank_order(schedule, pp, chunks, micro_batches, rank)
    return own, _sends(own, _holders(schedule, pp, chunks), rank)


def _holders(schedule: str, pp: int, chunks: int) -> list[int]:
    return [rank_of_stage(pp, chunks, schedule, stage) for stage in range(pp * chunks)]


def _joined(
    computed: Program, leaving: list[dict[Instruction, tuple[StageTensor, int]]], rank: int, stages: int
) -> Program:
    """A rank's computations with its messages inserted; ``leaving``: every rank's sends, in order."""
    arriving: dict[int, list[StageTensor]] = {}
    for sender, messages in enumerate(leaving):
        tensors = [tensor for tensor, receiver in messages.values() if receiver == rank]
        if tensors:
            arriving[sender] = tensors
    posts = _posts(computed, arriving, stages)
    whole: Program = []
    for position, instruction in enumerate(computed):
        whole += posts[position]
        whole.append(instruction)
        if instruction in leaving[rank]:
            whole.append(send(*leaving[rank][instruction]))
    return whole


def _sends(program: Program, holder: list[int], rank: int) -> dict[Instruction, tuple[StageTensor, int]]:
    """For each computation whose result goes to another rank: the tensor and that rank."""
    leaving = {}
    stages = len(holder)
    for instruction in program:
        tensor = tensor_made(instruction)
        if tensor is None:
            continue
        reader = consumer(tensor)
        if 0 <= reader < stages and holder[reader] != rank:
            leaving[instruction] = (tensor, holder[reader])
    return leaving


def _posts(program: Program, arriving: dict[int, list[StageTensor]], stages: int) -> list[Program]:
    """The receives to start before each position of a rank's computations."""
    needed_at = {
        tensor: position
        for position, instruction in enumerate(program)
        if (tensor := tensor_needed(instruction, stages)) is not None
    }
    posts: list[Program] = [[] for _ in program]
    for sender, tensors in sorted(arriving.items()):
        deadline = len(program)
        placed = []
        # From the last message to the first: none may be received after one that was sent later.
        for tensor in reversed(tensors):
            deadline = min(deadline, needed_at[tensor])
            placed.append((max(0, deadline - 1), receive(tensor, sender)))
        for position, instruction in reversed(placed):
            posts[position].append(instruction)
    return posts
