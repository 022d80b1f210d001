"""``shoal checkpoint``: list, verify and export checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from shoal.cli.show import print_columns, print_json

if TYPE_CHECKING:
    from shoal.train.checkpoint.listing import CheckpointVerdict, ListedCheckpoint

app = App(name="checkpoint", help="A run's checkpoints.", help_format="plaintext")


@app.command
def ls(path: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """List every checkpoint of a run: on disk, in memory, and those set aside as damaged.

    Example: shoal checkpoint ls runs/tiny

    Checks manifests and file sizes; shoal checkpoint verify reads every byte.

    Parameters
    ----------
    path
        A run's directory, its checkpoints directory, or one checkpoint.
    json
        Print one JSON document.
    """
    from shoal.train.checkpoint.listing import list_checkpoints

    found = list_checkpoints(path)
    if json:
        print_json({"path": str(path), "checkpoints": [_document(one) for one in found]})
        return 0
    if not found:
        print(f"{path} has no checkpoint yet")
        return 0
    head = (
        "step",
        "samples",
        "size",
        "tensors",
        "pieces",
        "files",
        "validation loss",
        "written",
        "where",
        "",
    )
    print_columns([head, *(_row(one) for one in found)])
    for one in found:
        if one.damage:
            print(f"{one.name}: {one.damage}")
    return 0


@app.command
def verify(path: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Read every byte of every checkpoint; exit 1 and name the damage if there is any.

    Example: shoal checkpoint verify runs/tiny/checkpoints/step-00000100

    Checkpoints that were set aside are known to be damaged and verified only when named.

    Parameters
    ----------
    path
        A run's directory, its checkpoints directory, or one checkpoint.
    json
        Print one JSON document.
    """
    from shoal.train.checkpoint.listing import ASIDE, list_checkpoints, verify

    found = list_checkpoints(path)
    verdicts: list[CheckpointVerdict] = []
    for one in found:
        if one.where != ASIDE or one.name == str(path):
            verdicts.append(verify(one))
            if not json:
                _print(verdicts[-1])
    damaged = sum(bool(verdict.damages) for verdict in verdicts)
    size, seconds = (sum(getattr(verdict, name) for verdict in verdicts) for name in ("bytes", "seconds"))
    if json:
        print_json(
            {
                "path": str(path),
                "sound": not damaged,
                "damaged": damaged,
                "bytes": size,
                "seconds": seconds,
                "gb_per_s": _rate(size, seconds),
                "checkpoints": [_judged(verdict) for verdict in verdicts],
            }
        )
        return int(damaged > 0)
    if not verdicts:
        print(f"{path} has no checkpoint to verify")
    else:
        state = f"{damaged} of {len(verdicts)} damaged" if damaged else f"{len(verdicts)} sound"
        print(f"{state}: {_size(size)} in {seconds:.1f} s, {_rate(size, seconds):.2f} GB/s")
    return int(damaged > 0)


@app.command
def export(
    path: Path,
    directory: Path,
    /,
    *,
    to: Literal["hf", "peft"] = "hf",
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None,
    tokenizer: str | None = None,
    shard_gb: Annotated[float, Parameter(validator=Number(gt=0, lte=1e6))] = 5.0,
    ema: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a checkpoint as a Hugging Face model directory, which transformers, vLLM and TGI load.

    Example: shoal checkpoint export runs/tiny --to hf tiny-hf --dtype bf16

    Weights in safetensors, config.json, generation_config.json, the tokenizer and its chat template. Every byte is
    checked as it is read; tensors are written one by one, so it takes little memory. The directory appears once it
    is complete.

    Parameters
    ----------
    path
        A run's directory (its newest sound checkpoint is taken), or one checkpoint.
    directory
        The directory to write; it must not exist yet, or be empty.
    to
        The format: hf (of a run that trained adapters, with these merged into the weights), or peft: the adapters
        alone.
    dtype
        Precision of the weights; by default as the run keeps them (recipe.states).
    tokenizer
        A tokenizer.json, or bytes; by default the run's own.
    shard_gb
        Maximum size of a weight file, in gigabytes.
    ema
        Write the average of the weights that recipe.ema keeps.
    json
        Print one JSON document.
    """
    from dataclasses import replace

    from shoal.cli.main import fail
    from shoal.facts.problem import Problem
    from shoal.launch.report import FAILED
    from shoal.train.checkpoint.listing import newest_sound, run_of
    from shoal.train.checkpoint.manifest import Damaged
    from shoal.train.huggingface.side_files import origin_of

    found = newest_sound(path)
    assert found.manifest is not None
    origin = origin_of(found.manifest, run_of(path))
    if tokenizer is not None:
        origin = replace(origin, tokenizer=tokenizer)
    from shoal.train.huggingface import export as files  # torch: after everything that does not need it

    try:
        if to == "peft":
            done = files.export_adapters(found, directory, origin, dtype, ema)
        else:
            done = files.export(found, directory, origin, dtype, int(shard_gb * 1e9), ema)
    except Damaged as error:
        fix = (
            "nothing was written; shoal checkpoint verify names all damage, an older checkpoint may be sound"
        )
        return fail([Problem(str(error), fix)], FAILED, json)
    if json:
        print_json({**vars(done), "path": str(done.path), "checkpoint": found.name})
    else:
        held = f"{done.tensors} tensors of {done.dtype} in {done.files} file{'s' * (done.files > 1)}"
        print(f"{done.path}: step {done.step}, {held}, {_size(done.bytes)}")
    return 0


@app.command(name="import")
def import_model(
    model: str, directory: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """Write a Hugging Face model directory as a checkpoint, with a hash of every byte.

    Example: shoal checkpoint import models/Llama-3.2-1B base

    model.init_from, generate, evaluate and export take it as they take a run; shoal checkpoint verify reads every byte
    again. A run needs no import: model.init_from takes the model directory itself.

    Parameters
    ----------
    model
        A directory with config.json and safetensors, or a name of the Hub.
    directory
        The directory to write, with checkpoints/step-00000000 in it; it must not exist yet, or be empty.
    json
        Print one JSON document.
    """
    from shoal.train.huggingface.import_weights import import_weights

    done = import_weights(model, directory)
    if json:
        print_json({**vars(done), "path": str(done.path)})
    else:
        print(f"{done.path}: {done.model}, {done.tensors} tensors, {_size(done.bytes)}")
    return 0


def _row(found: ListedCheckpoint) -> tuple[str, ...]:
    manifest = found.manifest
    facts: tuple[str, ...] = ("?",) * 6
    if manifest is not None:
        loss = "" if manifest.heldout_loss is None else f"{manifest.heldout_loss:.4f}"
        counts = (len(manifest.shapes), manifest.count, len(manifest.file_sizes()))
        facts = (f"{manifest.samples:,}", _size(manifest.bytes), *map(str, counts), loss)
    note = "damaged" if found.damage else "resumes here" if found.continued else ""
    return (str(found.step), *facts, _time(found.written, "%Y-%m-%d %H:%M:%S"), found.where, note)


def _document(found: ListedCheckpoint) -> dict[str, Any]:
    manifest = found.manifest
    facts = (
        {}
        if manifest is None
        else {
            "samples": manifest.samples,
            "bytes": manifest.bytes,
            "tensors": len(manifest.shapes),
            "pieces": manifest.count,
            "files": len(manifest.file_sizes()),
            "heldout_loss": manifest.heldout_loss,
        }
    )
    return {
        "path": found.name,
        "where": found.where,
        "step": found.step,
        **facts,
        "written": _time(found.written, "%Y-%m-%dT%H:%M:%S%z") or None,
        "continued": found.continued,
        "damage": found.damage or None,
    }


def _judged(verdict: CheckpointVerdict) -> dict[str, Any]:
    return {
        "path": verdict.found.name,
        "where": verdict.found.where,
        "step": verdict.found.step,
        "sound": not verdict.damages,
        "bytes": verdict.bytes,
        "seconds": verdict.seconds,
        "gb_per_s": _rate(verdict.bytes, verdict.seconds),
        "damages": list(verdict.damages),
    }


def _print(verdict: CheckpointVerdict) -> None:
    rate = f"{_size(verdict.bytes)}, {_rate(verdict.bytes, verdict.seconds):.2f} GB/s"
    print(f"{'damaged' if verdict.damages else 'sound':<8} {verdict.found.name}: {rate}", flush=True)
    for damage in verdict.damages:
        print(f"         {damage}")


def _rate(size: float, seconds: float) -> float:
    return size / seconds / 1e9 if seconds else 0.0


def _size(count: float) -> str:
    unit, name = next(
        ((unit, name) for unit, name in ((1e12, "TB"), (1e9, "GB")) if count >= unit), (1e6, "MB")
    )
    return f"{count / unit:.2f} {name}"


def _time(seconds: float | None, shape: str) -> str:
    from datetime import datetime

    return "" if seconds is None else datetime.fromtimestamp(seconds).astimezone().strftime(shape)
