"""Every kernel of our own on a GPU, against the operators that compute the same on a CPU: equal, and how fast.

python benchmarks/kernels.py              # all of them: half a minute
python benchmarks/kernels.py nf4 mix      # some

A row a kernel in ``results/kernels.jsonl``; the exit code is 1 where one differs. Rates count the bytes that a kernel
has to read and write, once each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from record import record
from torch import Tensor

from shoal.facts.blockwise import SCALE_OF
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models import mix, nf4
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard, piece_slices
from shoal.train.blockwise import MEAN, SQUARE, decode
from shoal.train.optimizer import clip_and_update, set_learning_rate
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
# Odd sizes: what is left of a block, a chunk or a row is where kernels go wrong.
MODEL = PRESETS["tiny"].model_copy(
    update={"layers": 2, "hidden": 200, "heads": 4, "kv_heads": 2, "head_dim": 50, "ffn": 344, "vocab": 1003}
)
UPDATES, LR = 6, 0.01
# Elements of a large weight, for the rates.
ROWS, WIDTH = 16384, 4096


def main() -> int:
    asked = sys.argv[1:] or list(KERNELS)
    fine = True
    for name in asked:
        found = KERNELS[name]()
        fine &= bool(found["equal"])
        record("kernels", kernel=name, **found)
    return 0 if fine else 1


def rounding() -> dict[str, Any]:
    """AdamW with states in bf16: the same chances on both devices, so the same weights but for the last bit of fp32."""
    return updates(Recipe(precision="bf16", states="bf16", seq=8, lr=LR, weight_decay=0.1))


def blockwise() -> dict[str, Any]:
    return updates(Recipe(precision="bf16", states="int8", seq=8, lr=LR, weight_decay=0.1))


def masters() -> dict[str, Any]:
    return updates(Recipe(precision="bf16", seq=8, lr=LR, weight_decay=0.1))


def updates(recipe: Recipe) -> dict[str, Any]:
    """Updates from the same weights, gradients and states, one device's beside the other's.

    A kernel may round a product and a sum once where operators round twice, and what differs in the last bit of fp32
    may be rounded to the other neighbour. How many values differ is counted, and how many by more than that.
    """
    here, there = a_step(recipe, CPU), a_step(recipe, GPU)
    in_kernel = there.optimizer.writes_copies  # type: ignore[attr-defined]
    apart = elements = far = 0
    for number in range(1, UPDATES + 1):
        largest = []
        for one, two in zip(here.pieces, there.pieces, strict=True):
            one.tensor.grad = torch.empty_like(one.tensor, dtype=one.tensor.grad_dtype)
            fill([(one.name, part) for part in piece_slices(one, one.tensor.grad)], MODEL, seed=100 + number)
            two.tensor.data.copy_(one.tensor.data)
            two.tensor.grad = one.tensor.grad.to(GPU)
            for kind, kept in here.optimizer.state.get(one.tensor, {}).items():
                there.optimizer.state[two.tensor][kind].copy_(kept)
            gradient = one.tensor.grad.float().abs()
            largest.append({"exp_avg": gradient, "exp_avg_sq": gradient.square()})
            for kind, (before, _) in values(here, one).items():
                # A weight moves by the learning rate or so, whatever its own size.
                moved = largest[-1].get(kind, torch.full_like(before, LR))
                largest[-1][kind] = torch.maximum(before.abs(), moved)
        for step, device in ((here, CPU), (there, GPU)):
            set_learning_rate(step.optimizer, LR)
            # Every other one is clipped.
            clip = 0.5 if number % 2 else 0.0
            clip_and_update(step.optimizer, step.pieces, torch.tensor(1.0, device=device), clip, 1e30, number)
        for one, two, most in zip(here.pieces, there.pieces, largest, strict=True):
            for kind, (wanted, spacing) in values(here, one).items():
                found = values(there, two)[kind][0]
                off = (found - wanted).abs()
                elements += off.numel()
                apart += int((off > 0).sum())
                # Some roundings in fp32; terms that cancel leave the last bits of each.
                terms = torch.maximum(most[kind], wanted.abs())
                far += int((off > 1.01 * spacing + 2.0**-21 * terms).sum())
            if two.working is not None and in_kernel:
                far += int((two.working != two.tensor.data.to(two.working.dtype)).sum())
    return {"equal": in_kernel and far == 0, "elements": elements, "apart": apart, "far": far}


def values(step: Step, piece: Shard) -> dict[str, tuple[Tensor, Tensor]]:
    """A weight and its moments, as fp32 on the CPU, and the distance to the next value that each could have."""
    state = step.optimizer.state[piece.tensor]
    found = {"weight": piece.tensor.data.cpu()} | {
        kind: state[kind].cpu() for kind in ("exp_avg", "exp_avg_sq")
    }
    spaced = {}
    for kind, kept in found.items():
        if kept.dtype == torch.uint8:
            code, scale = {"exp_avg": MEAN, "exp_avg_sq": SQUARE}[kind], state[SCALE_OF[kind]].cpu()
            wide = decode(kept.view(len(scale), -1), scale, code)
            # Three bits behind the first one; what is below the least of a block becomes that or nothing.
            least = code.lowest * 2.0 ** (scale.float() - 126)
            spacing = torch.maximum(wide.abs() / 8, least[:, None])
            spaced[kind] = wide.view(kept.shape), spacing.view(kept.shape)
        else:
            wide = kept.float()
            # In fp32 nothing is rounded but on the way.
            spaced[kind] = wide, wide.abs() * (2.0**-7 if kept.dtype == torch.bfloat16 else 0.0)
    return spaced


def a_step(recipe: Recipe, device: torch.device) -> Step:
    first = partial(fill, model=MODEL, seed=1)
    step = assemble(blueprint(MODEL, recipe), recipe, TuneSection(), Mesh(Layout(), 0, device), first)
    step.optimizer.start()  # type: ignore[attr-defined]
    return step


def unpacking() -> dict[str, Any]:
    """NF4: every bit, in each dtype; rows of one block and of many, and more rows than a grid's dimension has."""
    equal = True
    for rows, width in ((3, 64), (7, 4096), (70_000, 64), (5, 14336)):
        packed = nf4.pack(torch.randn(rows, width))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            there = nf4.unpack(packed.to(GPU), dtype)
            equal &= torch.equal(there.cpu(), nf4.unpack(packed, dtype))
    packed = nf4.pack(torch.randn(ROWS, WIDTH)).to(GPU)
    seconds = timed(lambda: nf4.unpack(packed, torch.bfloat16))
    moved = packed.numel() + 2 * ROWS * WIDTH
    return {"equal": equal, "ms": 1e3 * seconds, "GB_per_s": moved / seconds / 1e9}


def mixing() -> dict[str, Any]:
    """Rows that are all there, and some that are not: those add nothing."""
    worst = 0.0
    for tokens, copies, width in ((1, 1, 8), (37, 4, 200), (512, 8, 2048)):
        back = torch.randperm(tokens * copies)
        weights = torch.rand(tokens, copies)
        for there in (tokens * copies, max(1, tokens * copies // 2)):
            results = torch.randn(there, width)
            for given in (None, weights):
                wanted = mix.mix_rows(
                    results.double(), back, copies, None if given is None else given.double()
                )
                # What lies behind the rows that are there must not be read.
                room = torch.full((there + 64, width), float("nan"), device=GPU)
                room[:there] = results.to(GPU)
                found = mix.mix_rows(
                    room[:there], back.to(GPU), copies, None if given is None else given.to(GPU)
                )
                worst = max(worst, float((found.double().cpu() - wanted).abs().max()))
    tokens, copies, width = 16384, 4, 2048
    results = torch.randn(tokens * copies, width, device=GPU, dtype=torch.bfloat16)
    back, weights = torch.randperm(tokens * copies, device=GPU), torch.rand(tokens, copies, device=GPU)
    seconds = timed(lambda: mix.mix_rows(results, back, copies, weights))
    moved = 2 * width * tokens * (copies + 1)
    return {"equal": worst < 1e-5, "worst": worst, "ms": 1e3 * seconds, "GB_per_s": moved / seconds / 1e9}


def speed_of_updates() -> dict[str, Any]:
    """Milliseconds for a weight of 67 million elements, by what its states are."""
    found: dict[str, Any] = {}
    large = MODEL.model_copy(
        update={
            "layers": 1,
            "hidden": WIDTH,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": ROWS,
            "vocab": 1024,
        }
    )
    for name, options in {
        "bf16 to nearest": {"states": "bf16", "rounding": "nearest"},
        "bf16 by chance": {"states": "bf16"},
        "int8": {"states": "int8"},
        "fp32 masters": {},
    }.items():
        recipe = Recipe(precision="bf16", seq=8, lr=LR, **options)
        first = partial(fill, model=large, seed=1)
        mesh = Mesh(Layout(), 0, GPU)
        step = assemble(blueprint(large, recipe), recipe, TuneSection(), mesh, first)
        for piece in step.pieces:
            piece.tensor.grad = torch.randn_like(piece.tensor, dtype=piece.tensor.grad_dtype)
        one = torch.tensor(1.0, device=GPU)
        seconds = timed(
            lambda step=step, one=one: clip_and_update(step.optimizer, step.pieces, one, 0.0, 1e30, 1)
        )
        elements = sum(piece.tensor.numel() for piece in step.pieces)
        found[name] = {"ms": 1e3 * seconds, "ns_per_1000": 1e12 * seconds / elements}
        del step
    return {"equal": True, **found}


def timed(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken[3:])


KERNELS: dict[str, Callable[[], dict[str, Any]]] = {
    "rounding": rounding,
    "blockwise": blockwise,
    "masters": masters,
    "nf4": unpacking,
    "mix": mixing,
    "updates": speed_of_updates,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
