"""The parts of parameters: together they are the whole, and who holds the same part is known."""

from __future__ import annotations

from collections import Counter
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.model import Model
from shoal.facts.model.parameters import by_name, llama_parameters
from shoal.facts.model.tensor_split import Box, summed_over, tensor_part, tile


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, int]:
    """A model and a degree of tensor parallelism that it can take; vocabularies need not divide."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv_heads = draw(st.sampled_from([count for count in range(1, 17) if count % tp == 0 or tp % count == 0]))
    queries = draw(st.integers(1, 3)) * (tp // kv_heads if tp > kv_heads else 1)
    biased = draw(st.booleans())
    model = Model(
        name="drawn",
        family="llama",
        layers=1,
        hidden=draw(st.integers(1, 5)),
        heads=kv_heads * queries,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        ffn=tp * draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 30)),
        max_positions=4,
        norm=draw(st.sampled_from(["rms", "layer"])),
        positions=draw(st.sampled_from(["rotary", "learned"])),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=biased,
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    return model, tp


@given(models())
def test_the_boxes_of_all_ranks_cover_each_parameter_once_for_each_copy(drawn: tuple[Model, int]) -> None:
    model, tp = drawn
    for parameter in llama_parameters(model):
        parts = [tensor_part(parameter, tp, index) for index in range(tp)]
        assert {part.box.whole for part in parts} == {parameter.shape}
        assert len({part.copies for part in parts}) == 1
        covered = Counter(element for part in parts for element in elements(part.box))
        assert len(covered) == prod(parameter.shape) and set(covered.values()) == {parts[0].copies}
        # The copies of a box are numbered, so that one of them can be chosen.
        numbered = Counter((part.box.offset, part.copy) for part in parts if part.box.size)
        assert set(numbered.values()) == {1}
        assert all(0 <= part.copy < part.copies for part in parts)


@given(models())
def test_query_heads_are_where_the_key_and_value_heads_are_that_they_attend_to(
    drawn: tuple[Model, int],
) -> None:
    model, tp = drawn
    shared = model.heads // model.kv_heads

    def heads(projection: str, index: int) -> list[int]:
        name = f"model.layers.0.self_attn.{projection}.weight"
        rows = tensor_part(by_name(model)[name], tp, index).box.slices[0]
        assert rows.start % model.head_dim == rows.stop % model.head_dim == 0
        return list(range(rows.start // model.head_dim, rows.stop // model.head_dim))

    for index in range(tp):
        queries, keys = heads("q_proj", index), heads("k_proj", index)
        assert keys == heads("v_proj", index)
        # The network pairs its local heads by dividing evenly: that must be the pairing of the whole model.
        local = len(queries) // len(keys)
        assert [query // shared for query in queries] == [keys[n // local] for n in range(len(queries))]


@given(models(), st.booleans())
def test_only_what_several_ranks_hold_is_summed_over_them(drawn: tuple[Model, int], sp: bool) -> None:
    model, tp = drawn
    for parameter in llama_parameters(model):
        copies = tensor_part(parameter, tp, 0).copies
        over = summed_over(parameter, tp, sp)
        if tp == 1 or copies == 1:
            wanted = None
        elif "k_proj" in parameter.name or "v_proj" in parameter.name:
            wanted = "copies"
        else:
            wanted = "tensor" if sp or "q_norm" in parameter.name or "k_norm" in parameter.name else None
        assert over == wanted, parameter.name


def test_a_vocabulary_that_does_not_divide_leaves_the_last_ranks_with_less() -> None:
    model = Model(
        name="odd",
        family="llama",
        layers=1,
        hidden=2,
        heads=4,
        kv_heads=4,
        head_dim=2,
        ffn=4,
        vocab=5,
        max_positions=4,
    )
    rows = [tensor_part(by_name(model)["lm_head.weight"], 4, index).box for index in range(4)]
    assert [(box.offset[0], box.shape[0]) for box in rows] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert rows[2].slices == (slice(4, 5), slice(0, 2)) and rows[3].size == 0


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.lists(st.tuples(*[st.integers(0, 2)] * 2, *[st.integers(1, 3)] * 2), max_size=5),
)
def test_boxes_tile_a_shape_where_each_element_is_in_one(
    shape: tuple[int, int], drawn: list[tuple[int, int, int, int]]
) -> None:
    boxes = [((row, column), (height, width)) for row, column, height, width in drawn]
    held = Counter(
        (y, x)
        for (row, column), (height, width) in boxes
        for y in range(row, row + height)
        for x in range(column, column + width)
    )
    wanted = Counter((y, x) for y in range(shape[0]) for x in range(shape[1]))
    assert tile(shape, boxes) == (held == wanted)
    rows = [((row, 0), (1, shape[1])) for row in range(shape[0])]
    assert tile(shape, rows) and not tile(shape, rows[1:]) and not tile(shape, [*rows, rows[0]])


def test_a_scalar_is_one_box() -> None:
    assert tile((), [((), ())]) and not tile((), []) and not tile((), [((), ())] * 2)


def elements(box: Box) -> list[tuple[int, ...]]:
    """The index of every element of a box of one or two dimensions."""
    first, *rest = (range(one.start, one.stop) for one in box.slices)
    return [(row, *column) for row in first for column in ([(n,) for n in rest[0]] if rest else [()])]
