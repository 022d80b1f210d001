"""Attention within documents and windows: every path that runs here equals the dense mask in fp64, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from shoal.models import attention_blocks
from shoal.models.attention import attend, rotated
from shoal.models.documents import Documents

HEAD_DIM = 8
# How far a result may be from the oracle's, whose numbers are of the order of one.
CLOSE = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 0.1}

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]


def visible(rows: int, length: int, ids: Tensor | None, window: int | None) -> Tensor:
    """Which token (row) sees which (column): a boolean mask [B, 1, T, T]."""
    place = torch.arange(length)
    behind = place[:, None] - place
    mask = (behind >= 0).expand(rows, 1, length, length)
    if window is not None:
        mask = mask & (behind < window)
    if ids is not None:
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    return mask


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor | None,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    """The oracle."""
    shared = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(shared, 1) for heads in (key, value))
    scores = query @ key.transpose(2, 3) * 0.3
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    hidden = ~visible(query.shape[0], query.shape[2], ids, window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def engine(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor | None,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    documents = None if ids is None else Documents.of(ids)
    positions = torch.arange(query.shape[2]).expand(query.shape[0], -1)
    return attend(query, key, value, positions, documents, scale=0.3, window=window, cap=cap)


COMPILED = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)


def compiled(query: Tensor, key: Tensor, value: Tensor, ids: Tensor | None, window: int | None) -> Tensor:
    documents = None if ids is None else Documents.of(ids)
    positions = torch.arange(query.shape[2]).expand(query.shape[0], -1)
    return COMPILED(query, key, value, positions, documents, scale=0.3, window=window)


def with_gradients(run: Run, inputs: list[Tensor], ids: Tensor | None, window: int | None) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    mixed = run(*leaves, ids, window)
    # A gradient that differs from place to place, and is no multiple of the result.
    upstream = torch.linspace(-1, 1, mixed.numel(), dtype=torch.float64).sin_().view_as(mixed)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, upstream.to(mixed.dtype))]


def tensors(rows: int, length: int, heads: tuple[int, int], seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    # Token by token, as projections make them; attention sees them head by head.
    return [
        torch.randn(rows, length, count, HEAD_DIM, dtype=torch.float64, generator=made).transpose(1, 2)
        for count in (heads[0], heads[1], heads[1])
    ]


def check(
    run: Run,
    inputs: list[Tensor],
    ids: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
    oracle: Run = dense,
) -> None:
    inputs = [one.to(dtype) for one in inputs]
    expected = with_gradients(oracle, [one.double() for one in inputs], ids, window)
    found = with_gradients(run, inputs, ids, window)
    for name, one, other in zip(("result", "query", "key", "value"), found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert (one.double() - other).abs().max() <= CLOSE[dtype], name


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, Tensor | None, int | None]:
    """Rows, their length, who is in which document (cut differently in each row), and a window."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 33))
    window = draw(st.none() | st.integers(1, 40))
    if draw(st.booleans()):
        return rows, length, None, window
    cuts = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(rows)]
    return rows, length, torch.tensor(cuts).cumsum(1), window


@settings(max_examples=80, deadline=None)
@given(
    case=cases(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    dtype=st.sampled_from(list(CLOSE)),
    seed=st.integers(0, 99),
)
def test_any_documents_and_any_window_equal_the_dense_mask(
    case: tuple[int, int, Tensor | None, int | None], heads: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    rows, length, ids, window = case
    check(engine, tensors(rows, length, heads, seed), ids, window, dtype)


@settings(max_examples=40, deadline=None)
@given(case=cases(), heads=st.sampled_from([(4, 2), (3, 3)]), at_once=st.sampled_from([4, 256]))
def test_the_plain_products_equal_it_too(
    case: tuple[int, int, Tensor | None, int | None], heads: tuple[int, int], at_once: int
) -> None:
    """What fp32 and fp64 take on a GPU."""
    rows, length, ids, window = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "QUERIES_AT_ONCE", at_once)
        patch.setattr(attention_blocks, "on_cpu", lambda query: False)
        check(engine, tensors(rows, length, heads, 1), ids, window, torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(),
    heads=st.sampled_from([(4, 2), (3, 3)]),
    dtype=st.sampled_from(list(CLOSE)),
    cap=st.sampled_from([0.4, 50.0]),
    at_once=st.sampled_from([4, 256]),
)
def test_capped_scores_equal_it_too(
    case: tuple[int, int, Tensor | None, int | None],
    heads: tuple[int, int],
    dtype: torch.dtype,
    cap: float,
    at_once: int,
) -> None:
    rows, length, ids, window = case
    run, oracle = partial(engine, cap=cap), partial(dense, cap=cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "QUERIES_AT_ONCE", at_once)
        check(run, tensors(rows, length, heads, 2), ids, window, dtype, oracle)


@pytest.mark.parametrize("window", [None, 5])
def test_other_documents_are_no_other_graph(window: int | None) -> None:
    torch._dynamo.reset()
    inputs = tensors(2, 24, (4, 2), 0)
    graphs = []
    for seed in range(4):
        cuts = torch.rand(2, 24, generator=torch.Generator().manual_seed(seed)) < 0.1 * (1 + seed)
        check(compiled, inputs, cuts.cumsum(1), window, torch.float64)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4


@pytest.mark.parametrize("window", [256, None])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("ids", [None, torch.arange(4096).expand(2, -1) // 700])
def test_nothing_of_a_rows_square_is_ever_held(
    ids: Tensor | None, cap: float | None, window: int | None
) -> None:
    """The largest tensor that any operator makes is far smaller than [T, T]."""
    inputs = [one.float() for one in tensors(2, 4096, (1, 1), 0)]
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for one in torch.utils._pytree.tree_leaves(made):
                if isinstance(one, Tensor):
                    largest = max(largest, one.numel())
            return made

    query, key, value = (one.transpose(1, 2).flatten(0, 1) for one in inputs)
    ends = (Documents.of(ids) if ids is not None else Documents.of(torch.zeros(2, 4096))).ends
    cumulative = sorted(set(ends.tolist()))
    with Sizes():
        mixed, logarithms = attention_blocks.forward(query, key, value, cumulative, window, 0.3, cap)
        attention_blocks.backward(
            torch.ones_like(mixed), query, key, value, mixed, logarithms, cumulative, window, 0.3, cap
        )
    assert 0 < largest <= 2 * 2 * 4096 * max(256, HEAD_DIM) // 2


def test_documents_end_with_their_rows_and_keep_their_shape() -> None:
    documents = Documents.of(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 2]]))
    assert documents.ends.tolist() == [0, 2, 4, 7, 8, 8, 8, 8, 8]
    assert documents.sizes.tolist() == [4, 3] and documents.ends.dtype == torch.int32
    assert Documents.of(torch.zeros(2, 4)).ends.shape == documents.ends.shape
    moved = documents.to(torch.device("meta"))
    assert moved.ends.device.type == "meta" and moved.sizes.device.type == "cpu"


def test_one_document_a_row_is_sdpas_causal_attention() -> None:
    inputs = tensors(2, 16, (4, 4), 0)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3)
    assert torch.equal(engine(*inputs, None, 16), expected)
    assert torch.equal(engine(*inputs, torch.zeros(2, 16), None), expected)


def test_compiled_queries_lie_token_by_token() -> None:
    """As projections write and read them, so that attention's result, laid out alike, is not copied."""
    rows, heads, length = 2, 3, 5
    query = torch.randn(rows, length, heads, HEAD_DIM).transpose(1, 2).requires_grad_()
    angles = torch.randn(rows, 1, length, HEAD_DIM // 2)
    rotation = angles.cos(), angles.sin()
    compiled = torch.compile(rotated, backend="aot_eager", fullgraph=True, dynamic=False)
    found, expected = compiled(query, rotation), rotated(query, rotation)
    assert found.transpose(1, 2).is_contiguous() and expected.is_contiguous()
    assert torch.equal(found, expected)
    upstream = torch.randn_like(expected)
    given, wanted = (torch.autograd.grad(one, query, upstream)[0] for one in (found, expected))
    assert torch.equal(given, wanted)
