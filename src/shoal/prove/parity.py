"""Parity: the same run in each layout against one process: losses, every gradient, every weight.

A layout that differs is bisected: its strategies are switched off one at a time, and the one without which the
difference disappears is named, with its file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model.parameters import EMBEDDING, by_name
from shoal.facts.model.tensor_split import summed_over
from shoal.facts.problem import BadInput
from shoal.facts.strategies import STRATEGIES, Strategy
from shoal.launch.ranks import RankFailed, run_ranks
from shoal.plan.resolve import Job, resolve
from shoal.prove.parity_rank import COARSE, Difference, ParityRank, ParityRequest, run_parity_rank

# What one rank runs; a parameter, so that a test of the proof can substitute a broken one.
Rehearse = Callable[..., ParityRank | None]


@dataclass(frozen=True)
class Tolerance:
    """How far apart two runs may be that are the same except for rounding."""

    loss: float
    gradient: float  # before the first update, where rounding has not grown yet
    parameter: float  # after the last; AdamW divides by what may be almost nothing, which magnifies rounding
    later: float  # gradients of later steps, which inherit the parameters' differences
    same_text: bool = (
        True  # whether both generate the same text; rounding may flip one likely token to another
    )


TOLERANCES = {
    "fp64": Tolerance(loss=1e-12, gradient=1e-12, parameter=1e-8, later=1e-9),
    "fp32": Tolerance(loss=2e-5, gradient=2e-4, parameter=5e-2, later=2e-2),
    # At least twice the differences between runs of three families, three seeds each (docs/parity.md).
    "bf16": Tolerance(loss=3e-3, gradient=1e-1, parameter=1e-1, later=2e-1, same_text=False),
    "fp8": Tolerance(loss=1e-2, gradient=6e-1, parameter=1.5e-1, later=8e-1, same_text=False),
}
# For fp8 layouts that round the same operands with the same scales. Their first gradients differ as in bf16.
SAME_SCALES = Tolerance(loss=3e-3, gradient=1e-2, parameter=5e-2, later=4e-1, same_text=False)
# AdamW's first updates have the size of the learning rate in every weight, and the sign of its gradient. If rounding
# this coarse decides the sign, larger rates would carry it into everything computed later.
COARSE_RATE = 1e-3
STRICT = Tolerance(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ParityVerdict:
    """One layout compared with one process."""

    layout: Layout
    losses: list[float]
    max_loss_diff: float
    max_grad_diff: float  # of the first step: before any update, rounding has not grown yet
    max_param_diff: float
    ok: bool
    seconds: float
    max_later_grad_diff: float = 0.0  # of later steps, whose parameters already differ
    bit_identical: bool = False
    differing: tuple[Difference, ...] = ()  # every tensor beyond its tolerance, first one first
    reason: str = ""  # in words, if it is not ok
    strategy: str = ""  # the layout key that introduces the difference
    file: str = ""  # the file of that strategy


@dataclass(frozen=True)
class Parity:
    """All verdicts in one precision."""

    steps: int
    precision: str
    reference: list[float]
    verdicts: list[ParityVerdict]


@dataclass
class Prover:
    """Runs layouts of one config in one precision."""

    config: Config
    dataset: Path
    steps: int
    precision: str
    folder: Path  # for the references' tensors
    rehearse: Rehearse = run_parity_rank
    visible: str | None = None  # the value of CUDA_VISIBLE_DEVICES
    references: dict[Layout, ParityRank] = field(default_factory=dict)  # those that have run

    def prove(
        self, layouts: list[Layout], tell: Callable[[ParityVerdict], None] = lambda verdict: None
    ) -> Parity:
        verdicts = []
        for layout in layouts:
            verdict = self._judge(layout)
            verdict = verdict if verdict.ok else self._blame(verdict)
            tell(verdict)
            verdicts.append(verdict)
        return Parity(self.steps, self.precision, self.reference(Layout()).losses, verdicts)

    def reference(self, layout: Layout) -> ParityRank:
        """Run one process. It must not fail, so its failure is not a verdict."""
        if layout not in self.references:
            request = self._request(layout, layout, writes=True)
            request.folder.mkdir(exist_ok=True)
            (seen,) = run_ranks(1, run_parity_rank, (request,), _patience(request.job))
            assert isinstance(seen, ParityRank)
            self.references[layout] = seen
        return self.references[layout]

    def micro_batches(self, layouts: list[Layout]) -> list[Layout]:
        """One process with each micro-batch size that layouts are compared with, except for the whole batch.

        These are judged too: in fp8 their agreement cannot be taken for granted.
        """
        alike = dict.fromkeys(self._alike(layout) for layout in layouts)
        return [layout for layout in alike if layout != Layout() and layout not in layouts]

    def _alike(self, layout: Layout) -> Layout:
        """The single-process run that a layout is compared with: the whole batch at once.

        In fp8, micro-batches of the same size, because what is multiplied together shares a scale.
        """
        batch = self.config.recipe.batch
        micro = layout.micro_batch(batch)
        return Layout(micro=micro) if self.precision == "fp8" and micro < batch else Layout()

    def _request(self, layout: Layout, reference: Layout, writes: bool = False) -> ParityRequest:
        folder = self.folder / str(reference)
        return ParityRequest(self.job(layout), self.dataset, self.steps, folder, writes)

    def job(self, layout: Layout) -> Job:
        return job_of(self.config, layout, self.precision, self.visible)

    def _judge(self, layout: Layout) -> ParityVerdict:
        reference = self._alike(layout)
        if layout == reference:
            reference = Layout()  # comparing it with itself would prove nothing
        truth = self.reference(reference)
        started = time.perf_counter()
        request = self._request(layout, reference)
        try:
            results = run_ranks(layout.world, self.rehearse, (request,), _patience(request.job))
            seen = results[0]
        except RankFailed as failure:
            infinite = float("inf")
            seconds = time.perf_counter() - started
            return ParityVerdict(
                layout, [], infinite, infinite, infinite, False, seconds, reason=str(failure)
            )
        tolerance = self._tolerance(layout, request.job)
        return _verdict(layout, truth, seen, tolerance, time.perf_counter() - started)

    def _tolerance(self, layout: Layout, job: Job) -> Tolerance:
        if job.config.run.strict:
            return STRICT
        # Tensor ranks quantise their own features with their own scales; so does a different micro-batch.
        if self.precision == "fp8" and layout.tp == 1 and layout != self._alike(layout):
            return SAME_SCALES
        return TOLERANCES[self.precision]

    def _blame(self, verdict: ParityVerdict) -> ParityVerdict:
        """Name the strategy without which the layout passes; if no single one is, all of them."""
        layout = verdict.layout
        suspects = [one for one in STRATEGIES if one.works(layout)]
        guilty = [one for one in suspects if len(suspects) == 1 or self._is_fine(without(one, layout))]
        guilty = guilty or suspects
        files = dict.fromkeys(self._file(one, verdict) for one in guilty)
        return replace(verdict, strategy=", ".join(one.key for one in guilty), file=", ".join(files))

    def _is_fine(self, layout: Layout) -> bool:
        """Whether part of a layout passes; it may need what was switched off, which tells nothing."""
        try:
            return self._judge(layout).ok
        except BadInput:
            return False

    def _file(self, strategy: Strategy, verdict: ParityVerdict) -> str:
        """The file of a strategy, or of the part of it that the first wrong tensor points to."""
        layout, model = verdict.layout, self.job(verdict.layout).network
        at_first = {one.tensor for one in verdict.differing if one.what == "gradient" and one.step == 1}
        summed = {
            name for name in at_first if summed_over(by_name(model)[name], layout.tp, layout.sp) is not None
        }
        tied = at_first & {EMBEDDING} if model.tied else set()
        if at_first and at_first == {"tp": summed, "pp": tied}.get(strategy.key):
            return "parallel/shared_gradients.py"  # only sums over ranks that hold the same parameter
        return strategy.file_in(layout)


def job_of(config: Config, layout: Layout, precision: str, visible: str | None = None) -> Job:
    """The config's job in another layout and precision; raises everything that is wrong with it."""
    values = config.model_dump()
    values["layout"] = str(layout)
    values["recipe"]["precision"] = precision
    values["recipe"]["states"] = "fp32"
    if precision in COARSE:
        values["recipe"]["lr"] = min(values["recipe"]["lr"], COARSE_RATE)
    values["recipe"]["reduce"] = "fp32"
    return resolve(Config.model_validate(values), visible)


def _patience(job: Job) -> float:
    """Total timeout: ranks give up on each other after ``fault.timeout``; together they may take longer, but not
    forever.
    """
    return max(600.0, 4 * job.config.fault.timeout)


def _verdict(
    layout: Layout, truth: ParityRank, seen: ParityRank, tolerance: Tolerance, seconds: float
) -> ParityVerdict:
    losses = [abs(ours - theirs) for ours, theirs in zip(seen.losses, truth.losses, strict=True)]
    if truth.heldout is not None:
        losses.append(abs((float("nan") if seen.heldout is None else seen.heldout) - truth.heldout))
    worst_loss = _worst(losses)
    norms = [
        abs(ours - theirs) / max(theirs, 1e-300) for ours, theirs in zip(seen.norms, truth.norms, strict=True)
    ]

    def limit(one: Difference) -> float:
        if one.what == "parameter":
            return tolerance.parameter
        return tolerance.gradient if one.step == 1 else tolerance.later

    beyond = [one for one in seen.differences if not one.amount <= limit(one)]
    first = beyond[0] if beyond else None
    norm_is_off = not (norms[0] <= tolerance.gradient and _worst(norms) <= tolerance.later)
    reason = ""
    if norm_is_off and not (first and first.step == 1 and first.what == "gradient"):
        # The first step's gradients are right but their norm is not, so later differences come from the norm.
        reason = f"the norm of all gradients is off by {_worst(norms):.1e}"
    elif first:
        reason = f"the {first.what} of {first.tensor} at step {first.step} is off by {first.amount:.1e}"
    elif not worst_loss <= tolerance.loss * max(1.0, abs(truth.losses[0])):
        reason = f"the loss is off by {worst_loss:.1e}"
    elif (moved := _routed_apart(truth, seen)) is not None:
        reason = f"at step {moved}, routers send tokens to other experts"
    elif tolerance.same_text and seen.written != truth.written:
        reason = f"it writes {seen.written!r} and one process {truth.written!r}"
    gradients = [one for one in seen.differences if one.what == "gradient"]
    return ParityVerdict(
        layout,
        seen.losses,
        worst_loss,
        _worst([one.amount for one in gradients if one.step == 1]),
        _worst([one.amount for one in seen.differences if one.what == "parameter"]),
        not reason,
        seconds,
        max_later_grad_diff=_worst([one.amount for one in gradients if one.step > 1]),
        bit_identical=worst_loss == 0 and all(one.amount == 0 for one in seen.differences),
        differing=tuple(beyond),
        reason=reason,
    )


def _routed_apart(truth: ParityRank, seen: ParityRank) -> int | None:
    """The first step in which an expert got a different number of tokens than in one process."""
    sent = [[None if one is None else one.sent for one in rank.routed] for rank in (seen, truth)]
    return next((step for step, both in enumerate(zip(*sent, strict=True), 1) if both[0] != both[1]), None)


def _worst(amounts: list[float]) -> float:
    """The largest; NaN is worse than anything."""
    return max((amount if amount == amount else float("inf") for amount in amounts), default=0.0)


def without(strategy: Strategy, layout: Layout) -> Layout:
    """The layout without this one strategy."""
    off = {strategy.key, *strategy.policies, *strategy.resets}
    return Layout(**{key: value for key, value in layout.written().items() if key not in off})
