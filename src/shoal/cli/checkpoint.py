"""``shoal checkpoint``: list and verify checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

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


def _row(found: ListedCheckpoint) -> tuple[str, ...]:
    manifest = found.manifest
    facts: tuple[str, ...] = ("?",) * 6
    if manifest is not None:
        loss = "" if manifest.heldout_loss is None else f"{manifest.heldout_loss:.4f}"
        counts = (len(manifest.shapes), len(manifest.pieces), len(manifest.file_sizes()))
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
            "pieces": len(manifest.pieces),
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
