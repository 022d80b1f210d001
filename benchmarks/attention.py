"""Attention of one layer, forward and backward: causal, within documents and within a window, each kernel side by side.

All kernels of one run take turns, and a number is the median of its turns; a turn issues several in a row behind other
work, so that the device never waits for the host. Each is first held to one oracle: a dense mask, computed in fp32 from
the same inputs (in fp64 where those are fp32). ``engine`` is what Shoal itself does with heads that lie one after
another; ``block`` what a compiled block does between projections, rotation included, which lie token by token: what a
step pays, and what documents are judged by. ``block, head by head`` rotates in the layout that SDPA's pages show.
On a GPU: ``benchmarks/attention.py``. Anywhere, to see that it runs: ``benchmarks/attention.py --tiny``, which keeps
no result.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import NamedTuple

import torch
from record import record
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from shoal.facts.model.presets import PRESETS
from shoal.models.attention import attend, rotated
from shoal.models.documents import Documents
from shoal.models.rotary import Rotation, rotate, tables

MODEL = PRESETS["llama3.2-1b"]
HEADS, KV_HEADS, HEAD_DIM = MODEL.heads, MODEL.kv_heads, MODEL.head_dim
WARM_UP, TURNS = 3, 10
# Of a turn; and products of so many rows and columns before them, for as long as the host takes to issue some.
IN_A_ROW, FILLERS, FILLING = 8, 3, 8192
# Packed documents of 700 tokens, of the time that plain causal attention takes.
TARGET = 0.65
# Of the largest number of a result or a gradient.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    rows: int
    seq: int
    document: int
    window: int
    dtype: torch.dtype
    device: str


class Case(NamedTuple):
    """Who sees whom."""

    name: str
    documents: bool
    window: int | None


def visible(shape: Shape, case: Case) -> Tensor:
    """The dense mask [T, T], the same for all rows."""
    place = torch.arange(shape.seq, device=shape.device)
    behind = place[:, None] - place
    mask = behind >= 0
    if case.window is not None:
        mask &= behind < case.window
    if case.documents:
        mask &= place[:, None] // shape.document == place // shape.document
    return mask


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def oracle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Row by row, in wider numbers than those that are judged."""
    wide = torch.float64 if query.dtype == torch.float32 else torch.float32
    shared = query.shape[1] // key.shape[1]
    found = []
    for row in range(len(query)):
        q, k, v = (one[row].to(wide) for one in (query, key, value))
        k, v = (one.repeat_interleave(shared, 0) for one in (k, v))
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        found.append(scores.masked_fill_(~mask, -torch.inf).softmax(-1) @ v)
    return torch.stack(found)


def causal(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def engine(documents: Documents | None, window: int | None, *heads: Tensor) -> Tensor:
    rows, _, seq, head_dim = heads[0].shape
    positions = torch.arange(seq, device=heads[0].device).expand(rows, -1)
    return attend(*heads, positions, documents, scale=head_dim**-0.5, window=window)


def rotation_of(shape: Shape) -> Rotation:
    positions = torch.arange(shape.seq, device=shape.device).expand(shape.rows, -1)
    return tables(MODEL, shape.seq, positions, shape.dtype)


Turn = Callable[[Tensor, Rotation], Tensor]


def turned(
    turn: Turn, rotation: Rotation, attended: Run, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """The same behind the rotation."""
    return attended(turn(query, rotation), turn(key, rotation), value)


def in_block(run: Run, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As ``Attention`` has it: from projections, [B, T, features], to what the next one reads."""
    heads = (one.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for one in (query, key, value))
    return run(*heads).transpose(1, 2).flatten(2)


def block_mask(shape: Shape, case: Case) -> BlockMask:
    """Flex attention's own description of what is visible."""
    ids = torch.arange(shape.seq, device=shape.device) // (shape.document if case.documents else shape.seq)

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mask = (query >= key) & (ids[query] == ids[key])
        return mask if case.window is None else mask & (query - key < case.window)

    return create_block_mask(seen, None, None, shape.seq, shape.seq, device=shape.device)


def varlen(documents: Documents, window: int | None, *heads: Tensor) -> Tensor:
    """Torch's own function, which the engine's operator stands in for: it shows what that costs."""
    from torch.nn.attention.varlen import varlen_attn

    rows, _, seq, _ = heads[0].shape
    flat = [one.transpose(1, 2).flatten(0, 1) for one in heads]
    count, longest = documents.sizes.tolist()
    ends = documents.ends[: count + 1]
    shares = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    reach = (-1 if window is None else window - 1, 0)
    mixed = varlen_attn(*flat, ends, ends, longest, longest, window_size=reach, **shares)
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (rows, seq)).transpose(1, 2)


def kernels(shape: Shape, case: Case) -> dict[str, Run]:
    """Everything that can compute this case here."""
    ids = (torch.arange(shape.seq) // shape.document).expand(shape.rows, -1)
    documents = Documents.of(ids).to(torch.device(shape.device)) if case.documents else None
    found: dict[str, Run] = {"engine": partial(engine, documents, case.window)}
    ways: dict[str, Turn] = {"block": rotated}
    if case.window is None:
        ways["block, head by head"] = rotate
    for name, turn in ways.items():
        attended = partial(turned, turn, rotation_of(shape), found["engine"])
        backend = "inductor" if shape.device == "cuda" else "aot_eager"
        found[name] = torch.compile(partial(in_block, attended), dynamic=False, backend=backend)
    plain = documents is None and case.window is None
    if plain and shape.device == "cuda":
        found["cudnn"] = partial(causal, SDPBackend.CUDNN_ATTENTION)
        found["flash"] = partial(causal, SDPBackend.FLASH_ATTENTION)
    if not plain:
        found["dense mask"] = partial(dense, mask=visible(shape, case))
    if shape.device == "cuda":
        flex = torch.compile(flex_attention, dynamic=False)
        one_a_row = Documents.of(torch.zeros(shape.rows, shape.seq)).to(torch.device(shape.device))
        found["varlen"] = partial(varlen, documents or one_a_row, case.window)
        found["flex"] = partial(flex, block_mask=block_mask(shape, case), enable_gqa=True)
    return found


def heads(shape: Shape) -> list[Tensor]:
    """Queries, keys and values, laid out head by head as a rotation leaves them."""
    made = torch.Generator(shape.device).manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    return [
        torch.randn(shape.rows, count, shape.seq, HEAD_DIM, device=shape.device, generator=made)
        .to(shape.dtype)
        .requires_grad_()
        for count in sizes
    ]


def both_ways(run: Run, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    mixed = run(*inputs)
    return [mixed, *torch.autograd.grad(mixed, inputs, gradient.to(mixed.dtype))]


def error(run: Run, expected: list[Tensor], inputs: list[Tensor], gradient: Tensor) -> float:
    """The largest difference from the oracle's result and gradients, of their largest number."""
    found = both_ways(run, inputs, gradient)
    return max(
        float((one.detach().to(other.dtype) - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


def milliseconds(run: Run, inputs: list[Tensor], gradient: Tensor) -> float:
    on_gpu = inputs[0].is_cuda
    if not on_gpu:
        began = time.perf_counter()
        both_ways(run, inputs, gradient)
        return (time.perf_counter() - began) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    filler = torch.zeros(FILLING, FILLING, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    for _ in range(FILLERS):
        torch.mm(filler, filler)
    start.record()
    for _ in range(IN_A_ROW):
        both_ways(run, inputs, gradient)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / IN_A_ROW


def measure(shape: Shape, case: Case, turns: int) -> dict[str, dict[str, float | str]]:
    """Milliseconds and error of every kernel of a case."""
    inputs = heads(shape)
    gradient = torch.randn_like(inputs[0])
    mask = visible(shape, case)
    expected = [one.detach() for one in both_ways(partial(oracle, mask=mask), inputs, gradient)]
    rows: dict[str, dict[str, float | str]] = {}
    runs: dict[str, tuple[Run, list[Tensor], Tensor]] = {}
    for name, run in kernels(shape, case).items():
        given, upstream, awaited = inputs, gradient, expected
        if name.startswith("block"):
            given, upstream, awaited = between_projections(shape, case, inputs, gradient)
        try:
            off = error(run, awaited, given, upstream)
        except RuntimeError as problem:  # a kernel that this device or version does not have
            rows[name] = {"failed": str(problem).splitlines()[0]}
            continue
        rows[name] = {"error": off}
        if off <= TOLERANCE[shape.dtype]:
            runs[name] = run, given, upstream
        else:
            rows[name]["failed"] = f"differs from the oracle by more than {TOLERANCE[shape.dtype]}"
    for one in runs.values():
        for _ in range(WARM_UP):
            milliseconds(*one)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, one in runs.items():
            times[name].append(milliseconds(*one))
    for name, taken in times.items():
        rows[name]["ms"] = statistics.median(taken)
    return rows


def between_projections(
    shape: Shape, case: Case, inputs: list[Tensor], gradient: Tensor
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """A block's inputs, gradient, and what it is to give: the same numbers, token by token, behind the rotation."""

    def by_token(heads: Tensor) -> Tensor:
        return heads.detach().transpose(1, 2).flatten(2).contiguous()

    given = [by_token(one).requires_grad_() for one in inputs]
    upstream = by_token(gradient)
    attended = partial(turned, rotate, rotation_of(shape), partial(oracle, mask=visible(shape, case)))
    found = both_ways(partial(in_block, attended), given, upstream)
    return given, upstream, [one.detach() for one in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small shape, on any machine; keeps no result")
    parser.add_argument("--cases", help='some of them, as in "causal,documents"')
    options = parser.parse_args()
    tiny = options.tiny
    if not tiny and not torch.cuda.is_available():
        parser.error("no GPU here: add --tiny to see that it runs")
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    shape = Shape(2, 512, 88, 128, dtype, device) if tiny else Shape(4, 4096, 700, 1024, dtype, device)
    cases = (
        Case("causal", False, None),
        Case("documents", True, None),
        Case("window", False, shape.window),
        Case("documents and window", True, shape.window // 4),
    )
    wanted = options.cases.split(",") if options.cases else [case.name for case in cases]
    found = {case.name: measure(shape, case, 3 if tiny else TURNS) for case in cases if case.name in wanted}
    wrong = [
        f"{case}: {name}" for case, rows in found.items() for name, row in rows.items() if "failed" in row
    ]
    documents, whole = (
        float(found.get(name, {}).get("block", {}).get("ms", float("nan")))
        for name in ("documents", "causal")
    )
    share = documents / whole
    if tiny:
        for case, rows in found.items():
            for name, row in rows.items():
                print(case, name, row)
    else:
        record(
            "attention",
            shape={**shape._asdict(), "dtype": str(dtype), "heads": [HEADS, KV_HEADS, HEAD_DIM]},
            cases=found,
            documents_of_causal=share,
            target=TARGET,
        )
    print(f"documents take {share:.2f} of causal attention (target on an H200: {TARGET})")
    engines = [one for one in wrong if one.endswith(("engine", "block"))]
    print("\n".join(f"{one}: left out, see its row" for one in wrong))
    return 1 if engines or (not tiny and not share <= TARGET) else 0


if __name__ == "__main__":
    raise SystemExit(main())
