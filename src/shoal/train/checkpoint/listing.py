"""List a run's checkpoints, on disk, in memory and set aside, and verify every byte.

Needs no torch, except to verify.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.facts.model import Model
from shoal.facts.problem import BadInput, closest
from shoal.train.checkpoint.manifest import NAME, Damaged, Manifest, check_agrees
from shoal.train.checkpoint.storage import (
    DAMAGED,
    REASON,
    CheckpointStorage,
    DirectoryStorage,
    check_file,
    manifest_of,
    step_of,
)
from shoal.train.run_directory import UNKNOWN, RunDirectory

DISK, MEMORY, ASIDE = "disk", "memory", "set aside"
# A reason should be one line, but a file of that name may hold anything.
LONGEST_REASON = 1000


@dataclass(frozen=True)
class ListedCheckpoint:
    """An existing checkpoint, as its manifest describes it."""

    place: CheckpointStorage
    step: int
    where: str  # DISK, MEMORY or ASIDE
    manifest: Manifest | None  # None: unreadable
    of_run: Model | None  # the model of the run that it is in, if known
    damage: str = ""  # known damage, found without reading its tensors
    continued: bool = False  # the run would resume from this one

    @property
    def name(self) -> str:
        return self.place.name(self.step)

    @property
    def written(self) -> float | None:
        """When it was written, in seconds since 1970; None if the place does not say."""
        if not isinstance(self.place, DirectoryStorage):
            return None
        try:
            return (self.place.at(self.step) / NAME).lstat().st_mtime
        except OSError:
            return None


@dataclass(frozen=True)
class CheckpointVerdict:
    """The result of reading every byte of a checkpoint."""

    found: ListedCheckpoint
    bytes: int
    seconds: float
    damages: tuple[str, ...]


class _One(DirectoryStorage):
    """A directory that holds one checkpoint, under any name."""

    def at(self, step: int) -> Path:
        return self.path


def list_checkpoints(path: Path) -> list[ListedCheckpoint]:
    """Every checkpoint of a run, oldest first; or only the given one, if ``path`` is a checkpoint."""
    step = step_of(path.name)
    if path.is_dir() and step is not None:
        return [_look(DirectoryStorage(path.parent), step, DISK, _run_around(path).model())]
    if path.is_dir() and (step := _step_aside(path)) is not None:
        return [_look_aside(path, step, _run_around(path).model())]
    return _continued(list(_of_run(_run(path))))


def newest_sound(path: Path) -> ListedCheckpoint:
    """The given checkpoint, or the one that the run would resume from."""
    found = list_checkpoints(path)
    sound = [one for one in found if one.continued or (len(found) == 1 and not one.damage)]
    if sound:
        return sound[0]
    if not found:
        raise BadInput(
            f"{path} has no checkpoint yet", "train on: a checkpoint is written every checkpoint.every steps"
        )
    raise BadInput(
        f"{path} has no sound checkpoint: {found[-1].damage}", "shoal checkpoint verify names all damage"
    )


def run_of(path: Path) -> Path | None:
    """The directory of the run, or of the run that a checkpoint is in; None if there is none."""
    for folder in (path, path.absolute().parent, path.absolute().parent.parent):
        if (folder / "config.toml").is_file():
            return folder
    return None


def verify(found: ListedCheckpoint) -> CheckpointVerdict:
    """Read and check every byte."""
    # Plain listing should not wait for torch.
    from shoal.train.checkpoint.read import Checkpoint

    began = time.perf_counter()
    try:
        checkpoint = Checkpoint(found.place, found.step)
        check_agrees(checkpoint.manifest, found.name, found.of_run)
        damages, size = checkpoint.damages(), checkpoint.manifest.bytes
    except Damaged as error:
        damages, size = [error], 0
    return CheckpointVerdict(found, size, time.perf_counter() - began, tuple(map(str, damages)))


def _run_around(checkpoint: Path) -> RunDirectory:
    """Where the run would be if this directory were one of its checkpoints."""
    return RunDirectory(checkpoint.absolute().parent.parent)


def _run(path: Path) -> RunDirectory:
    """The run at a path: the run's directory, or its directory of checkpoints."""
    signs = (path / "config.toml", path / "checkpoints")
    if path.is_dir() and any(sign.exists() for sign in signs):
        return RunDirectory(path)
    if path.is_dir() and (path.name == "checkpoints" or any(map(_is_checkpoint, path.iterdir()))):
        run = RunDirectory(path.parent)
        # Checkpoints copied elsewhere have no run around them, and these are the ones meant.
        run.checkpoints = path
        run.keep_in(None)
        return run
    near = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
    meant = closest(path.name, near)
    raise BadInput(
        f"{path} is no run and no checkpoint" if path.exists() else f"{path} does not exist",
        f"did you mean {path.parent / meant}?"
        if meant and not path.exists()
        else "name a run's directory (runs/NAME), its checkpoints directory, or one step-… in that",
    )


def _is_checkpoint(path: Path) -> bool:
    return step_of(path.name) is not None or _step_aside(path) is not None


def _step_aside(path: Path) -> int | None:
    """The step in damaged-step-00000007, or in damaged-step-00000007.1, the second of that name."""
    name = path.name.removeprefix(DAMAGED)
    return step_of(name.partition(".")[0]) if name != path.name else None


def _of_run(run: RunDirectory) -> Iterator[ListedCheckpoint]:
    of_run = run.model()
    places: list[tuple[CheckpointStorage, str]] = [(run.disk, DISK)]
    if run.id != UNKNOWN:
        places.append((run.memory(), MEMORY))
    for place, where in places:
        for step in place.committed():
            found = _look(place, step, where, of_run)
            # A live run may have removed it meanwhile.
            if not found.damage or step in place.committed():
                yield found
    if run.checkpoints.is_dir():
        for entry in sorted(run.checkpoints.iterdir()):
            aside = _step_aside(entry)
            if aside is not None and entry.is_dir():
                yield _look_aside(entry, aside, of_run)


def _look_aside(path: Path, step: int, of_run: Model | None) -> ListedCheckpoint:
    found = _look(_One(path), step, ASIDE, of_run)
    try:
        with (path / REASON).open(encoding="utf-8", errors="replace") as file:
            reason = file.read(LONGEST_REASON).strip()
    except OSError:
        reason = ""
    return replace(found, damage=reason or found.damage or "no reason was noted")


def _look(place: CheckpointStorage, step: int, where: str, of_run: Model | None) -> ListedCheckpoint:
    """Check its manifest and the sizes of its files."""
    name = place.name(step)
    manifest = None
    try:
        manifest = manifest_of(place, step)
        if manifest.step != step:
            raise Damaged(f"{name} is the checkpoint of step {manifest.step}")
        check_agrees(manifest, name, of_run)
        for file, size in manifest.file_sizes().items():
            check_file(place, step, file, size)
    except Damaged as error:
        return ListedCheckpoint(place, step, where, manifest, of_run, str(error))
    return ListedCheckpoint(place, step, where, manifest, of_run)


def _continued(found: list[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """All of these in order, with the one marked that a run would resume from: the newest without known damage."""
    sound = [one for one in found if not one.damage]
    # For the same step the one in memory wins, as in ``keep.newest_first``.
    newest = max(sound, key=lambda one: (one.step, one.where == MEMORY), default=None)
    marked = [replace(one, continued=one is newest) for one in found]
    return sorted(marked, key=lambda one: (one.step, one.where))
