"""Check that the ranks of a pipeline can execute their programs without deadlock, before a run hangs."""

from __future__ import annotations

from collections import Counter, defaultdict

from shoal.facts.layout.stages import rank_of_stage
from shoal.facts.schedules.instruction import (
    SENDS,
    Action,
    Instruction,
    Program,
    ScheduleError,
    StageTensor,
    consumer,
    receive,
    send,
    tensor_carried,
    tensor_made,
    tensor_needed,
)
from shoal.facts.schedules.simulate import computations, play


def check(programs: list[Program], pp: int, chunks: int, schedule: str, micro_batches: int) -> None:
    """Raise a ``ScheduleError`` that names rank, instruction and reason if the programs cannot run.

    Checked in this order: every computation exists once and on the right rank; each rank has its inputs when it needs
    them; sends and receives match, channel by channel; and no ranks wait for each other in a cycle.
    """
    if len(programs) != pp:
        raise ScheduleError(f"{len(programs)} programs for {pp} ranks")
    holder = [rank_of_stage(pp, chunks, schedule, stage) for stage in range(pp * chunks)]
    _complete(programs, holder, micro_batches)
    for rank, program in enumerate(programs):
        _in_order(program, rank, holder)
    _matched(programs)
    _runs(programs, len(holder))


def _complete(programs: list[Program], holder: list[int], micro_batches: int) -> None:
    """Each stage and micro-batch has one forward, and one backward or both its halves, on the stage's rank."""
    for rank, program in enumerate(programs):
        count = Counter(program)
        for instruction, times in count.items():
            if times > 1:
                raise _error(rank, instruction, f"is there {times} times")
            if not 0 <= instruction.stage < len(holder):
                raise _error(rank, instruction, f"there are {len(holder)} stages")
            if not 0 <= instruction.micro < micro_batches:
                raise _error(rank, instruction, f"there are {micro_batches} micro-batches")
            if holder[instruction.stage] != rank:
                raise _error(rank, instruction, f"its stage is on rank {holder[instruction.stage]}")
            if instruction.computes and instruction.peer is not None:
                raise _error(rank, instruction, "a computation has no other rank at its far end")
        for stage in (stage for stage, held_by in enumerate(holder) if held_by == rank):
            for micro in range(micro_batches):
                forward, whole, first_half, second_half = (
                    Instruction(action, stage, micro)
                    for action in (Action.FORWARD, Action.BACKWARD, Action.INPUT, Action.WEIGHT)
                )
                if forward not in count:
                    raise _error(rank, forward, "is missing")
                halves = [half for half in (first_half, second_half) if half in count]
                if whole in count and halves:
                    raise _error(rank, halves[0], f"is part of {whole}, which is there too")
                if whole not in count and not halves:
                    reason = f"is missing, and so are its halves {first_half} and {second_half}"
                    raise _error(rank, whole, reason)
                if len(halves) == 1:
                    missing = second_half if halves == [first_half] else first_half
                    raise _error(rank, missing, f"is missing, though {halves[0]} is there")


def _in_order(program: Program, rank: int, holder: list[int]) -> None:
    """An input computed on this rank, or received, must come before the instruction that needs it."""
    position = {instruction: place for place, instruction in enumerate(program)}
    made_by = {
        tensor: instruction
        for instruction in program
        if instruction.computes and (tensor := tensor_made(instruction)) is not None
    }

    def require(instruction: Instruction, first: Instruction) -> None:
        if first not in position:
            raise _error(rank, instruction, f"needs {first}, which is missing")
        if position[first] > position[instruction]:
            raise _error(rank, instruction, f"needs {first}, which comes after it")

    for instruction in program:
        stage, micro = instruction.stage, instruction.micro
        if not instruction.computes:
            _goes_to_the_right_rank(instruction, rank, holder)
            if instruction.action in SENDS:
                require(instruction, made_by[tensor_carried(instruction)])
            continue
        if instruction.action in (Action.BACKWARD, Action.INPUT):
            require(instruction, Instruction(Action.FORWARD, stage, micro))
        if instruction.action is Action.WEIGHT:
            require(instruction, Instruction(Action.INPUT, stage, micro))
        needed = tensor_needed(instruction, len(holder))
        if needed is None:
            continue
        if holder[needed.stage] == rank:
            require(instruction, made_by[needed])
        else:
            require(instruction, receive(needed, holder[needed.stage]))


def _goes_to_the_right_rank(message: Instruction, rank: int, holder: list[int]) -> None:
    tensor = tensor_carried(message)
    far_end = consumer(tensor) if message.action in SENDS else tensor.stage
    if not 0 <= far_end < len(holder):
        raise _error(rank, message, f"there is no stage {far_end} at its far end")
    if holder[far_end] == rank:
        raise _error(rank, message, f"stage {far_end}, its far end, is on this rank too")
    if message.peer != holder[far_end]:
        raise _error(rank, message, f"stage {far_end}, its far end, is on rank {holder[far_end]}")


def _matched(programs: list[Program]) -> None:
    """On every channel, sender and receiver must list messages in the same order, because they are matched by order."""
    sent: dict[tuple[int, int], list[StageTensor]] = defaultdict(list)
    received: dict[tuple[int, int], list[StageTensor]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for instruction in program:
            if instruction.peer is None:  # a computation
                continue
            if instruction.action in SENDS:
                sent[rank, instruction.peer].append(tensor_carried(instruction))
            else:
                received[instruction.peer, rank].append(tensor_carried(instruction))
    for sender, receiver in sorted(sent.keys() | received.keys()):
        out, arriving = sent[sender, receiver], received[sender, receiver]
        expected, offered = set(arriving), set(out)
        for tensor in out:
            if tensor not in expected:
                wanted = receive(tensor, sender)
                raise _error(sender, send(tensor, receiver), f"rank {receiver} has no {wanted} for it")
        for tensor in arriving:
            if tensor not in offered:
                wanted = send(tensor, receiver)
                raise _error(receiver, receive(tensor, sender), f"rank {sender} has no {wanted} for it")
        for place, (first, second) in enumerate(zip(out, arriving, strict=True)):
            if first != second:
                reason = (
                    f"message {place} from rank {sender} is {send(first, receiver)}; both ends need one order"
                )
                raise _error(receiver, receive(second, sender), reason)


def _runs(programs: list[Program], stages: int) -> None:
    """Execute the programs in order; if all remaining ranks wait, report who waits for whom."""
    work = computations(programs)
    makers = {
        tensor: (rank, instruction)
        for rank, program in enumerate(work)
        for instruction in program
        if (tensor := tensor_made(instruction)) is not None
    }
    done = [len(events) for events in play(work)]
    stuck = [rank for rank, program in enumerate(work) if done[rank] < len(program)]
    if not stuck:
        return
    # Every stuck rank waits for another stuck one, so following them leads into a cycle.
    waits: list[str] = []
    seen: list[int] = []
    rank = stuck[0]
    while rank not in seen:
        seen.append(rank)
        instruction = work[rank][done[rank]]
        needed = tensor_needed(instruction, stages)
        assert needed is not None  # otherwise it would have run
        other, maker = makers[needed]
        waits.append(f"rank {rank} cannot run {instruction} before rank {other} has run {maker}")
        rank = other
    raise ScheduleError("the ranks wait for each other: " + "; ".join(waits[seen.index(rank) :]))


def _error(rank: int, instruction: Instruction, reason: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}: {instruction}: {reason}")
