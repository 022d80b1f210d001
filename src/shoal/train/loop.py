"""The training loop of one rank: from a job to a finished run, or to a commit where it was asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.models.decoder import Network, build
from shoal.models.huggingface import WeightFiles, from_tensors
from shoal.models.initial import initialise
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.train import optimizer as optimizers
from shoal.train.checkpoint.directory import latest, step_directory, tidy
from shoal.train.data.dataset import Dataset
from shoal.train.data.loader import Batch, Loader
from shoal.train.data.samples import cut_samples
from shoal.train.data.tokenizers import Tokenizer, open_tokenizer
from shoal.train.evaluate import heldout_loss, write_samples
from shoal.train.guard.nonfinite import NonFiniteGuard
from shoal.train.metrics.measure import Meter, finite
from shoal.train.metrics.rows import StepFile
from shoal.train.precision import compute_dtype, parameter_dtype, reduce_dtype
from shoal.train.rundir import RunDirectory, identity
from shoal.train.state import State
from shoal.train.step import Step

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Outcome:
    """How a rank's work ended."""

    stopped: bool  # on request, before the last step
    step: int  # the last one done


def train(job: Job, run: RunDirectory, dataset: Path, mesh: Mesh, wants_stop: Callable[[], bool]) -> Outcome:
    """Train from the run's last commit, or from the start, to the last step of the recipe."""
    return Training(job, run, dataset, mesh).run_to_end(wants_stop)


class Training:
    """One rank's part of a run: built from the job, then stepped to the end."""

    def __init__(self, job: Job, run: RunDirectory, dataset: Path, mesh: Mesh) -> None:
        config, recipe = job.config, job.config.recipe
        self.job, self.run, self.mesh = job, run, mesh
        self.first_rank = mesh.rank == 0

        data = Dataset.open(dataset)
        self.identity = identity(job, data.fingerprint)
        self.tokenizer: Tokenizer = open_tokenizer(config.data.tokenizer, config.data.end_token)
        samples, heldout = cut_samples(data, config.data, recipe.seq, self.tokenizer.end)
        self.loader = Loader(samples, recipe.seed, recipe.batch, heldout)
        self.micro = job.layout.micro_batch(recipe.batch)

        network = build(
            job.model, recipe.dropout, compute_dtype(recipe), dtype=parameter_dtype(recipe), length=recipe.seq
        )
        checkpoint = latest(run.checkpoints)
        # Where a checkpoint is about to give the weights, their first values need not be known.
        first_weights = self._first_weights if checkpoint is None else _leave
        placed = apply(network, mesh, config.tune, first_weights, reduce_dtype(recipe))
        self.network = placed.network
        optimizer = optimizers.build(self.network, recipe)
        scale = optimizers.LossScale.for_precision(recipe.precision)
        self.step = Step(placed, optimizer, recipe, mesh, scale)
        self.state = State(job.model, self.network, optimizer, recipe.optimizer, scale)
        self.guard = NonFiniteGuard(config.fault.nonfinite, scale.enabled)

        self.done = self.state.restore(checkpoint) if checkpoint else 0
        self.meter = Meter(job, mesh)
        if self.first_rank:
            tidy(run.checkpoints, config.checkpoint.keep)
            self.metrics = StepFile(run.metrics, self.done)
            self.samples = StepFile(run.samples, self.done)

    def run_to_end(self, wants_stop: Callable[[], bool]) -> Outcome:
        stopped = False
        steps = self.loader.steps(self.done + 1, self.job.config.recipe.steps, self._my_positions())
        with closing(steps):
            self.meter.start()
            for step, micro_batches in steps:
                # One small sum tells every rank how many targets the step has and whether anybody asks to stop.
                count = sum(batch.count for batch in micro_batches)
                targets, asking = self.mesh.sum_integers([count, int(wants_stop())])
                if asking:
                    stopped = True
                    break
                self.meter.have_input()
                self._one_step(step, micro_batches, targets)
                self.meter.start()
        if stopped and self.done:
            self._commit()
        if self.first_rank:
            self.metrics.sync()
        return Outcome(stopped, self.done)

    def _first_weights(self, network: Network) -> None:
        origin = self.job.config.model.init_from
        if origin is None:
            initialise(network, self.job.model, self.job.config.recipe.seed)
        else:
            weights = WeightFiles(Path(origin).expanduser(), self.job.model)
            from_tensors(self.job.model, weights.read, dict(network.named_parameters()))

    def _my_positions(self) -> list[range]:
        """This rank's places in the global batch, one range a micro-batch."""
        share = self.job.config.recipe.batch // self.job.layout.data_ranks
        first = self.mesh.data_index * share
        return [range(start, start + self.micro) for start in range(first, first + share, self.micro)]

    def _one_step(self, step: int, micro_batches: list[Batch], targets: int) -> None:
        config = self.job.config
        last = step == config.recipe.steps
        batches = [batch.to(self.mesh.device) for batch in micro_batches]
        attempt = partial(self.step, step, batches, targets)
        result = self.guard.judge(step, attempt(), attempt)
        self.meter.stop()
        self.done = step

        if not result.updated and not self.guard.scaled and self.first_rank:
            self.run.note_fault(kind="nonfinite", step=step, action="update skipped")
        row = self.meter.row(step, result, targets)
        if last or _due(step, config.evaluate.every):
            row["heldout_loss"] = finite(self._evaluate())
        if self.first_rank:
            self.metrics.append(row)
        if _due(step, config.checkpoint.every) or (last and config.checkpoint.every):
            self._commit()

    def _evaluate(self) -> float | None:
        evaluate, recipe = self.job.config.evaluate, self.job.config.recipe
        if self.loader.heldout is None:
            return None
        loss = heldout_loss(self.network, self.loader, self.mesh, evaluate.batches * recipe.batch, self.micro)
        if self.first_rank:
            count = min(evaluate.samples, self.loader.heldout_count)
            prompts = [
                self.loader.heldout_rows([number]).tokens[0, :PROMPT_TOKENS] for number in range(count)
            ]
            for prompt, text in write_samples(
                self.network,
                self.tokenizer,
                prompts,
                evaluate.sample_tokens,
                evaluate.temperature,
                recipe.seed,
                self.done,
            ):
                self.samples.append({"step": self.done, "prompt": prompt, "text": text})
        self.mesh.wait_for_first_rank()
        return loss

    def _commit(self) -> None:
        """Make the state after the last step durable. The first rank holds all there is, so it writes alone."""
        checkpoints = self.run.checkpoints
        if self.first_rank and not step_directory(checkpoints, self.done).exists():
            self.metrics.sync()
            samples = self.done * self.job.config.recipe.batch
            self.state.commit(checkpoints, self.done, samples, self.identity)
            tidy(checkpoints, self.job.config.checkpoint.keep)
        self.mesh.wait_for_first_rank()


def _leave(network: Network) -> None:
    """Parameters keep whatever their storage holds."""


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
