"""Staging: the buffer is the file, whatever a state looks like in memory, and as it was when it was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import make_state
from torch import Tensor

from shoal.facts.model import Model
from shoal.train.checkpoint import write_plan
from shoal.train.checkpoint.staging import PinnedMemory, StagingBuffer
from shoal.train.checkpoint.write_plan import parts
from shoal.train.state import State

CPU = torch.device("cpu")


@pytest.fixture(params=["tiny", "qwen2-7b", "gpt2", "pythia-6.9b"])
def model(request: pytest.FixtureRequest) -> Model:
    return small(request.param)


def boxes(stage: StagingBuffer) -> dict[tuple[str, str, tuple[int, ...]], Tensor]:
    """What the buffer holds, by state, tensor and offset."""
    content = torch.frombuffer(stage.content(), dtype=torch.uint8)
    return {
        (lot.state, lot.part.tensor, lot.part.offset): content[lot.position : lot.end]
        .view(lot.dtype)
        .view(lot.part.size)
        .clone()
        for lot in stage.lots
    }


def expected(stage: StagingBuffer, state: State) -> dict[tuple[str, str, tuple[int, ...]], Tensor]:
    values = dict(state.states())
    return {
        (name, part.tensor, part.offset): part.of(value(part.piece)).clone()
        for name, value in values.items()
        for part in stage.parts
    }


def check(stage: StagingBuffer, state: State) -> None:
    stage.fill(state.states())
    found, wanted = boxes(stage), expected(stage, state)
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert torch.equal(found[key], values), key


def test_every_box_is_where_its_lot_says(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where long tensors are cut, and where only a share of them is written."""
    monkeypatch.setattr(write_plan, "LARGEST_PIECE", 200)
    state = make_state(model)
    whole = parts(model, state.pieces, state.mesh)
    for some in (whole, whole[::2], whole[5:-7]):
        stage = StagingBuffer(some, CPU, 3)
        check(stage, state)
        assert [lot.position for lot in stage.lots[1:]] == [lot.end for lot in stage.lots[:-1]]
        assert stage.lots[-1].end == stage.buffer.numel()


def test_a_tensor_is_one_copy_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_plan, "LARGEST_PIECE", 200)
    state = make_state(small("tiny"))
    stage = state.new_stage()
    check(stage, state)
    assert len(stage.lots) > 3 * len(state.pieces)
    assert len(stage._stretches) == 3 * len(state.pieces)
    assert not stage._others


def test_it_is_filled_again_and_again(model: Model) -> None:
    """With states that came with the first update, with new values, and with tensors that were replaced."""
    state = make_state(model, steps=0)
    stage = state.new_stage()
    check(stage, state)
    assert {lot.state for lot in stage.lots} == {"weight"}
    for number in range(3):
        for piece in state.pieces:
            piece.tensor.grad = torch.full_like(piece.tensor, 0.3 + number)
        state.optimizer.step()
        check(stage, state)
    assert {lot.state for lot in stage.lots} == {"weight", "exp_avg", "exp_avg_sq"}
    for piece in state.pieces:
        held = state.optimizer.state[piece.tensor]
        held["exp_avg"] = held["exp_avg"].clone().neg_()
    check(stage, state)


def test_a_tensor_with_its_elements_in_another_order() -> None:
    state = make_state(small("tiny"))
    for piece in state.pieces:
        held = state.optimizer.state[piece.tensor]
        if piece.tensor.dim() == 2:
            held["exp_avg"] = held["exp_avg"].T.contiguous().T
    check(state.new_stage(), state)


def test_what_was_staged_stays(model: Model) -> None:
    state = make_state(model)
    stage = state.new_stage()
    stage.fill(state.states())
    before = expected(stage, state)
    stage.hold_update()
    with torch.no_grad():
        for piece in state.pieces:
            piece.tensor.add_(1)
    found = boxes(stage)
    assert all(torch.equal(found[key], values) for key, values in before.items())


def test_wide_elements_come_first() -> None:
    """And are found there again: bf16 weights with fp32 states."""
    state = make_state(small("tiny"))
    narrow = [
        (name, value if name != "weight" else lambda piece: piece.tensor.detach().bfloat16())
        for name, value in state.states()
    ]
    stage = StagingBuffer(parts(state.model, state.pieces, state.mesh), CPU, 3)
    for _ in range(2):
        stage.fill(narrow)
        lots, buffer = stage.lots, stage.buffer
        assert [lot.dtype for lot in lots] == sorted(
            (lot.dtype for lot in lots), key=lambda dtype: -dtype.itemsize
        )
    stage.fill(narrow)
    assert stage.lots is lots and stage.buffer is buffer
    found = boxes(stage)
    for lot in lots:
        value = dict(narrow)[lot.state](lot.part.piece)
        assert torch.equal(found[lot.state, lot.part.tensor, lot.part.offset], lot.part.of(value))


# No driver lets a machine without one lock pages: pinning fails there as it does where the limit on them is too low.
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
WITH_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@WITHOUT_GPU
def test_memory_that_cannot_be_pinned_is_pageable_and_that_is_said() -> None:
    room = PinnedMemory(3_000_000_000)
    for size in (1000, 2000):
        buffer, trouble = room.take(size)
        assert buffer.numel() == size and not buffer.is_pinned()
        assert trouble.startswith("3.0 GB of host memory for checkpoints could not be pinned (")
        assert "pageable memory is used" in trouble and "\n" not in trouble


@WITHOUT_GPU
def test_a_stage_without_pinned_memory_says_so_and_holds_what_it_should() -> None:
    state, told = make_state(small("tiny")), []
    stage = state.new_stage(tell=told.append)
    stage._room = PinnedMemory(1000)  # as on a GPU
    check(stage, state)
    assert len(told) == 1


@WITH_GPU
@pytest.mark.parametrize("ahead", [True, False])
def test_on_a_gpu_room_is_pinned_ahead_or_not_asked_for(ahead: bool) -> None:
    state = make_state(small("tiny"))
    stage = StagingBuffer(parts(state.model, state.pieces, state.mesh), torch.device("cuda", 0), 3, ahead)
    assert (stage._room is not None) == ahead and stage.buffer.numel() == 0
    check(stage, state)
    assert stage.buffer.is_pinned() == ahead


@WITH_GPU
def test_on_a_gpu_the_update_waits_for_the_copy() -> None:
    """What is staged is what was there when it was asked for, however soon the states change."""
    device = torch.device("cuda", 0)
    state = make_state(small("tiny"))
    large = torch.nn.Parameter(torch.zeros(1 << 28, device=device))  # a gigabyte: 20 ms
    piece = replace(state.pieces[0], tensor=large)
    (part, *_) = parts(state.model, state.pieces, state.mesh)
    part = replace(part, piece=piece, start=0, shape=(1 << 28,), within=(slice(0, 1 << 28),), size=(1 << 28,))
    stage = StagingBuffer([part], device, 1)
    for value in range(3):
        with torch.no_grad():
            large.fill_(value)
        stage.fill([("weight", lambda piece: piece.tensor)])
        stage.hold_update()
        with torch.no_grad():
            large.fill_(-1)
        content = torch.frombuffer(stage.content(), dtype=torch.float32)
        assert bool((content == value).all())
