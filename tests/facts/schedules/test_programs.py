"""Schedules: complete, legal and matched for every size; as good as their papers say; and broken ones are named."""

import time
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.facts.layout import DEFAULT_CHUNKS, SCHEDULES
from shoal.facts.problem import BadInput
from shoal.facts.schedules.programs import (
    SPLIT_BACKWARD,
    Action,
    Instruction,
    Program,
    ScheduleError,
    bubble,
    check,
    compute_order,
    in_flight,
    instructions,
    lengths,
    simulate,
    text,
)

CHUNKS = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3, 4], "zb": [1, 2, 3], "zbv": [2], "dualpipev": [2]}
SENDS = (Action.SEND_FORWARD, Action.SEND_BACKWARD)
RECEIVES = (Action.RECEIVE_FORWARD, Action.RECEIVE_BACKWARD)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(SCHEDULES))
    return (
        schedule,
        draw(st.integers(1, 8)),
        draw(st.sampled_from(CHUNKS[schedule])),
        draw(st.integers(1, 24)),
    )


def idle(schedule: str, pp: int, chunks: int, micro: int) -> float:
    """Units of a chunk's work for which a rank idles, on average."""
    timeline = simulate(compute_order(schedule, pp, chunks, micro))
    return bubble(timeline) * timeline.end


@settings(max_examples=80)
@given(sizes())
def test_every_schedule_of_every_size_is_legal(size: tuple[str, int, int, int]) -> None:
    schedule, pp, chunks, micro = size
    programs = instructions(schedule, pp, chunks, micro)
    check(programs, pp, chunks, schedule, micro)

    assert [[each for each in program if each.computes] for program in programs] == compute_order(*size)
    work = defaultdict(list)  # of every stage: which micro-batches, in which order
    for program in programs:
        for each in program:
            if each.action in (Action.FORWARD, Action.BACKWARD, Action.WEIGHT):
                work[each.action is Action.FORWARD, each.stage].append(each.micro)
    # In order also backward: the gradients of a stage are summed alike in every schedule.
    assert dict(work) == {
        (forward, stage): list(range(micro)) for forward in (True, False) for stage in range(pp * chunks)
    }


@settings(max_examples=60)
@given(sizes())
def test_messages_stand_where_they_should(size: tuple[str, int, int, int]) -> None:
    schedule, pp, chunks, micro = size
    programs = instructions(schedule, pp, chunks, micro)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, program in enumerate(programs):
        for before, each in zip([None, *program], program, strict=False):
            if each.action in SENDS:
                assert before is not None
                assert (before.computes, before.stage, before.micro) == (True, each.stage, each.micro)
                step = 1 if each.action is Action.SEND_FORWARD else -1
                sent[rank, each.peer].append((each.stage + step, each.micro, step))
            elif each.action in RECEIVES:
                step = 1 if each.action is Action.RECEIVE_FORWARD else -1
                received[each.peer, rank].append((each.stage, each.micro, step))
    assert sent == received
    assert all(sender != receiver for sender, receiver in sent)


def test_a_receive_hides_behind_one_computation() -> None:
    assert text(instructions("1f1b", 2, 1, 3)) == (
        "rank 0: F0.0 SF0.0>1 RB0.0<1 F0.1 SF0.1>1 B0.0 RB0.1<1 F0.2 SF0.2>1 RB0.2<1 B0.1 B0.2\n"
        "rank 1: RF1.0<0 F1.0 RF1.1<0 B1.0 SB1.0>0 F1.1 RF1.2<0 B1.1 SB1.1>0 F1.2 B1.2 SB1.2>0"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_alone_a_rank_goes_through_and_back(schedule: str) -> None:
    chunks = CHUNKS[schedule][0]
    (program,) = instructions(schedule, 1, chunks, 2)
    once = ["F0.{0}", "B0.{0}"] if chunks == 1 else ["F0.{0}", "F1.{0}", "B1.{0}", "B0.{0}"]
    assert [str(each) for each in program] == [step.format(micro) for micro in (0, 1) for step in once]


# As good as the papers say, with F = I = W = 1 and B = 2.


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("micro", [1, 2, 8, 17])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_classic_bubble(schedule: str, pp: int, micro: int) -> None:
    share = bubble(simulate(compute_order(schedule, pp, 1, micro)))
    assert share == pytest.approx((pp - 1) / (micro + pp - 1), abs=1e-12)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_idle_time_by_the_chunks(pp: int, rounds: int, chunks: int) -> None:
    whole = idle("1f1b", pp, 1, rounds * pp)
    # A chunk's unit of work is 1/chunks of a rank's.
    assert idle("interleaved", pp, chunks, rounds * pp) / chunks == pytest.approx(whole / chunks)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_zero_bubble_schedules_idle_for_nothing_but_the_ramp(pp: int) -> None:
    """The last rank cannot start before pp - 1 units have passed, so no schedule idles less than that."""
    for micro in (2 * pp, 2 * pp + 1, 5 * pp):
        assert idle("zb", pp, 1, micro) == pytest.approx(pp - 1)  # a third of 1f1b's
        assert idle("zbv", pp, 2, micro) == pytest.approx(pp - 1)  # of half the size
        assert idle("dualpipev", pp, 2, micro) == pytest.approx(pp - 1)
    assert idle("zb", pp, 3, 2 * pp) == pytest.approx(pp - 1)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_no_rank_of_zbv_pauses_between_its_first_and_last_step(pp: int) -> None:
    for events in simulate(compute_order("zbv", pp, 2, 3 * pp)).ranks:
        assert events[-1].end - events[0].start == sum(event.end - event.start for event in events)


@given(st.integers(2, 8), st.integers(1, 24))
@settings(max_examples=40)
def test_no_schedule_is_worse_than_1f1b(pp: int, micro: int) -> None:
    worst = bubble(simulate(compute_order("1f1b", pp, 1, micro)))
    for schedule in ("interleaved", "zb", "zbv", "dualpipev"):
        order = compute_order(schedule, pp, CHUNKS[schedule][0], micro)
        assert bubble(simulate(order)) <= worst + 1e-12


def test_time_on_the_way_delays_only_what_travels() -> None:
    order = compute_order("zbv", 2, 2, 1)
    at_once, slowly = simulate(order), simulate(order, transfer=10.0)
    # Three hops forward, three back; of each the one at the bottom of the V stays on its rank.
    assert slowly.end == at_once.end + 4 * 10.0
    doubled = simulate(order, lambda instruction: 2.0)
    assert doubled.end == 2 * at_once.end


@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 16))
@settings(max_examples=60)
def test_lengths_are_those_of_the_timelines(schedule: str, pp: int, micro: int) -> None:
    order = compute_order(schedule, pp, CHUNKS[schedule][-1], micro)
    assert lengths(order, (0.0, 0.5)) == [simulate(order).end, simulate(order, transfer=0.5).end]


# What ranks hold.


@pytest.mark.parametrize("pp", [1, 2, 5, 8])
@pytest.mark.parametrize("micro", [1, 3, 8, 24])
def test_activations_in_flight(pp: int, micro: int) -> None:
    assert in_flight(instructions("1f1b", pp, 1, micro)) == [min(pp - rank, micro) for rank in range(pp)]
    if pp > 1:
        assert in_flight(instructions("gpipe", pp, 1, micro)) == [micro] * pp
        assert max(in_flight(instructions("zb", pp, 1, micro))) == min(pp, micro)  # as the first rank of 1f1b
        # Chunks of half the size.
        assert max(in_flight(instructions("zbv", pp, 2, micro))) <= 2 * pp
        assert max(in_flight(instructions("dualpipev", pp, 2, micro))) <= 2 * pp + 1


def test_v_schedules_fold_the_network() -> None:
    for schedule in ("zbv", "dualpipev"):
        for rank, program in enumerate(instructions(schedule, 4, 2, 8)):
            assert {each.stage for each in program} == {rank, 7 - rank}


def test_dualpipev_pairs_a_forward_with_a_backward_of_the_other_chunk() -> None:
    programs = compute_order("dualpipev", 4, 2, 16)
    for rank, program in enumerate(programs):
        letters = " ".join(f"{each.action.value}{int(each.stage != rank)}" for each in program)
        assert " ".join(["F0 B1 F1 B0"] * (16 - 8 + rank + 1)) in letters


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sixteen_ranks_and_many_micro_batches_are_quick(schedule: str) -> None:
    chunks = CHUNKS[schedule][0]
    start = time.process_time()
    programs = instructions(schedule, 16, chunks, 128)
    assert time.process_time() - start < 1.0  # measured: 0.1 to 0.2 s
    check(programs, 16, chunks, schedule, 128)


# Programs broken by hand.


def place(program: Program, written: str) -> int:
    return [str(each) for each in program].index(written)


def broken(schedule: str = "1f1b", pp: int = 3, micro: int = 4) -> list[Program]:
    return instructions(schedule, pp, CHUNKS[schedule][0], micro)


def told(programs: list[Program], schedule: str = "1f1b", micro: int = 4) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(programs, len(programs), CHUNKS[schedule][0], schedule, micro)
    return str(caught.value)


def test_a_dropped_instruction_is_named() -> None:
    for written, reason in {
        "F1.2": "rank 1: F1.2: is missing",
        "B1.2": "rank 1: B1.2: is missing, and so are its halves I1.2 and W1.2",
        "RF1.2<0": "rank 1: F1.2: needs RF1.2<0, which is missing",
        "SB1.2>0": "rank 0: RB0.2<1: rank 1 has no SB1.2>0 for it",
    }.items():
        programs = broken()
        del programs[1][place(programs[1], written)]
        assert told(programs) == reason


def test_half_a_backward_is_named() -> None:
    programs = broken("zb")
    del programs[2][place(programs[2], "W2.1")]
    assert told(programs, "zb") == "rank 2: W2.1: is missing, though I2.1 is there"
    programs = broken("zb")
    programs[0].append(Instruction(Action.BACKWARD, 0, 3))
    assert told(programs, "zb") == "rank 0: I0.3: is part of B0.3, which is there too"


def test_a_doubled_or_misplaced_instruction_is_named() -> None:
    programs = broken()
    programs[0].append(programs[0][0])
    assert told(programs) == "rank 0: F0.0: is there 2 times"
    programs = broken()
    programs[0].append(Instruction(Action.FORWARD, 1, 0))
    assert told(programs) == "rank 0: F1.0: its stage is on rank 1"
    programs = broken()
    programs[0].append(Instruction(Action.FORWARD, 0, 4))
    assert told(programs) == "rank 0: F0.4: there are 4 micro-batches"
    programs = broken()
    programs[0].append(Instruction(Action.FORWARD, 3, 0))
    assert told(programs) == "rank 0: F3.0: there are 3 stages"
    programs = broken()
    programs[0].append(Instruction(Action.FORWARD, 0, 0, 1))
    assert told(programs) == "rank 0: F0.0<1: a computation has no other rank at its far end"
    assert told(broken()[:2], micro=4).startswith("rank 1: ")
    with pytest.raises(ScheduleError, match="2 programs for 3 ranks"):
        check(broken()[:2], 3, 1, "1f1b", 4)


def test_a_wrong_order_on_one_rank_is_named() -> None:
    programs = broken()
    forward, backward = place(programs[2], "F2.1"), place(programs[2], "B2.1")
    programs[2][forward], programs[2][backward] = programs[2][backward], programs[2][forward]
    assert told(programs) == "rank 2: B2.1: needs F2.1, which comes after it"
    programs = broken()
    computed, sent = place(programs[0], "F0.1"), place(programs[0], "SF0.1>1")
    programs[0][computed], programs[0][sent] = programs[0][sent], programs[0][computed]
    assert told(programs) == "rank 0: SF0.1>1: needs F0.1, which comes after it"
    programs = broken("zbv")
    bottom, its_next = place(programs[2], "F2.0"), place(programs[2], "F3.0")
    programs[2][bottom], programs[2][its_next] = programs[2][its_next], programs[2][bottom]
    assert "needs F2.0, which comes after it" in told(programs, "zbv")


def test_messages_that_do_not_agree_are_named() -> None:
    programs = broken("gpipe")
    first, second = place(programs[1], "RF1.0<0"), place(programs[1], "RF1.1<0")
    # Both still stand before what needs them, yet the sender has them the other way round.
    programs[1].insert(first, programs[1].pop(second))
    assert told(programs, "gpipe") == (
        "rank 1: RF1.1<0: message 0 from rank 0 is SF0.0>1; both ends need one order"
    )
    programs = broken()
    programs[0][place(programs[0], "SF0.0>1")] = Instruction(Action.SEND_FORWARD, 0, 0, 2)
    assert told(programs) == "rank 0: SF0.0>2: stage 1, its far end, is on rank 1"
    programs = broken()
    programs[0].append(Instruction(Action.SEND_BACKWARD, 0, 0, 2))
    assert told(programs) == "rank 0: SB0.0>2: there is no stage -1 at its far end"
    programs = broken()
    programs[0][place(programs[0], "SF0.0>1")] = Instruction(Action.SEND_FORWARD, 0, 0)
    assert told(programs) == "rank 0: SF0.0: stage 1, its far end, is on rank 1"
    programs = broken("zbv")
    programs[2].append(Instruction(Action.SEND_FORWARD, 2, 0, 2))
    assert told(programs, "zbv") == "rank 2: SF2.0>2: stage 3, its far end, is on this rank too"


def test_a_circle_of_waiting_ranks_is_named() -> None:
    """Rank 0 wants the backward of micro-batch 0 before the forward of 1; rank 1 the other way round."""
    forward, backward = Action.FORWARD, Action.BACKWARD
    first = [
        Instruction(forward, 0, 0),
        Instruction(Action.SEND_FORWARD, 0, 0, 1),
        Instruction(Action.RECEIVE_BACKWARD, 0, 0, 1),
        Instruction(backward, 0, 0),
        Instruction(forward, 0, 1),
        Instruction(Action.SEND_FORWARD, 0, 1, 1),
        Instruction(Action.RECEIVE_BACKWARD, 0, 1, 1),
        Instruction(backward, 0, 1),
    ]
    second = [
        Instruction(Action.RECEIVE_FORWARD, 1, 0, 0),
        Instruction(Action.RECEIVE_FORWARD, 1, 1, 0),
        Instruction(forward, 1, 1),
        Instruction(forward, 1, 0),
        Instruction(backward, 1, 0),
        Instruction(Action.SEND_BACKWARD, 1, 0, 0),
        Instruction(backward, 1, 1),
        Instruction(Action.SEND_BACKWARD, 1, 1, 0),
    ]
    assert told([first, second], micro=2) == (
        "the ranks wait for each other: rank 0 cannot run B0.0 before rank 1 has run B1.0; "
        "rank 1 cannot run F1.1 before rank 0 has run F0.1"
    )
    with pytest.raises(ScheduleError, match=r"rank 0: B0\.0 waits for ever"):
        simulate([first, second])


@settings(max_examples=60)
@given(sizes(), st.data())
def test_dropping_any_instruction_is_noticed(size: tuple[str, int, int, int], data: st.DataObject) -> None:
    schedule, pp, chunks, micro = size
    programs = instructions(schedule, pp, chunks, min(micro, 6))
    rank = data.draw(st.integers(0, pp - 1))
    del programs[rank][data.draw(st.integers(0, len(programs[rank]) - 1))]
    with pytest.raises(ScheduleError):
        check(programs, pp, chunks, schedule, min(micro, 6))


@pytest.mark.parametrize(("pp", "micro"), [(0, 4), (4, 0)])
def test_nothing_to_schedule_is_refused(pp: int, micro: int) -> None:
    with pytest.raises(BadInput, match="at least one"):
        compute_order("1f1b", pp, 1, micro)


def test_which_schedules_split_the_backward_pass() -> None:
    for schedule in SCHEDULES:
        (first, *_) = instructions(schedule, 2, DEFAULT_CHUNKS.get(schedule, 1), 4)
        splits = any(instruction.action is Action.WEIGHT for instruction in first)
        assert splits == (schedule in SPLIT_BACKWARD)
