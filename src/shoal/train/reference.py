"""The reference log-probabilities of answers under the initial weights, for losses that compare with them.

They are computed once, before the first step, and kept: eight bytes per row. A frozen copy of the network would give
the same numbers, but cost its parameters' memory on every rank and a third forward pass in every step, and predictions
of memory, traffic and time would have to model both. Computed by the network that is about to be trained, with its
initial weights, they are right in every layout, and a step costs nothing extra.

The run keeps them in its directory for resumes, and the data cache keeps them for other runs with the same initial
weights and data. An interrupted pass continues where it stopped. Only the first rank reads and writes; it broadcasts to
the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from shoal.facts.problem import BadInput
from shoal.facts.recipe import Recipe
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.plan.resolve import Job
from shoal.train.checkpoint.listing import newest_sound
from shoal.train.checkpoint.storage import step_name
from shoal.train.data.loader import validation_rows
from shoal.train.data.samples import AnySamples, JoinedSamples, PairSamples
from shoal.train.files import replace_bytes, replace_text
from shoal.train.fingerprint import weights_fingerprint
from shoal.train.step import micro_batch

FOLDER = "reference"
WEIGHTS = "weights"  # the file that names the initial weights
# Pipeline fills between two writes: an interrupted pass continues from the last write.
PASSES = 16
# What the numbers depend on besides weights and tokens; the layout matters only for rounding.
RECIPE = {"seq", "precision", "fp8", "states"}


@dataclass(frozen=True)
class ReferenceStore:
    """Where log-probabilities are kept: the run's directory, and a directory shared with other runs, if any."""

    run: Path
    shared: Path | None
    weights: str  # identity of the initial weights, for the shared directory

    @staticmethod
    def of(job: Job, run: Path) -> ReferenceStore:
        weights = weights_identity(job)
        shared = Path(job.config.data.cache).expanduser() / FOLDER if weights is not None else None
        return ReferenceStore(run / FOLDER, shared, weights or "")

    def read(self, samples: PairSamples, recipe: Recipe) -> np.ndarray:
        """All rows of these samples, NaN where unknown."""
        for path in self._paths(samples, recipe):
            found = _read(path, len(samples))
            if found is not None:
                return found
        return np.full(len(samples), math.nan)

    def check_weights(self) -> None:
        """Call before computing more: a run must compare with the same weights to its end."""
        try:
            then = (self.run / WEIGHTS).read_text(encoding="utf-8")
        except OSError:
            return
        if then != self.weights:
            raise BadInput(
                "model.init_from has other weights than when the run began, whose reference is not complete",
                "model.init_from = the checkpoint that it was then; or --fresh",
            )

    def write(self, samples: PairSamples, recipe: Recipe) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        replace_text(self.run / WEIGHTS, self.weights)
        for path in self._paths(samples, recipe):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = samples.reference.astype("<f8").tobytes()
            replace_bytes(path, blake3(content).digest() + content)

    def _paths(self, samples: PairSamples, recipe: Recipe) -> list[Path]:
        parts = [samples.stream.fingerprint, recipe.model_dump(mode="json", include=RECIPE)]
        found = [self.run / f"{_digest(parts)}.bin"]
        return (
            found if self.shared is None else [*found, self.shared / f"{_digest([*parts, self.weights])}.bin"]
        )


def weights_identity(job: Job) -> str | None:
    """The identity of the weights a run begins with; None if it is unknown."""
    origin, shape = job.config.model.init_from, job.model.model_dump(mode="json")
    if origin is None:
        return _digest(["hashed", job.config.recipe.seed, shape])
    checkpoints = Path(origin).expanduser() / "checkpoints"
    if checkpoints.is_dir():  # a run, which may have progressed since
        origin = str(checkpoints / step_name(newest_sound(checkpoints.parent).step))
    found = weights_fingerprint(origin)
    return None if found is None else _digest([found, shape])


class Reference:
    """The reference of some rows: what is known of it, and the rest once it is computed."""

    def __init__(
        self,
        wanted: Iterable[tuple[AnySamples, Sequence[int]]],
        recipe: Recipe,
        mesh: Mesh,
        store: ReferenceStore | None,
    ) -> None:
        """``wanted``: for each set of samples the indices that will be asked for, the same on all ranks."""
        self.recipe, self.mesh, self.store = recipe, mesh, store
        self._missing: list[tuple[PairSamples, np.ndarray]] = []
        for samples, numbers in _parts(wanted):
            if store is not None:
                known = store.read(samples, recipe) if mesh.rank == 0 else np.zeros(len(samples))
                samples.reference[:] = mesh.hosts.sum_floats(known.tolist())
            missing = numbers[np.isnan(samples.reference[numbers])]
            if len(missing):
                self._missing.append((samples, missing))

    @property
    def missing(self) -> int:
        """How many rows still have to be computed, with the initial weights in the network."""
        return sum(len(numbers) for _, numbers in self._missing)

    def compute(
        self, placed: Placed, micro: int, at_once: int, wants_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """``at_once`` micro-batches of ``micro`` rows fill a pipeline. All ranks run equally many.

        Returns whether it finished without being stopped.
        """
        block = PASSES * self.mesh.layout.data_ranks * micro * at_once
        for samples, numbers in self._missing:
            for first in range(0, len(numbers), block):
                (asking,) = self.mesh.hosts.sum_integers([int(wants_stop())])
                if asking:
                    return False
                some = numbers[first : first + block]
                samples.reference[some] = self._log_probabilities(placed, samples, some, micro, at_once)
                if self.store is not None and self.mesh.rank == 0:
                    self.store.write(samples, self.recipe)
        self._missing = []
        return True

    def _log_probabilities(
        self, placed: Placed, samples: PairSamples, numbers: np.ndarray, micro: int, at_once: int
    ) -> list[float]:
        mesh, index, ranks = self.mesh, self.mesh.data_index, self.mesh.layout.data_ranks
        places = np.arange(len(numbers) + -len(numbers) % (ranks * micro))
        mine = places.reshape(-1, ranks, micro)[:, index]  # this rank's rows of each pass
        found = np.zeros(len(places))
        # Of ranks that compute the same, only one contributes.
        speaks = mesh.coords["tp"] == 0 and mesh.coords["cp"] == 0
        for first in range(0, len(mine), at_once):
            groups = mine[first : first + at_once]
            rows = [
                [int(numbers[place]) if place < len(numbers) else len(samples) for place in group]
                for group in groups
            ]
            batches = [
                replace(micro_batch(validation_rows(samples, row).to(mesh.device)), reference=None)
                for row in rows
            ]
            for group, sums in zip(groups, placed.executor.forward_only(batches), strict=False):
                if speaks:
                    found[group] = sums.tolist()
        return mesh.hosts.sum_floats(found.tolist())[: len(numbers)]


def _parts(wanted: Iterable[tuple[AnySamples, Sequence[int]]]) -> Iterator[tuple[PairSamples, np.ndarray]]:
    """Each data set separately, with its own indices."""
    for samples, numbers in wanted:
        each, first = np.unique(np.asarray(numbers, dtype=np.int64)), 0
        for part in samples.parts if isinstance(samples, JoinedSamples) else [samples]:
            assert isinstance(part, PairSamples)
            yield part, each[(each >= first) & (each < first + len(part))] - first
            first += len(part)


def _read(path: Path, rows: int) -> np.ndarray | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    # Damaged files are computed again.
    if len(content) != 32 + 8 * rows or blake3(content[32:]).digest() != content[:32]:
        return None
    return np.frombuffer(content[32:], dtype="<f8").copy()


def _digest(parts: object) -> str:
    return blake3(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
