"""Published runs as workloads: the rows of a table, each with its measurements.

Columns are those of Shoal's collection: shape, cluster, layout, precision. A blank cell is unknown, and the planner
makes its own choice there.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from shoal.facts.cluster import notation, stack
from shoal.facts.cluster.datasheets import EFA_100
from shoal.facts.cluster.stack import Stack
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout, divisors
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput, Problem, shorten
from shoal.facts.recipe import Recipe
from shoal.predict.workload import Workload

LARGEST = 1 << 26
MOST = 10**12  # upper limit for any count in a cell
MOST_CHUNKS = 8  # per rank, if a row does not say
MAY_BE_ZERO = ("zero", "sp")
BEYOND = "beyond the last column"
NEEDED = ("id", "source", "arch", "layers", "hidden", "heads", "ffn", "vocab", "seq", "gpu", "gpus", "step_s")

# Which software a source ran, by the prefix of its name; the first match counts.
SOURCES: tuple[tuple[tuple[str, ...], tuple[Stack, ...]], ...] = (
    (("shoal",), (stack.SHOAL,)),
    (("llm-foundry", "mosaic", "mpt"), (stack.FOUNDRY,)),
    (("vtrain", "korthikanti", "megatron-sc21", "narayanan"), (stack.MEGATRON,)),
    (("torchtitan",), (stack.TITAN, stack.TITAN_FUSED_NORMS, stack.TITAN_COMPILED)),
    (("deepspeed", "zero", "ulysses"), (stack.DEEPSPEED,)),
    (("accelerate", "transformers", "trl", "axolotl", "huggingface", "fsdp"), (stack.TRANSFORMERS,)),
)
# For software without a stack of its own here: what splits layers uses kernels like Megatron's; what only shards is a
# compiled network under FSDP.
MEGATRON_SOURCES = ("megatron", "nemo", "nvidia", "mcore")
SPLITS, SHARDS = (stack.MEGATRON_CORE,), (stack.TITAN_COMPILED, stack.TITAN)
# The network of a source's nodes per device kind, where it differs from the catalogue's. vTrain's had 800 Gb/s; that
# groups with several ranks per node got a quarter of it is what its rows show. torchtitan's A100s are assumed to be a
# cloud's, with 400 Gb/s: its notes do not say, and its three rows agree.
FABRICS: dict[tuple[str, str], dict[str, Any]] = {
    ("vtrain", "A100-80GB"): {"nics": 4, "across_rails": 0.25},
    ("torchtitan", "A100-80GB"): {"nics": 4, "network": EFA_100},
}


@dataclass(frozen=True)
class PublishedRun:
    """One row: the workloads it may stand for (one, if nothing is unknown) and its measurements."""

    id: str
    source: str
    workloads: tuple[Workload, ...]
    seconds: float | None  # None if it ran out of memory
    memory_gib: float | None
    memory_kind: str
    status: str


def read(path: Path) -> list[PublishedRun]:
    """Every row of a table; all errors in it are reported together."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_size > LARGEST:
                raise ValueError(f"it is longer than {LARGEST >> 20} MiB")
            rows = list(csv.DictReader(file, restkey=BEYOND, restval=""))
    except (OSError, ValueError, csv.Error) as error:
        raise BadInput(f"cannot read {path}: {error}", "a CSV table of published runs, in UTF-8") from None
    if not rows:
        raise BadInput(f"{path} has no rows", f"a CSV table with the columns {', '.join(NEEDED)}, …")
    missing = [column for column in NEEDED if column not in rows[0]]
    if missing:
        raise BadInput(f"{path}: no column {', '.join(missing)}", "the columns of Shoal's published_runs.csv")
    runs, problems = [], []
    for number, row in enumerate(rows, start=2):
        try:
            if BEYOND in row:
                raise ValueError("it has more cells than the table has columns")
            runs.append(_run(row))
        except (BadInput, ValueError, ArithmeticError) as error:
            what = (
                "; ".join(problem.what for problem in error.problems)
                if isinstance(error, BadInput)
                else error
            )
            problems.append(Problem(f"{path}, line {number} ({row.get('id')}): {what}", "correct the row"))
    if problems:
        raise BadInput(problems)
    return runs


def _run(row: dict[str, str]) -> PublishedRun:
    return PublishedRun(
        row["id"],
        row["source"].split(":")[0].strip(),
        tuple(_questions(row)),
        _decimal(row, "step_s"),
        _decimal(row, "mem_gib"),
        row.get("mem_kind", ""),
        row.get("status") or "ok",
    )


def _questions(row: dict[str, str]) -> Iterator[Workload]:
    for used in _stacks(row):
        yield from _of_stack(row, used)


def _of_stack(row: dict[str, str], used: Stack) -> Iterator[Workload]:
    model = _model(row)
    per_node = _whole(row, "gpus_per_node") or 8
    devices = _whole(row, "gpus") or 1
    per_node = min(per_node, devices)
    cluster = notation.find(f"{devices // per_node}x{per_node}x{row['gpu']}")
    maker = re.split(r"\W", row["source"].lower())[0]
    cluster = cluster.model_copy(update=FABRICS.get((maker, cluster.device.name), {}))
    batch = _whole(row, "global_batch") or 1
    precision = row.get("precision", "").split("-")[0] or "bf16"
    recipe = Recipe.model_validate(
        {
            "seq": _whole(row, "seq"),
            "batch": batch,
            "precision": precision,
            "reduce": "fp32" if used.sums_gradients or used.name.startswith("torchtitan") else "bf16",
            "dropout": 0.1 if used.dropout else 0.0,
        }
    )
    # Fully sharded stacks call it zero=2 when gathered parameters stay until their backward pass.
    stays = used.weights == "cast" and _whole(row, "zero") == 2
    tune = TuneSection(persist_below=10**15 if stays else 0, bucket_mb=used.bucket_mb)
    for layout in _layouts(row, model, batch):
        yield Workload(model, cluster, recipe, layout.replace(zero=3) if stays else layout, used, tune)


def _layouts(row: dict[str, str], model: Model, batch: int) -> Iterator[Layout]:
    """The layout of a row; several if a cell is blank."""
    data, zero = _whole(row, "dp") or 1, _whole(row, "zero") or 0
    pp = _whole(row, "pp") or 1
    micro, virtual = _whole(row, "micro_batch"), _whole(row, "virtual")
    share = max(1, batch // data)
    micros = [micro] if micro else [size for size in divisors(share) if size <= 16]
    per_stage = model.layers // pp
    chunks = [virtual] if virtual else _chunks(per_stage) if pp > 1 else [1]
    for each_micro, each_chunks in product(micros, chunks):
        degrees: dict[str, object] = {"dp": data} if zero == 0 else {"fsdp": data, "zero": zero}
        interleaved = {"schedule": "interleaved", "chunks": each_chunks} if each_chunks > 1 else {}
        yield Layout.model_validate(
            {
                **degrees,
                "tp": _whole(row, "tp") or 1,
                "sp": bool(_whole(row, "sp")),
                "cp": _whole(row, "cp") or 1,
                "pp": pp,
                **interleaved,
                "micro": each_micro,
                "recompute": row.get("recompute") or "none",
            }
        )


def _chunks(layers: int) -> list[int]:
    """Possible chunk counts of a rank with ``layers`` layers: up to eight; if none divides them, one per layer."""
    found = [each for each in divisors(layers) if each <= MOST_CHUNKS]
    return found if len(found) > 1 or layers == 1 else [1, layers]


def _model(row: dict[str, str]) -> Model:
    """A preset of exactly this shape, which also has what a table has no column for; otherwise as the columns say."""
    columns = {"layers": "layers", "hidden": "hidden", "heads": "heads", "ffn": "ffn", "vocab": "vocab"}
    shape = {name: _whole(row, column) or 0 for name, column in columns.items()}
    shape["kv_heads"] = _whole(row, "kv_heads") or shape["heads"]
    llama = row["arch"] != "gpt"
    for preset in PRESETS.values():
        if all(getattr(preset, name) == value for name, value in shape.items()) and preset.gated == llama:
            return preset
    name = f"{row['arch']} {shape['layers']}x{shape['hidden']}"
    seq = _whole(row, "seq") or 1
    if llama:
        head_dim = shape["hidden"] // shape["heads"]
        return Model(name=name, family="llama", head_dim=head_dim, max_positions=seq, **shape)
    return Model(
        name=name,
        family="gpt2",
        head_dim=shape["hidden"] // shape["heads"],
        max_positions=seq,
        norm="layer",
        activation="gelu",
        gated=False,
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        **shape,
    )


def _stacks(row: dict[str, str]) -> list[Stack]:
    """The software that a row may have run on, most likely first."""
    source = row["source"].lower()
    alone = all((_whole(row, axis) or 1) == 1 for axis in ("tp", "pp", "cp"))
    sharded = alone and (_whole(row, "zero") or 0) >= 2 and not source.startswith(MEGATRON_SOURCES)
    found = next(
        (stacks for names, stacks in SOURCES if source.startswith(names)), SHARDS if sharded else SPLITS
    )
    # torchtitan compiles only if configured to.
    compiles = (row.get("compile") or "").strip()
    if stack.TITAN in found and compiles in ("0", "1"):
        return [stack.TITAN_COMPILED if compiles == "1" else stack.TITAN]
    return [*found]


def _whole(row: dict[str, str], column: str) -> int | None:
    text = (row.get(column) or "").strip()
    number = int(text) if text else None
    if number is not None and not (column not in MAY_BE_ZERO) <= number <= MOST:
        raise ValueError(f"{column} is {shorten(text, 30)}")
    return number


def _decimal(row: dict[str, str], column: str) -> float | None:
    text = (row.get(column) or "").strip()
    number = float(text) if text else None
    if number is not None and not 0 < number <= MOST:
        raise ValueError(f"{column} is {text}")
    return number


# Sources whose rows the constants of ``facts/calibration/`` and ``facts/cluster/stack.py`` were fitted on, with the
# index of the first such row, in the order of the runs; from there every fifth.
FITTED = {"vtrain-single": 4, "vtrain-multi": 3, "llm-foundry": 3, "torchtitan": 3}


def fitted(runs: list[PublishedRun], first: dict[str, int] | None = None) -> set[str]:
    """Every fifth row of each source: those that constants are fitted on."""

    def order(run: PublishedRun) -> tuple[object, ...]:
        workload = run.workloads[0]
        layout, model = workload.layout, workload.model
        shape = (workload.cluster.device.name, model.hidden, layout.tp, workload.micro, layout.pp)
        return (*shape, workload.accumulation, model.layers, workload.recipe.seq, layout.world, run.id)

    chosen: set[str] = set()
    for source, start in (first or FITTED).items():
        ordered = sorted((run for run in runs if run.source == source and run.seconds), key=order)
        chosen.update(run.id for run in ordered[start::5])
    return chosen
