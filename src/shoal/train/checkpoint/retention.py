"""Which checkpoints can be resumed from, and which to delete. Needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.storage import CheckpointStorage, check_file, manifest_of


def newest_first(places: Sequence[CheckpointStorage]) -> list[tuple[CheckpointStorage, int]]:
    """Every checkpoint of these places. For the same step, the place listed first comes first."""
    found: dict[int, CheckpointStorage] = {}
    for place in places:
        for step in place.committed():
            found.setdefault(step, place)
    return [(found[step], step) for step in sorted(found, reverse=True)]


def whole(place: CheckpointStorage) -> list[int]:
    """Steps of all checkpoints that have every file at full length. Does not read contents."""
    found = []
    for step in place.committed():
        with contextlib.suppress(Damaged):
            for file, size in manifest_of(place, step).file_sizes().items():
                check_file(place, step, file, size)
            found.append(step)
    return found


class Keeper:
    """Removes old checkpoints: all but the last ``keep``, every ``every``-th step's, and the ``best`` by evaluation."""

    def __init__(self, place: CheckpointStorage, keep: int, every: int = 0, best: int = 0) -> None:
        self.place, self.keep, self.every, self.best = place, keep, every, best
        self._heldout: dict[int, float | None] = {}

    def tidy(self) -> None:
        steps = self.place.committed()
        losses = {step: loss for step in steps if (loss := self._loss(step)) is not None} if self.best else {}
        for step in doomed(steps, losses, self.keep, self.every, self.best):
            self.place.remove(step)

    def _loss(self, step: int) -> float | None:
        if step not in self._heldout:
            try:
                manifest = manifest_of(self.place, step)
                self._heldout[step] = manifest.heldout_loss
            except Damaged:
                self._heldout[step] = None
        return self._heldout[step]


def doomed(steps: Sequence[int], losses: Mapping[int, float], keep: int, every: int, best: int) -> list[int]:
    """Steps whose checkpoints are no longer kept. ``losses``: held-out losses of evaluated steps."""
    kept = set(steps[-keep:])
    kept.update(step for step in steps if every and step % every == 0)
    kept.update(sorted(losses, key=lambda step: (losses[step], step))[:best])
    return [step for step in steps if step not in kept]
