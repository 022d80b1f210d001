"""Ring and Ulysses attention on real ranks against the definition, written out as one masked softmax in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.layout import Layout
from shoal.models.attention import attend
from shoal.models.documents import Documents
from shoal.parallel import ring, ring_exchange
from shoal.parallel.context import SequenceShare
from shoal.parallel.ring import Ring, RingAttend
from shoal.parallel.stage_module import MicroBatch
from shoal.parallel.ulysses import UlyssesAttend

LENGTH, HEAD_DIM = 24, 8


@dataclass(frozen=True)
class Case:
    """Heads of queries and keys, rows, documents by their lengths, a window."""

    kind: str
    heads: int = 4
    key_heads: int = 4
    rows: int = 2
    documents: tuple[int, ...] = ()
    window: int | None = None
    cap: float | None = None
    dtype: torch.dtype = torch.float64


PACKED = (5, 14, 5, 1, 23)
CASES = [
    *(Case(kind) for kind in ("ring", "ulysses")),
    *(Case(kind, key_heads=1, documents=PACKED) for kind in ("ring", "ulysses")),
    *(Case(kind, key_heads=2, window=7) for kind in ("ring", "ulysses")),
    *(Case(kind, rows=1, documents=(3, 21), window=2) for kind in ("ring", "ulysses")),
    Case("ring", heads=3, key_heads=3, documents=(24, 24), window=LENGTH),
    Case("ring", window=7, documents=PACKED, key_heads=2),
    Case("ring", key_heads=2, cap=0.6),
    *(Case(kind, window=7, documents=PACKED, cap=0.6) for kind in ("ring", "ulysses")),
    Case("ring", dtype=torch.bfloat16, documents=PACKED),
]


def tensors(case: Case) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(case.rows, heads, LENGTH, HEAD_DIM) for heads in (case.heads, case.key_heads, case.key_heads)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        for shape in (*shapes, shapes[0])
    ]


def numbers(case: Case) -> Tensor:
    """Of each token, [rows, LENGTH], the number of its document."""
    lengths = case.documents or (LENGTH,) * case.rows
    found = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return found.view(case.rows, LENGTH)


def expected(case: Case) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values."""
    *inputs, gradient = (one.double() for one in tensors(case))
    query, key, value = (one.requires_grad_() for one in inputs)
    shared = case.heads // case.key_heads
    keys, values = (one.repeat_interleave(shared, 1) for one in (key, value))
    place, document = torch.arange(LENGTH), numbers(case)
    behind = place[:, None] - place
    hidden = (behind < 0) | (behind >= (case.window or LENGTH))
    mask = hidden | (document[:, None, :, None] != document[:, None, None, :])
    scores = query @ keys.transpose(2, 3) * HEAD_DIM**-0.5
    if case.cap is not None:
        scores = case.cap * (scores / case.cap).tanh()
    output = scores.masked_fill(mask, -torch.inf).softmax(-1) @ values
    output.backward(gradient)
    return [output.detach(), *(one.grad for one in (query, key, value) if one.grad is not None)]


def attended(rank: int, world: int, cases: list[Case]) -> list[list[Tensor]]:
    """This rank's tokens of the same, of each case."""
    found = []
    group = dist.group.WORLD
    assert group is not None
    for case in cases:
        layout = Layout.parse(f"cp={world},cp_kind={case.kind}")
        share = SequenceShare(layout, rank)

        def mine(one: Tensor, share: SequenceShare = share) -> Tensor:
            return (
                share._columns(one.transpose(1, 2).flatten(2))
                .unflatten(2, (one.shape[1], -1))
                .transpose(1, 2)
            )

        *inputs, gradient = (mine(one) for one in tensors(case))
        query, key, value = (one.detach().requires_grad_() for one in inputs)
        documents = Documents.of(numbers(case)) if case.documents else None
        function: Any = RingAttend(Ring(group, world, rank))
        if case.kind == "ulysses":
            function = UlyssesAttend(group, world, attend)
        places = torch.arange(LENGTH).expand(case.rows, -1)
        scores = {"scale": HEAD_DIM**-0.5, "window": case.window, "cap": case.cap}
        output = function(query, key, value, places, documents, **scores)
        output.backward(gradient)
        found.append([output.detach(), query.grad, key.grad, value.grad])
    return found


def whole(parts: list[Tensor], kind: str) -> Tensor:
    """All ranks' tokens in the order of the row."""
    layout = Layout.parse(f"cp={len(parts)},cp_kind={kind}")
    order = torch.cat(
        [SequenceShare(layout, rank)._columns(torch.arange(LENGTH)[None])[0] for rank in range(len(parts))]
    )
    return torch.cat(parts, 2)[:, :, order.argsort()]


@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_ranks_is_attention(world: int) -> None:
    cases = [case for case in CASES if case.kind == "ring" or case.heads % world == 0]
    results = run_ranks(world, attended, cases)
    for number, case in enumerate(cases):
        limit = 1e-13 if case.dtype == torch.float64 else 0.03
        for one, wanted in enumerate(expected(case)):
            found = whole([seen[number][one] for seen in results], case.kind)
            assert found.dtype == case.dtype
            assert (found.double() - wanted).abs().max() <= limit * wanted.abs().max(), (case, one)


def order_of_a_ring(rank: int, world: int) -> list[str]:
    """What happens in a forward and a backward pass, in order."""
    case = Case("ring", rows=1)
    events: list[str] = []
    pass_on, wait = ring.pass_on, ring_exchange.Passing.wait
    turn, turn_back = ring.attend_turn, ring.attend_turn_backward

    def note(event: str, function: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            events.append(event)
            return function(*arguments)

        return noted

    with (
        patch.object(ring, "pass_on", note("pass", pass_on)),
        patch.object(ring_exchange.Passing, "wait", note("wait", wait)),
        patch.object(ring, "attend_turn", note("turn", turn)),
        patch.object(ring, "attend_turn_backward", note("back", turn_back)),
    ):
        attended(rank, world, [case])
    return events


def test_keys_are_on_their_way_while_a_turn_is_computed() -> None:
    forward = ["pass", "turn", "wait"] * 2 + ["turn"]
    # Gradients follow their keys a turn later, and the last ones come home.
    backward = ["pass", "back", "wait", "pass", "back", "pass", "wait", "back", "wait", "pass", "wait"]
    assert run_ranks(3, order_of_a_ring) == [forward + backward] * 3


def test_a_rank_is_given_its_tokens_with_their_places() -> None:
    tokens = torch.arange(16).view(2, 8) + 100
    batch = MicroBatch(tokens, torch.arange(8).expand(2, 8), None, tokens + 1, None)
    ring_share = SequenceShare(Layout.parse("cp=2"), 0).of(batch)
    assert ring_share.positions.tolist() == [[0, 1, 6, 7]] * 2
    assert ring_share.tokens.tolist() == [[100, 101, 106, 107], [108, 109, 114, 115]]
    assert ring_share.targets is not None and ring_share.targets.tolist() == (ring_share.tokens + 1).tolist()
    ulysses = SequenceShare(Layout.parse("cp=2,cp_kind=ulysses"), 1).of(replace(batch, targets=None))
    assert ulysses.positions.tolist() == [[4, 5, 6, 7]] * 2 and ulysses.targets is None
    assert SequenceShare(Layout.parse("dp=2"), 0).of(batch) is batch
