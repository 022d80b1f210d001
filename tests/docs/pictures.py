"""The drawings of docs/pictures, from what the code decides or computes. ``python -m tests.docs.pictures`` writes them.

Pictures of real pages, which take a run and a browser, are ``tests/docs/screenshots.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from tests.docs.choosing import judged
from tests.ranks import run_ranks, warm

from shoal.comm.ring import ShownRing, parts, show_ring
from shoal.facts.layout import SCHEDULES, Layout
from shoal.facts.layout.parameter_groups import expert_ranks
from shoal.facts.layout.sequence import held_pieces, piece_count
from shoal.facts.model.presets import PRESETS
from shoal.facts.schedules.programs import Action, bubble, instructions, simulate
from shoal.models.decoder import build
from shoal.models.experts import MixtureOfExperts
from shoal.models.initial import initialise

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
GIB = 2**30
RANKS = ("#2f6fb5", "#1f9e89", "#dd9a1f", "#d9634c")
INK, SOFT, SUNK = "#15212c", "#526373", "#eef2f5"
# Around letters that a line may cross.
HALO = ' stroke="#ffffff" stroke-width="4" paint-order="stroke"'
Parts = list[str]


def box(x: float, y: float, wide: float, high: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="2" fill="{fill}"{more}/>'
    )


def words(x: float, y: float, text: str, size: int = 13, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{more}>{escape(text)}</text>'


def middle(x: float, y: float, text: str, size: int = 11, fill: str = "#ffffff") -> str:
    return words(x, y, text, size, fill, ' text-anchor="middle"')


def drawing(wide: int, high: int, label: str, parts_: Sequence[str]) -> str:
    """On white, so that it can be read on any page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([head, box(0, 0, wide, high, "#ffffff"), *parts_, "</svg>", ""])


def key(x: float, y: float, kinds: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, fill in kinds:
        yield box(x, y - 10, 11, 11, fill)
        yield words(x + 16, y, name, 12, SOFT)
        x += 32 + 6.6 * len(name)


# Schedules, as they are simulated.

ACTIONS = {
    Action.FORWARD: ("forward", RANKS[0]),
    Action.BACKWARD: ("backward", RANKS[3]),
    Action.INPUT: ("backward: inputs", RANKS[2]),
    Action.WEIGHT: ("backward: weights", RANKS[1]),
}


def schedules() -> str:
    """Six schedules of 4 stages and 8 micro-batches, each as long as its work: chunks divide a rank's layers."""
    wide, left, row, top = 1000, 70, 13, 34
    chunks = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
    timelines = {
        name: (simulate(instructions(name, 4, chunks.get(name, 1), 8)), chunks.get(name, 1))
        for name in SCHEDULES
    }
    # A chunk is a part of a rank's layers, so that its passes take that part of the time; and of a backward pass that
    # is not split, a forward pass is half.
    longest = max(timeline.end / count for timeline, count in timelines.values())
    found: Parts = []
    for name, (timeline, count) in timelines.items():
        scale = (wide - left - 12) / longest / count
        found.append(words(12, top, f"{name}: {bubble(timeline):.1%} idle", 13, INK, ' font-weight="600"'))
        top += 8
        for number, events in enumerate(timeline.ranks):
            found.append(words(12, top + 10, f"rank {number}", 11, SOFT))
            found.append(box(left, top, timeline.end * scale, row - 2, SUNK))
            first = min(event.instruction.stage for event in events)
            for event in events:
                pale = "" if event.instruction.stage == first else ' fill-opacity=".55"'
                begin, length = left + event.start * scale, (event.end - event.start) * scale
                fill = ACTIONS[event.instruction.action][1]
                found.append(box(begin, top, max(length - 1, 0.6), row - 2, fill, pale))
            top += row
        top += 26
    found += key(left, top - 6, [*ACTIONS.values(), ("idle", SUNK)])
    label = "Six pipeline schedules of 4 stages and 8 micro-batches on one scale of time"
    return drawing(wide, top + 8, label, found)


# Memory, as the planner has it.

HELD = {
    "params": ("parameters", "#2f6fb5"),
    "grads": ("gradients", "#1f9e89"),
    "optimizer": ("optimizer states", "#dd9a1f"),
    "activations": ("activations", "#d9634c"),
    "logits": ("logits", "#7a5fb0"),
    "buffers": ("buffers", "#8b9aa8"),
}
JOB = "shoal plan llama3-8b --on 8xH100 --seq 4096 --batch 64 --layout "
LADDER = (
    "dp=8,micro=1",
    "fsdp=8,zero=1,micro=1",
    "fsdp=8,zero=2,micro=1",
    "fsdp=8,micro=1",
    "fsdp=8,micro=4",
    "fsdp=8,micro=4,recompute=full",
)


def ledger() -> str:
    """What the fullest rank of a job holds at the peak of a step, layout by layout."""
    wide, left, row = 1000, 230, 34
    plans = {layout: judged(JOB + layout) for layout in LADDER}
    capacity = next(iter(plans.values())).memory.capacity
    longest = max(plan.memory.peak_allocated for plan in plans.values())
    scale = (wide - left - 150) / longest
    told: Parts = []
    found: Parts = [words(12, 26, "llama3-8b on 8 × H100, 64 sequences of 4,096 tokens per step", 15)]
    for number, (layout, plan) in enumerate(plans.items()):
        top, x = 46 + number * row, float(left)
        found.append(words(12, top + 17, layout))
        for name, (_, fill) in HELD.items():
            part = getattr(plan.memory, name) * scale
            found.append(box(x, top, max(part - 0.6, 0), row - 10, fill))
            x += part
        verdict = "" if plan.memory.fits else ", too much"
        told.append(
            words(x + 8, top + 17, f"{plan.memory.peak_allocated / GIB:.0f} GiB{verdict}", 12, INK, HALO)
        )
    bottom = 46 + len(plans) * row
    line = left + capacity * scale
    found.append(
        f'<path d="M{line:.1f} 40V{bottom}" stroke="#c02b2b" stroke-width="1.5" stroke-dasharray="5 4"/>'
    )
    found += told
    found.append(words(line + 6, bottom + 6, f"a device has {capacity / GIB:.0f} GiB", 12, "#c02b2b"))
    found += key(12, bottom + 30, list(HELD.values()))
    return drawing(wide, bottom + 44, "Memory ledgers of six layouts of one job, as stacked bars", found)


def shards() -> str:
    """Of parameters, gradients and optimizer states, the part that each of 4 ranks holds."""
    wide, cell, gap, left, top = 1000, 42, 4, 140, 52
    # Whether a rank holds all or its own is read from the planner's bytes.
    job = "shoal plan llama3-8b --on 4xH100 --seq 4096 --batch 4 --layout "
    whole = judged(job + "dp=4").memory
    found: Parts = []
    names = [(name, words_) for name, (words_, _) in HELD.items() if name in ("params", "grads", "optimizer")]
    layouts = ("dp=4", "fsdp=4,zero=1", "fsdp=4,zero=2", "fsdp=4,zero=3")
    for place, layout in enumerate(layouts):
        x = left + place * (4 * (cell + gap) + 32)
        found.append(words(x, 22, layout, 13, INK, ' font-weight="600"'))
        memory = judged(job + layout).memory
        for rank in range(4):
            found.append(middle(x + rank * (cell + gap) + cell / 2, 42, f"rank {rank}", 11, SOFT))
        for number, (name, _) in enumerate(names):
            share = getattr(memory, name) / getattr(whole, name)
            for rank in range(4):
                at, y = x + rank * (cell + gap), top + number * (cell + gap)
                found.append(box(at, y, cell, cell, SUNK))
                for quarter in range(4) if share > 0.5 else (rank,):
                    found.append(box(at, y + quarter * cell / 4, cell, cell / 4 - 1, RANKS[quarter]))
        bytes_ = sum(getattr(memory, name) for name, _ in names)
        found.append(words(x, top + 3 * (cell + gap) + 18, f"{bytes_ / GIB:.0f} GiB per rank", 13))
    for number, (_, title) in enumerate(names):
        found.append(words(12, top + number * (cell + gap) + 26, title, 13))
    found.append(words(12, top + 3 * (cell + gap) + 18, "of llama3-8b", 13, SOFT))
    told = "A colour is one quarter of the elements; what a rank does not hold is grey."
    found.append(words(left, top + 3 * (cell + gap) + 42, told, 12, SOFT))
    return drawing(
        wide, top + 3 * (cell + gap) + 56, "What each of four ranks holds under dp and zero=1, 2, 3", found
    )


# What ranks send each other.


def ring() -> str:
    """A ring all-reduce of 4 ranks, by the code that ``shoal bench comm --show ring`` runs."""
    warm()
    seen: list[ShownRing] = run_ranks(4, _ring)
    wide, cell, left, top = 1000, 26, 20, 60
    steps = len(seen[0].steps)
    apart = (wide - 2 * left) / (steps + 1)
    found: Parts = []
    for step in range(steps + 1):
        x = left + step * apart
        shown = [one.steps[step - 1] if step else None for one in seen]
        first = shown[0]
        found.append(
            words(x, 24, "at the start" if first is None else f"step {step}", 13, INK, ' font-weight="600"')
        )
        found.append(words(x, 42, "" if first is None else first.phase, 11, SOFT))
        for rank, row in enumerate(shown):
            held = [2.0**rank] * 4 if row is None else row.chunks
            for chunk, value in enumerate(held):
                y = top + rank * (cell + 26)
                at = x + chunk * (cell + 2)
                found.append(box(at, y, cell, cell, SUNK))
                for part in parts(value):
                    found.append(
                        box(
                            at + 1, y + 1 + part * (cell - 2) / 4, cell - 2, (cell - 2) / 4 - 0.5, RANKS[part]
                        )
                    )
                if row is not None and chunk == row.received:
                    found.append(
                        box(at - 1, y - 1, cell + 2, cell + 2, "none", f' stroke="{INK}" stroke-width="1.5"')
                    )
            if row is not None:
                said = f"sends chunk {row.sent} to {(rank + 1) % 4}"
                found.append(words(x, top + rank * (cell + 26) + cell + 13, said, 10, SOFT))
    bottom = top + 4 * (cell + 26)
    names = [(f"rank {rank}'s part", fill) for rank, fill in enumerate(RANKS)]
    found += key(left, bottom + 10, names)
    sent, size = seen[0].sent_bytes, seen[0].buffer_bytes
    found.append(
        words(
            520,
            bottom + 10,
            f"outlined: just received. Each rank sends {sent / size:g} × its buffer",
            12,
            SOFT,
        )
    )
    return drawing(wide, bottom + 24, "A ring all-reduce of four ranks, step by step", found)


def _ring(rank: int, world: int) -> ShownRing:
    return show_ring(torch.device("cpu"))


def sequence() -> str:
    """Which pieces of a sequence each of 4 context ranks holds, and how much causal attention that is."""
    wide, cell, left = 1000, 22, 20
    found: Parts = []
    for place, kind in enumerate(("ring", "ulysses")):
        layout = Layout.parse(f"cp=4,cp_kind={kind}")
        count = piece_count(layout)
        size = 8 * cell / count
        x = left + place * 500
        title = {
            "ring": "ring: an early and a late piece each",
            "ulysses": "ulysses: a piece each; for attention, whole rows of some heads",
        }
        found.append(words(x, 24, title[kind], 13, INK, ' font-weight="600"'))
        owner = {piece: rank for rank in range(4) for piece in held_pieces(layout, rank)}
        for asks in range(count):
            for piece in range(asks + 1):
                found.append(
                    box(x + piece * size, 40 + asks * size, size - 1.5, size - 1.5, RANKS[owner[asks]])
                )
        for rank in range(4):
            # A piece looks at all of the earlier ones, and at half of itself.
            work = sum(piece + 0.5 for piece in held_pieces(layout, rank)) / (count * count / 2)
            y = 60 + rank * 30
            held = ", ".join(str(piece) for piece in held_pieces(layout, rank))
            found.append(box(x + 200, y - 11, 13, 13, RANKS[rank]))
            also = f": {work:.0%} of the attention" if kind == "ring" else ", then a quarter of the heads"
            found.append(words(x + 220, y, f"rank {rank}: piece{'s' * (kind == 'ring')} {held}{also}", 12))
        found.append(
            words(
                x,
                40 + 8 * cell + 18,
                "a row of squares: a piece that asks, and those it looks at",
                11,
                SOFT,
            )
        )
    return drawing(wide, 40 + 8 * cell + 34, "The cut of a sequence over four context ranks", found)


def dispatch() -> str:
    """Where tokens of 4 ranks go, as the first router of tiny-moe says of their embeddings, with the first weights."""
    model = PRESETS["tiny-moe"]
    layout = Layout.parse("fsdp=4,ep=4")
    network = build(model, device="cpu", dtype=torch.float64, compute=torch.float64)
    initialise(network, model, 0)
    gate = next(part for part in network.modules() if isinstance(part, MixtureOfExperts)).gate
    ranks, tokens = expert_ranks(layout).size, 6
    text = b"Many fish that move as one: shoal"[: ranks * tokens]
    embedded = network.get_submodule("model.embed_tokens")
    with torch.no_grad():
        hidden = embedded(torch.tensor([list(text)]))
        chosen = gate(torch.nn.functional.normalize(hidden, dim=-1) * model.hidden**0.5).chosen.view(
            len(text), -1
        )
    assert model.experts is not None
    many = model.experts.count // ranks
    wide, cell, row = 1000, 22, 74
    arrived: dict[int, list[int]] = {}
    found: Parts = [
        words(
            20, 24, "each rank's tokens: its router sends each to two experts", 13, INK, ' font-weight="600"'
        ),
        words(610, 24, "where they are computed: two experts on each rank", 13, INK, ' font-weight="600"'),
    ]
    above: Parts = []
    for token, experts in enumerate(chosen.tolist()):
        rank = token // tokens
        x, y = 80 + token % tokens * (cell + 3), 44 + rank * row
        above.append(box(x, y, cell, cell, RANKS[rank]))
        above.append(middle(x + cell / 2, y + 15, chr(text[token])))
        for expert in experts:
            place = arrived.setdefault(expert, [])
            to_x = 610 + len(place) * 17
            to_y = 36 + expert // many * row + expert % many * 26
            place.append(token)
            above += [
                box(to_x, to_y, 15, 18, RANKS[rank]),
                middle(to_x + 7.5, to_y + 13, chr(text[token]), 10),
            ]
            found.append(
                f'<path d="M{x + cell / 2:.1f} {y + cell}C{x + 120:.1f} {y + 60} 420 {to_y + 9} 540 {to_y + 9}" '
                f'fill="none" stroke="{RANKS[rank]}" stroke-opacity=".35"/>'
            )
    for rank in range(ranks):
        above.append(words(20, 60 + rank * row, f"rank {rank}", 12, SOFT))
        for number in range(many):
            expert = rank * many + number
            above.append(words(546, 50 + rank * row + number * 26, f"expert {expert}", 12, SOFT))
        above.append(words(930, 63 + rank * row, f"on rank {rank}", 12, SOFT))
    bottom = 44 + ranks * row
    told = (
        "A square is a token, and its colour the rank that it came from. None is dropped and none is padding: "
        "an expert computes as many as its router sent, or none."
    )
    above.append(words(20, bottom + 4, told, 12, SOFT))
    return drawing(
        wide, bottom + 18, "Tokens of four ranks on their way to the ranks of their experts", [*found, *above]
    )


PICTURES: dict[str, Callable[[], str]] = {
    one.__name__: one for one in (schedules, ledger, shards, ring, sequence, dispatch)
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
