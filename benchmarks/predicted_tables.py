"""The tables of docs/accuracy.md about the rows that ``predicted.py`` measured: what was measured, what was predicted.

Times are predicted with ``data/calibration/H200.json``, which ``shoal profile --calibrate`` wrote on that machine
before the rows were measured. Only these tables use it: a calibration that stayed would change the rest of the page.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from predicted import ALONE, BLIND, FAMILIES, FRESH, SHARED, UNSEEN, Case, compiled

from shoal.facts.calibration import file
from shoal.facts.calibration.measurements import Measurements
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.layout.ranks import coordinates
from shoal.predict.memory import ledgers
from shoal.predict.memory.device import WORKSPACE
from shoal.predict.time.step import step
from shoal.predict.workload import Workload

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "predicted.jsonl"
CALIBRATIONS = HERE / "data" / "calibration"
DEVICE = "H200"
Kind = Literal["alone", "shared", "families", "fresh", "unseen"]
# Until then the engine widened every gradient, and added the chunks' gradients of the head's weight up afterwards; and
# steps were measured one by one. Such rows are held against the engine as it was.
LEANER_SINCE = "2026-11-17T23:00:00Z"
TWO_LOSS_KERNELS_UNTIL = "2026-11-19T05:45:00Z"
TWO_LOSS_KERNELS = replace(SHOAL, one_loss_kernel=False)
AS_IT_WAS = replace(TWO_LOSS_KERNELS, narrow_gradients=False, adds_products=False, issues_ahead=False)


class Pair(NamedTuple):
    """Something measured, and what was said of it."""

    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Errors(NamedTuple):
    """On average and at worst."""

    mean: float
    worst: float


# What is wanted.
PEAK = Errors(0.005, 0.015)
COMPILED_PEAK = Errors(0.01, 0.03)
STEP = Errors(0.05, 0.10)
# What the best open tool reports of peaks, on its own cases.
BEST_TOOL = Errors(0.0046, 0.0138)


@dataclass(frozen=True)
class Row:
    """A case as it was measured, beside its prediction."""

    case: Case
    workload: Workload
    peaks: list[Pair]  # bytes allocated, of every rank
    step: Pair | None  # seconds; None where ranks shared the GPU
    said: dict[str, Any] | None = None  # what was predicted before it was measured, where that was kept

    @property
    def worst_rank(self) -> int:
        return max(range(len(self.peaks)), key=lambda rank: abs(self.peaks[rank].error))


class Summary(NamedTuple):
    """How wrong many predictions are."""

    number: int
    mean: float
    worst: float
    bias: float


def summary(pairs: Iterable[Pair]) -> Summary:
    errors = [pair.error for pair in pairs]
    number, sizes = len(errors), [abs(error) for error in errors]
    return Summary(number, sum(sizes) / number, max(sizes), sum(errors) / number)


def measured() -> list[dict[str, Any]]:
    """The last row of each case."""
    seen: dict[str, dict[str, Any]] = {}
    for line in RESULTS.open(encoding="utf-8"):
        row = json.loads(line)
        if row["device"] == DEVICE:
            seen[_name(row)] = row
    return list(seen.values())


def rows(kind: Kind) -> list[Row]:
    """Measured rows of a kind beside their predictions, with the rates that are in use."""
    return [row_of(one) for one in measured() if _kind(one) == kind]


def _kind(row: dict[str, Any]) -> Kind:
    if "said" not in row:
        found: Kind = row["kind"]
        return found
    later: dict[Kind, tuple[Case, ...]] = {"fresh": FRESH, "unseen": UNSEEN}
    for kind, cases in later.items():
        if _name(row) in {_name(asdict(case)) for case in (*cases, *compiled(cases))}:
            return kind
    return "families"


def _name(case: dict[str, Any]) -> str:
    return json.dumps([case.get(field, False) for field in Case.__dataclass_fields__], sort_keys=True)


def row_of(found: dict[str, Any]) -> Row:
    case = Case(**{field: found[field] for field in Case.__dataclass_fields__ if field in found})
    ranks = found["ranks"]
    workload = case.workload(f"1x{len(ranks)}x{DEVICE}")
    if found["time"] < LEANER_SINCE:
        workload = replace(workload, stack=AS_IT_WAS)
    elif found["time"] < TWO_LOSS_KERNELS_UNTIL:
        workload = replace(workload, stack=TWO_LOSS_KERNELS)
    said = [one.peak_allocated for one in ledgers(workload)]
    stages = [coordinates(rank, workload.layout)["pp"] for rank in range(len(ranks))]
    peaks = [Pair(rank["peak"], said[stage]) for rank, stage in zip(ranks, stages, strict=True)]
    timed = Pair(ranks[0]["step_s"], step(workload).seconds) if len(ranks) == 1 else None
    return Row(case, workload, peaks, timed, found.get("said"))


@contextmanager
def calibrated() -> Iterator[Measurements]:
    """Predictions with what was measured on that machine; afterwards with built-in rates again."""
    warnings = file.use(CALIBRATIONS)
    if warnings:
        raise ValueError("; ".join(warnings))
    try:
        yield file.read(file.file_of(CALIBRATIONS, DEVICE)).measured
    finally:
        file.use(None)


def section() -> Iterator[str]:
    """Everything that the page says of them."""
    with calibrated() as calibration:
        alone, shared, families, fresh = rows("alone"), rows("shared"), rows("families"), rows("fresh")
        unseen = rows("unseen")
    yield from _circumstances(calibration)
    yield ""
    yield "### One rank"
    yield ""
    yield from _alone(alone)
    yield ""
    yield from _alone_summary(alone)
    yield ""
    yield "### Ranks that share the GPU"
    yield ""
    yield from _shared(shared)
    yield ""
    yield from _shared_summary(shared)
    yield ""
    yield "### Six families, eager and compiled"
    yield ""
    yield from prose(
        "No constant was fitted on these models. We chose and predicted the cases before we measured any of them:",
        f"*blind* is the error of that prediction (commit {_trees(families)}), *now* the error of today's, which knows",
        "them. In the row of 16,384 tokens, the engine kept a second copy of attention's result in every layer; it no",
        "longer does, and that row was not measured again.",
    )
    yield from _families(families)
    yield ""
    yield "### Other cases of the same families"
    yield ""
    yield from prose(
        "We then fixed the predictions: matmuls of compiled blocks are priced at the power limit, windows at flash's",
        "rate, fp32 at its own, compiled dropout by its hashes. The first row below showed one more error: steps are",
        "now priced as they are issued, one behind the other. We chose and predicted these cases after the fixes",
        f"(commits {_trees(fresh)}), before we measured any of them.",
    )
    yield from _families(fresh)
    yield ""
    if unseen:
        yield "### Other widths"
        yield ""
        yield from prose(
            "Nothing of these widths was measured before. The cases were chosen and predicted on a machine without a",
            f"GPU (commit {_trees(unseen)}).",
        )
        yield from _families(unseen)
        yield ""
    yield "### What was not measured"
    yield ""
    yield from _not_measured()


def prose(*parts: str) -> list[str]:
    text = " ".join(parts)
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 118, subsequent_indent=indent, break_on_hyphens=False)


def _circumstances(calibration: Measurements) -> Iterator[str]:
    found = measured()
    trees = ", ".join(sorted({f"`{row['commit']}`, torch {row['torch']}" for row in found}))
    products = sum(map(len, calibration.products.values()))
    yield from prose(
        f"`benchmarks/predicted.py` measured these rows on one H200 ({trees}; rows in `results/predicted.jsonl`). It",
        "runs training's own step on random tokens, and records peak allocated bytes of the third and fourth step and",
        "the median time of at least five steps after two seconds of warm-up. Blocks are eager unless a row says",
        "otherwise.",
    )
    yield ""
    yield from prose(
        "Times are predicted with `data/calibration/H200.json`. `shoal profile --calibrate` wrote it in",
        f"{calibration.seconds:.0f} s, two days earlier, on a machine of that kind and with an older engine's loss",
        "([what is in it](calibration.md)).",
    )
    yield ""
    yield from prose(
        f"No constant was fitted to these rows. Peaks come from shapes, and from {WORKSPACE // 2**20} MiB of cuBLAS",
        "workspaces, a size seen before. Times come from kernels that were timed one by one; their",
        f"{products} matmuls include those of these two models' layers.",
    )
    yield ""
    yield from prose(
        "For peaks, the table is a blind test. The engine of these rows keeps working copies of its weights and a loss",
        "without logits, and its memory was counted before the first row was measured. One thing was added since: what",
        "torch's allocator leaves with weights and states whose bytes are no whole MiB",
        "(`predict/memory/allocator_rounding.py`), which rows of GPT-2 XL showed. That term follows from the",
        "allocator's rules, fits nothing, and is almost zero for the shapes of this table.",
    )


def _alone(found: Sequence[Row]) -> Iterator[str]:
    yield (
        "| model | seq | micro | batch | recompute | precision | states | tied "
        "| peak GiB | predicted | error | step ms | predicted | error |"
    )
    yield "|" + "---|" * 14
    for row in found:
        workload, (peak,), timed = row.workload, row.peaks, row.step
        recipe, model = workload.recipe, workload.model
        assert timed is not None
        yield (
            f"| {_model(row)} | {recipe.seq} | {workload.micro} | {recipe.batch} | {workload.layout.recompute} "
            f"| {recipe.precision} | {recipe.states} | {'yes' if model.tied else 'no'} | {_memory(peak)} "
            f"| {timed.measured * 1e3:.1f} | {timed.predicted * 1e3:.1f} | {timed.error:+.1%} |"
        )


def _model(row: Row) -> str:
    """Its name, and what was changed of it that no column says."""
    layers = f", {row.workload.model.layers} layers" if "layers" in row.case.changes else ""
    untied = ", untied" if row.step is None and row.case.changes.get("tied") is False else ""
    return f"{row.case.model}{layers}{untied}"


def _memory(peak: Pair) -> str:
    return f"{peak.measured / 2**30:.2f} | {peak.predicted / 2**30:.2f} | {peak.error:+.2%}"


def _alone_summary(found: Sequence[Row]) -> Iterator[str]:
    yield from _summaries(
        (
            ("peak allocated", [row.peaks[0] for row in found], PEAK),
            ("step", [row.step for row in found if row.step], STEP),
        ),
    )
    yield ""
    yield from prose(
        f"The best open tool reports {BEST_TOOL.mean:.2%} and {BEST_TOOL.worst:.2%} for peaks, on its own cases.",
    )


def _trees(found: Sequence[Row]) -> str:
    return ", ".join(sorted({f"`{row.said['commit']}`" for row in found if row.said}))


def _families(found: Sequence[Row]) -> Iterator[str]:
    """What was said before it was measured, and what is said today."""
    yield ""
    yield (
        "| model | seq | micro | batch | recompute | precision | states | blocks "
        "| peak GiB | blind | now | step ms | blind | now |"
    )
    yield "|" + "---|" * 14
    blind: dict[str, list[Pair]] = {}
    now: dict[str, list[Pair]] = {}
    for row in found:
        assert row.step is not None and row.said is not None
        workload, recipe = row.workload, row.workload.recipe
        blocks = "compiled" if row.case.compiled else "eager"
        before = Pair(row.peaks[0].measured, row.said["peak"]), Pair(row.step.measured, row.said["step_s"])
        for name, one, other in (("peak", before[0], row.peaks[0]), ("step", before[1], row.step)):
            blind.setdefault(f"{name}, {blocks}", []).append(one)
            now.setdefault(f"{name}, {blocks}", []).append(other)
        precision = f"{recipe.precision}, dropout" if recipe.dropout else recipe.precision
        yield (
            f"| {_model(row)} | {recipe.seq} | {workload.micro} | {recipe.batch} | {workload.layout.recompute} "
            f"| {precision} | {recipe.states} | {blocks} | {before[0].measured / 2**30:.2f} "
            f"| {before[0].error:+.2%} | {row.peaks[0].error:+.2%} | {before[1].measured * 1e3:.1f} "
            f"| {before[1].error:+.1%} | {row.step.error:+.1%} |"
        )
    yield ""
    wanted = {"peak, eager": PEAK, "peak, compiled": COMPILED_PEAK}
    yield from _summaries(
        (f"{name}, {when}", pairs, wanted.get(name, STEP))
        for when, table in (("blind", blind), ("now", now))
        for name, pairs in table.items()
    )


def _summaries(lines: Iterable[tuple[str, Sequence[Pair], Errors]]) -> Iterator[str]:
    yield "| | number | mean error | target | worst | target | bias |"
    yield "|" + "---|" * 7
    for name, pairs, wanted in lines:
        found = summary(pairs)
        yield (
            f"| {name} | {found.number} | {found.mean:.2%} | {wanted.mean:.1%} | {found.worst:.2%} "
            f"| {wanted.worst:.1%} | {found.bias:+.2%} |"
        )


def _shared(found: Sequence[Row]) -> Iterator[str]:
    yield from prose(
        "Two or four NCCL ranks share the GPU, which is valid for memory but not for time. The table shows each",
        "layout's rank with the largest error.",
    )
    yield ""
    yield "| model | seq | batch | layout | states | ranks | rank | peak GiB | predicted | error |"
    yield "|" + "---|" * 10
    for row in found:
        recipe, rank = row.workload.recipe, row.worst_rank
        yield (
            f"| {_model(row)} | {recipe.seq} | {recipe.batch} | {row.case.layout} | {recipe.states} "
            f"| {len(row.peaks)} | {rank} | {_memory(row.peaks[rank])} |"
        )


def _shared_summary(found: Sequence[Row]) -> Iterator[str]:
    yield from _summaries(
        [("peak allocated, all ranks", [peak for row in found for peak in row.peaks], PEAK)]
    )


def _not_measured() -> Iterator[str]:
    rows_there = measured()
    have = {_name(row) for row in rows_there}
    models = ", ".join(sorted({row["model"] for row in rows_there}))
    both = (*FAMILIES, *FRESH, *UNSEEN)
    listed_cases = (*ALONE, *SHARED, *BLIND, *both, *compiled(both))
    missing = [case for case in listed_cases if _name(asdict(case)) not in have]
    yield from prose(
        "- **Several GPUs.** All ranks of a layout shared one GPU, so neither the time of a layout with more than one",
        "rank nor a real link was measured.",
    )
    yield from prose(
        "- **Real data.** Batches were on the device before the step. No row has padding or packed documents, or any",
        f"model but {models}.",
    )
    if missing:
        yield "- **Cases without a row** that `benchmarks/predicted.py` lists:"
        yield from (f"    - {_words(case)}" for case in missing)


def _words(case: Case) -> str:
    said = [f"{name}={value}" for name, value in (*case.recipe.items(), *case.changes.items())]
    said += ["compiled"] if case.compiled else []
    return f"{case.model} `{' '.join((case.layout, f'seq={case.seq}', f'batch={case.batch}', *said))}`"


def dryruns(found: Iterable[Row]) -> Iterator[str]:
    """The peak of rank 0 as its dry run has it, about ten seconds a row, between what was measured and predicted."""
    # Only here: the page needs nothing of it.
    from shoal.prove.dryrun import dryrun

    yield "| model | layout | rank 0 GiB | dry run | error | predicted | error |"
    yield "|" + "---|" * 7
    for row in found:
        peak = row.peaks[0]
        held = Pair(peak.measured, dryrun(row.workload, 0).memory.peak_allocated)
        yield (
            f"| {row.case.model} | {row.case.layout} | {_memory(held)} | {peak.predicted / 2**30:.2f} "
            f"| {peak.error:+.2%} |"
        )
