"""Shoal: the loop of `shoal train` with its meter, guards and defaults, given its batches when it is its turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext

from shoal.launch.manifest import describe_plan
from shoal.observe.flight_recorder import FlightRecorder
from shoal.observe.record import recording
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup
from shoal.train.data.loader import Batch, Loader
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory


def train(setup: PeerSetup, journal: Journal) -> None:
    job, mesh = setup.job, setup.mesh
    run = RunDirectory(setup.directory / "run")
    if mesh.rank == 0:
        run.path.mkdir(mode=0o700)
        run.write_start(job, {}, describe_plan(job))
    mesh.hosts.wait_for_first_rank()
    # A rank of a real run also records its collectives, so that the launcher can see which rank waits for which.
    with (
        FlightRecorder(run.flight(mesh.rank)) as flight,
        recording(flight, mesh.names) if job.config.fault.stall else nullcontext(),
    ):
        training = Training(job, run, setup.dataset, mesh, flight.enter)
        training.loader = PacedLoader(training.loader, journal)

        def losses() -> list[float]:
            training.settle()
            if not training.first_rank:
                return []
            training.metrics.sync()
            return [row["loss"] for row in read_rows(run.metrics)]

        journal.read_losses = losses
        training.run_to_end(bool)


class PacedLoader(Loader):
    """A run's own loader, read at the journal's pace."""

    def __init__(self, loader: Loader, journal: Journal) -> None:
        super().__init__(loader.samples, loader.order, loader.clock, loader.heldout, loader.validation)
        self._journal = journal

    def steps(
        self, first: int, last: int, positions: Callable[[int], Sequence[Sequence[int]]]
    ) -> Generator[tuple[int, list[Batch]]]:
        with closing(super().steps(first, last, positions)) as source:
            yield from self._journal.paced(source)
