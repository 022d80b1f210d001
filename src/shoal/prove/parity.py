"""Parity: the same run in each layout against one process: losses, every gradient, every weight.

A layout that differs is taken apart: its strategies are switched off one at a time, and the one without which the
difference is gone is named, with its file.
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

# What one rank does; a parameter, so that a proof of the proof can put a broken one in its place.
Rehearse = Callable[..., ParityRank | None]


@dataclass(frozen=True)
class Tolerance:
    """How far apart two runs may be that are the same run but for rounding."""

    loss: float
    gradient: float  # before the first update, where rounding has had no time to grow
    parameter: float  # after the last; AdamW divides by what may be almost nothing, and so magnifies
    later: float  # gradients of later steps, which inherit the parameters' differences
    same_text: bool = True  # whether both write the same; rounding may turn one likely token into another


TOLERANCES = {
    "fp64": Tolerance(loss=1e-12, gradient=1e-12, parameter=1e-8, later=1e-9),
    "fp32": Tolerance(loss=2e-5, gradient=2e-4, parameter=5e-2, later=2e-2),
    # At least twice what runs of three families differed by, three seeds each (docs/parity.md).
    "bf16": Tolerance(loss=3e-3, gradient=1e-1, parameter=1e-1, later=2e-1, same_text=False),
    "fp8": Tolerance(loss=1e-2, gradient=6e-1, parameter=1.5e-1, later=8e-1, same_text=False),
}
# In fp8, of layouts that round the same operands with the same scales. Their first gradients differ as bf16 has it.
SAME_SCALES = Tolerance(loss=3e-3, gradient=1e-2, parameter=5e-2, later=4e-1, same_text=False)
# AdamW's first updates have the size of the learning rate in every weight, and the direction of a gradient's sign.
# Where that is a matter of rounding as coarse as this, larger ones carry it to all that is computed after.
COARSE_RATE = 1e-3
STRICT = Tolerance(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ParityVerdict:
    """One layout against one process."""

    layout: Layout
    losses: list[float]
    max_loss_diff: float
    max_grad_diff: float  # of the first step: before any update, rounding has had no time to grow
    max_param_diff: float
    ok: bool
    seconds: float
    max_later_grad_diff: float = 0.0  # of the steps after the first, whose parameters differ already
    bit_identical: bool = False
    differing: tuple[Difference, ...] = ()  # every tensor beyond its tolerance, the first one first
    reason: str = ""  # in words, where it is not ok
    strategy: str = ""  # the key of the layout that brings the difference in
    file: str = ""  # where that strategy lives


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
    visible: str | None = None  # what CUDA_VISIBLE_DEVICES says
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
        """One process. It must not fail, so its failure is not a verdict."""
        if layout not in self.references:
            request = self._request(layout, layout, writes=True)
            request.folder.mkdir(exist_ok=True)
            (seen,) = run_ranks(1, run_parity_rank, (request,), _patience(request.job))
            assert isinstance(seen, ParityRank)
            self.references[layout] = seen
        return self.references[layout]

    def micro_batches(self, layouts: list[Layout]) -> list[Layout]:
        """One process with each size of micro-batch that layouts are compared with, but for the whole batch.

        To be judged too: in fp8 they are nothing that can be taken for granted.
        """
        alike = dict.fromkeys(self._alike(layout) for layout in layouts)
        return [layout for layout in alike if layout != Layout() and layout not in layouts]

    def _alike(self, layout: Layout) -> Layout:
        """One process that a layout is compared with: the whole batch at once.

        In fp8, micro-batches of the same size, since what is multiplied together shares a scale.
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
            reference = Layout()  # compared with itself it would prove nothing
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
        # Tensor ranks have features of their own, and so scales of their own; and so has another micro-batch.
        if self.precision == "fp8" and layout.tp == 1 and layout != self._alike(layout):
            return SAME_SCALES
        return TOLERANCES[self.precision]

    def _blame(self, verdict: ParityVerdict) -> ParityVerdict:
        """Name the strategy without which the layout is fine; where that is none of them alone, all of them."""
        layout = verdict.layout
        suspects = [one for one in STRATEGIES if one.works(layout)]
        guilty = [one for one in suspects if len(suspects) == 1 or self._is_fine(without(one, layout))]
        guilty = guilty or suspects
        files = dict.fromkeys(self._file(one, verdict) for one in guilty)
        return replace(verdict, strategy=", ".join(one.key for one in guilty), file=", ".join(files))

    def _is_fine(self, layout: Layout) -> bool:
        """Of a part of a layout, which may need what was switched off: then it tells nothing."""
        try:
            return self._judge(layout).ok
        except BadInput:
            return False

    def _file(self, strategy: Strategy, verdict: ParityVerdict) -> str:
        """Where a strategy lives, or that part of it that the first wrong tensor points to."""
        layout, model = verdict.layout, self.job(verdict.layout).network
        at_first = {one.tensor for one in verdict.differing if one.what == "gradient" and one.step == 1}
        summed = {
            name for name in at_first if summed_over(by_name(model)[name], layout.tp, layout.sp) is not None
        }
        tied = at_first & {EMBEDDING} if model.tied else set()
        if at_first and at_first == {"tp": summed, "pp": tied}.get(strategy.key):
            return "parallel/shared_gradients.py"  # nothing but sums over ranks that hold the same parameter
        return strategy.file_in(layout)


def job_of(config: Config, layout: Layout, precision: str, visible: str | None = None) -> Job:
    """The config's job in another layout and precision; raises all that is wrong with it."""
    values = config.model_dump()
    values["layout"] = str(layout)
    values["recipe"]["precision"] = precision
    values["recipe"]["states"] = "fp32"
    if precision in COARSE:
        values["recipe"]["lr"] = min(values["recipe"]["lr"], COARSE_RATE)
    values["recipe"]["reduce"] = "fp32"
    return resolve(Config.model_validate(values), visible)


def _patience(job: Job) -> float:
    """Ranks give up on each other after ``fault.timeout``; together they may take longer, but not forever."""
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
        # The first step's gradients are right and their norm is not, so what follows is the norm's doing.
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
    """The first step in which an expert was sent more or fewer tokens than in one process."""
    sent = [[None if one is None else one.sent for one in rank.routed] for rank in (seen, truth)]
    return next((step for step, both in enumerate(zip(*sent, strict=True), 1) if both[0] != both[1]), None)


def _worst(amounts: list[float]) -> float:
    """The largest; one that is not a number is worse than all."""
    return max((amount if amount == amount else float("inf") for amount in amounts), default=0.0)


def without(strategy: Strategy, layout: Layout) -> Layout:
    """The layout that lacks this strategy alone."""
    off = {strategy.key, *strategy.policies, *strategy.resets}
    return Layout(**{key: value for key, value in layout.written().items() if key not in off})
