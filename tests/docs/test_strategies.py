"""The strategy pages: drawings and tables come out of the code, formulas hold for real ranks, links lead somewhere."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.config import TuneSection
from shoal.facts.layout import SCHEDULES, Layout
from shoal.facts.layout.stages import cut
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.facts.schedules.programs import bubble, in_flight, instructions, simulate, text
from shoal.facts.schedules.timeline import as_text
from shoal.models.decoder import build
from shoal.models.initial import fill
from shoal.observe.collectives import CollectiveCounter
from shoal.observe.memory import MemoryTracker
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.parallel.stage_module import MicroBatch
from shoal.train import optimizer as optimizers
from shoal.train.data.loader import Batch
from shoal.train.step import Step

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PIPELINE = (ROOT / "docs" / "strategies" / "pipeline.md").read_text()


# Drawings and tables.


def fenced(page: str, language: str) -> list[tuple[str, str]]:
    """The first line's rest and the content of every block in a language."""
    return re.findall(rf"^```{language} (.*)\n((?:.*\n)*?)```$", page, re.MULTILINE)


def arguments(line: str) -> tuple[str, int, int, int]:
    """``zbv pp=3 chunks=2 micro=6``."""
    found = re.fullmatch(r"(\w+) pp=(\d+) chunks=(\d+) micro=(\d+)", line)
    assert found, line
    return found[1], int(found[2]), int(found[3]), int(found[4])


def test_every_timeline_is_what_the_code_draws() -> None:
    drawn = fenced(PIPELINE, "timeline")
    assert [line.split()[0] for line, _ in drawn] == list(SCHEDULES)
    for line, content in drawn:
        programs = instructions(*arguments(line))
        timeline = simulate(programs)
        expected = f"{as_text(timeline)}\nidle {bubble(timeline):.1%}, held {in_flight(programs)}\n"
        assert content == expected, line


def test_every_program_is_what_the_code_lists() -> None:
    listed = fenced(PIPELINE, "instructions")
    assert listed
    for line, content in listed:
        assert content == text(instructions(*arguments(line))) + "\n", line


def test_the_table_of_stages() -> None:
    rows = re.findall(r"^\| ([\w.-]+), (\d+) \| ([\d ]+) \|$", PIPELINE, re.MULTILINE)
    assert len(rows) >= 3
    for model, count, layers in rows:
        assert layers == " ".join(str(len(stage.layers)) for stage in cut(PRESETS[model], int(count))), model


@pytest.mark.parametrize("pp", [2, 3, 8])
@pytest.mark.parametrize("rounds", [2, 5])
def test_the_table_of_idle_shares(pp: int, rounds: int) -> None:
    micro = rounds * pp
    work = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 3, "zbv": 6, "dualpipev": 6}
    chunks = {"gpipe": 1, "1f1b": 1, "zb": 1}
    for schedule in SCHEDULES:
        share = bubble(simulate(instructions(schedule, pp, chunks.get(schedule, 2), micro)))
        assert share == pytest.approx((pp - 1) / (work[schedule] * micro + pp - 1)), schedule
    share = bubble(simulate(instructions("zb", pp, 3, micro)))
    assert share == pytest.approx((pp - 1) / (3 * 3 * micro + pp - 1))


# Links.


def links(page: Path) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    for link in links(page):
        if not re.match(r"[a-z]+:", link):
            assert (page.parent / link.partition("#")[0]).exists(), link


# Formulas: what a rank sends in a step, and what a block keeps.

LAYERS, HIDDEN, VOCAB, HEAD, SEQ, ROWS = 4, 16, 61, 4, 8, 4
SMALL: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": LAYERS,
    "hidden": HIDDEN,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": HEAD,
    "ffn": 24,
    "vocab": VOCAB,
    "max_positions": 16,
    "init_std": 0.1,
    "tied": True,
}
BLOCK = 2 * HIDDEN + 2 * HIDDEN * 16 + 2 * HIDDEN * 8 + 3 * HIDDEN * 24
PARAMETERS = VOCAB * HIDDEN + LAYERS * BLOCK + HIDDEN
MATRIX = VOCAB * HIDDEN

Sums = dict[str, tuple[int, int]]  # calls and bytes of every operation


@dataclass(frozen=True)
class PendingDispatch:
    """A layout of two ranks, in fp32, and what the pages say that one of them sends in a step."""

    layout: str
    expected: Sums
    micro: int = 1
    strict: bool = False
    shared_heads: bool = False


def with_scalars(calls: int, size: int, strict: bool = False) -> tuple[int, int]:
    return (calls + 5, size + 80) if strict else (calls + 2, size + 32)


def tensor(layout: str, gathers: int, scatters: int, shared_heads: bool = False) -> PendingDispatch:
    """Two micro-batches of two sequences."""
    micro, times = 2, 2
    stream = micro * SEQ * HIDDEN * 4
    norms = 4 * (2 * LAYERS + 1) * HIDDEN
    heads = 4 * 2 * LAYERS * HIDDEN * HEAD if shared_heads else 0
    loss = times * 3 * 4 * micro * SEQ
    if "sp=0" in layout:
        calls = times * (gathers + 2) + shared_heads
        sums = {"all_reduce": with_scalars(calls, times * gathers * stream + loss + heads)}
    else:
        sums = {
            "all_gather": (times * gathers, times * gathers * stream),
            "all_reduce": with_scalars(2 * times + 1 + shared_heads, loss + norms + heads),
            "reduce_scatter": (times * scatters, times * scatters * stream),
        }
    return PendingDispatch(layout, sums, micro, shared_heads=shared_heads)


def pipeline(schedule: str, cuts: int, tied_sum: bool = True) -> PendingDispatch:
    """Four micro-batches of one sequence. Of two ranks each sends one way or the other over every cut."""
    calls = ROWS * cuts
    size = calls * SEQ * HIDDEN * 4
    tied = with_scalars(int(tied_sum), 4 * MATRIX * tied_sum)
    return PendingDispatch(
        f"pp=2,{schedule}", {"all_reduce": tied, "receive": (calls, size), "send": (calls, size)}
    )


def context(layout: str, forwards: int = 1) -> PendingDispatch:
    """Two micro-batches of two sequences; two ranks, two buckets. ``forwards``: passes, repeated ones too."""
    micro, times = 2, 2
    token = 4 * micro * SEQ // 2
    padded = PARAMETERS + PARAMETERS % 2
    sums = {
        "all_gather": (2, 4 * padded),
        "all_reduce": with_scalars(0, 0),
        "reduce_scatter": (2, 4 * padded),
    }
    turns = times * LAYERS * (forwards + 2)
    if "ulysses" in layout:
        passes = times * LAYERS * (forwards + 1)
        sums["all_to_all"] = (4 * passes, 2 * passes * token * (4 + 2) * HEAD)
    else:
        sums |= dict.fromkeys(("receive", "send"), (turns, turns * token * 2 * 2 * HEAD))
    return PendingDispatch(layout, sums, micro)


WAYS = 4 * LAYERS + 2
SENT = [
    PendingDispatch("dp=2", {"all_reduce": with_scalars(1, 4 * PARAMETERS)}),
    tensor("tp=2", WAYS, WAYS),
    tensor("tp=2,recompute=selective", WAYS + 2 * LAYERS, WAYS + LAYERS),
    tensor("tp=2,recompute=full", WAYS + 2 * LAYERS, WAYS + LAYERS, shared_heads=True),
    tensor("tp=2,sp=0", WAYS, WAYS, shared_heads=True),
    tensor("tp=2,sp=0,recompute=full", WAYS + LAYERS, 0),
    context("zero=1,cp=2"),
    context("zero=1,cp=2,recompute=full", forwards=2),
    context("zero=1,cp=2,cp_kind=ulysses"),
    context("zero=1,cp=2,cp_kind=ulysses,recompute=selective", forwards=2),
    pipeline("schedule=zb", 1),
    pipeline("schedule=interleaved", 3),
    pipeline("schedule=zbv", 2, tied_sum=False),
    # A tied matrix is two in strict mode.
    PendingDispatch(
        "dp=2", {"all_reduce": with_scalars(1, 8 * (PARAMETERS + MATRIX), strict=True)}, strict=True
    ),
]


def place(
    layout: str, model: Model, rank: int = 0, strict: bool = False, compute: torch.dtype = torch.float32
) -> tuple[Placed, Mesh]:
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    network = build(model, 0.0, compute, dtype=torch.float32, length=SEQ)
    return apply(network, mesh, TuneSection(), partial(fill, model=model, seed=0), SEQ, strict=strict), mesh


def rows(model: Model, first: int, count: int) -> Batch:
    tokens = (torch.arange(SEQ) * 7 + torch.arange(first, first + count)[:, None] * 13) % model.vocab
    positions = torch.arange(SEQ).expand(count, SEQ).contiguous()
    return Batch(tokens, tokens.roll(-1, 1), positions, None, torch.arange(first, first + count), count * SEQ)


def send(rank: int, world: int, cases: list[PendingDispatch]) -> list[Sums]:
    """What this rank sends in the second step of each case."""
    return [_sent(rank, case) for case in cases]


def _sent(rank: int, case: PendingDispatch) -> Sums:
    model = Model(**{**SMALL, "kv_heads": 1 if case.shared_heads else 2})
    placed, mesh = place(case.layout, model, rank, case.strict)
    recipe = Recipe(seq=SEQ, batch=ROWS, steps=3)
    step = Step(
        placed, optimizers.build(placed.gradients.pieces, recipe), recipe, mesh, optimizers.LossScale()
    )
    share = ROWS // mesh.layout.data_ranks
    start = mesh.data_index * share
    batches = [rows(model, first, case.micro) for first in range(start, start + share, case.micro)]
    step(1, batches, ROWS * SEQ)
    with CollectiveCounter() as counter:
        mesh.hosts.sum_integers([ROWS * SEQ, 0])  # as the loop does
        step(2, batches, ROWS * SEQ)
    sums: Sums = {}
    for traffic in counter.traffic():
        calls, size = sums.get(traffic.op, (0, 0))
        sums[traffic.op] = calls + traffic.count, size + traffic.bytes
    return sums


def test_a_step_sends_what_the_pages_say() -> None:
    for sent in run_ranks(2, send, SENT):
        for case, sums in zip(SENT, sent, strict=True):
            assert sums == case.expected, case.layout


# Recomputation.


def kept(layout: str, rank: int = 0, sequences: int = 2, compute: torch.dtype = torch.float32) -> float:
    """Bytes that one block keeps between its passes: what four blocks keep less what two do, halved."""
    held = []
    for layers in (2, 4):
        model = Model(**{**SMALL, "layers": layers})
        placed, _ = place(layout, model, rank, compute=compute)
        with MemoryTracker() as tracker:
            tracker.mark(placed.segments[0].parameters(), "params")
            loss = _forward(placed, model, sequences)
            gc.collect()
            held.append(_settled(tracker))
            del loss
    return (held[1] - held[0]) / 2


def _settled(tracker: MemoryTracker) -> int:
    """What is live once gloo's threads have let go of what they sent: a moment after it was waited for."""
    readings = [tracker.live().get("other", 0)]
    while (dist.is_initialized() and len(readings) < 25) or len(set(readings[-25:])) > 1:
        time.sleep(0.01)
        readings.append(tracker.live().get("other", 0))
    return readings[-1]


def _forward(placed: Placed, model: Model, sequences: int = 2) -> Tensor:
    batch = rows(model, 0, sequences)
    micro = placed.executor.sequence.of(MicroBatch(batch.tokens, batch.positions, None, batch.targets, None))
    loss: Tensor = placed.segments[0](micro.tokens, micro)
    return loss


TOKENS = 2 * SEQ
INSIDE = 16 + 2 * 8 + 2 * 24  # q + 2k + 2f


def test_a_block_keeps_what_the_page_says() -> None:
    assert kept("recompute=full") == 4 * TOKENS * HIDDEN
    assert kept("recompute=selective") == 4 * TOKENS * (3 * HIDDEN + INSIDE)


def kept_under_tensor(rank: int, world: int) -> tuple[float, float]:
    return kept("tp=2,recompute=full", rank), kept("tp=2,recompute=selective", rank)


def test_a_split_block_keeps_what_the_page_says() -> None:
    full, selective = run_ranks(2, kept_under_tensor)[0]
    assert full == 4 * TOKENS * HIDDEN / 2
    assert selective == 4 * TOKENS * (HIDDEN / 2 + 2 * HIDDEN + INSIDE / 2)


def kept_under_context(rank: int, world: int) -> list[float]:
    return [kept(f"zero=1,cp={world},cp_kind={kind}", rank) for kind in ("ring", "ulysses")]


def test_context_ranks_keep_their_tokens_alone() -> None:
    """Of all that a block keeps, each of N ranks has 1/N. Alone, fp32 attention keeps a copy of keys for each head."""
    whole = kept("dp=1")
    copied = 4 * TOKENS * (2 * (16 - 8) + 16)  # keys and values for each query head; the result turned back
    for ring, ulysses in run_ranks(2, kept_under_context):
        assert ring == (whole - copied) / 2
        assert ulysses == whole / 2


def test_without_recomputation_no_weight_is_kept() -> None:
    bf16 = torch.bfloat16
    # Activations double with the sequences, weights do not.
    weights = 2 * kept("recompute=none", compute=bf16) - kept("recompute=none", sequences=4, compute=bf16)
    assert weights == 0  # they are cast once a step, not for every micro-batch
    assert kept("recompute=selective", compute=bf16) == 2 * TOKENS * (3 * HIDDEN + INSIDE)
    assert kept("recompute=full", compute=bf16) == 2 * TOKENS * HIDDEN


def test_recomputation_changes_no_bit() -> None:
    model = Model(**SMALL)

    def gradients(layout: str) -> list[Tensor]:
        placed, _ = place(layout, model)
        _forward(placed, model).backward()
        return [parameter.grad for parameter in placed.segments[0].parameters() if parameter.grad is not None]

    plain = gradients("recompute=none")
    for kind in ("selective", "full"):
        again = gradients(f"recompute={kind}")
        assert len(again) == len(plain) and all(map(torch.equal, again, plain)), kind
