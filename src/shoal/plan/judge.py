"""Judge one layout: does it fit, how fast is it, and how does it compare with plain DDP."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from shoal.facts import support
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.config import Config, ModelSection
from shoal.facts.layout import Layout, divisors
from shoal.facts.layout.stack_limits import RULES, Asked, gaps
from shoal.facts.ledger import Ledger
from shoal.facts.recipe import write_count
from shoal.facts.traffic import Traffic
from shoal.plan import evidence
from shoal.plan.headroom import free_bytes, out_of_memory
from shoal.predict.flops import flops_per_token, in_conventions, matrix_parameters
from shoal.predict.memory import ledger
from shoal.predict.time.step import CostModel, StepTime, cost_model, step
from shoal.predict.traffic import traffic
from shoal.predict.workload import Workload

RUNS = "runs"
PLANNED = "planned only: "
# The widest error bar within which a slower layout counts as equally fast. Two layouts of one model on one cluster
# share much of their error: over 3,066 pairs of published rows the ratio is off by 10 % on average, with a median of 6
# %.
WIDEST = 0.1
# Label of everything that is only planned.
UNRUN = "priced but not run by the engine yet"


@dataclass
class Replicas:
    """Plain data parallelism on all of a cluster's devices: the baseline of every plan."""

    micro: int  # the fastest micro-batch that fits; the smallest if none does
    fits: bool
    tokens_per_s: float
    bytes: int = 0  # needed per device, at the 90th percentile


@dataclass
class Plan:
    """A layout with its prediction."""

    workload: Workload
    memory: Ledger
    step: StepTime
    replicas: Replicas
    why: str = ""
    called: str | None = None  # how the user specified the model, if its name does not tell: a path
    tie: bool = False  # within the error bar of the best plan

    @property
    def layout(self) -> Layout:
        return self.workload.layout

    @property
    def degrees(self) -> dict[str, int]:
        return self.layout.degrees

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def nodes(self) -> int:
        """Nodes that its ranks are on, equally many on each."""
        return -(-self.world // self.workload.cluster.devices_per_node)

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def tokens_per_s(self) -> float:
        return self.workload.recipe.tokens_per_step / self.step.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.world

    @cached_property
    def model_tflops_per_gpu(self) -> float:
        """By the convention of ``predict/flops.py``; gradients of frozen weights are not counted."""
        model = self.workload.model
        each = flops_per_token(model, self.workload.recipe.seq)
        if self.workload.lora is not None:
            each -= 2 * matrix_parameters(model)
        return each * self.tokens_per_s_per_gpu / 1e12

    @property
    def tflops_by_convention(self) -> dict[str, float]:
        model, seq = self.workload.model, self.workload.recipe.seq
        return in_conventions(model, seq, self.model_tflops_per_gpu)

    @property
    def mfu(self) -> float | None:
        """Relative to the device's dense peak; None if its maker does not state one."""
        peak = self.workload.cluster.device.peak(self.workload.recipe.precision)
        return self.model_tflops_per_gpu * 1e12 / peak if peak else None

    @property
    def vs_ddp(self) -> float:
        """Throughput relative to plain replicas on as many devices, whether those fit or not."""
        return self.tokens_per_s / self.replicas.tokens_per_s

    @property
    def ddp_fits(self) -> bool:
        return self.replicas.fits

    @cached_property
    def traffic(self) -> list[Traffic]:
        return traffic(self.workload)

    @cached_property
    def error_bar(self) -> float:
        return evidence.error_bar(self.workload, self.step.seconds)

    @property
    def limit(self) -> float:
        """Step times up to this are indistinguishable from this plan's: within its error bar.

        A wide error bar means that little is known about either; then at most a tenth is given up for a simpler
        layout.
        """
        return self.step.seconds * (1 + self.told_apart)

    @property
    def told_apart(self) -> float:
        """How much slower another layout must be to be distinguishable from this one."""
        return min(self.error_bar, WIDEST)

    @cached_property
    def unmeasured(self) -> list[str]:
        short = [f"steps under {evidence.SHORTEST:.2g} s"] if self.step.seconds < evidence.SHORTEST else []
        return [*evidence.unmeasured(self.workload), *short]

    @property
    def out_of_memory(self) -> float:
        """The probability that it runs out of memory."""
        return out_of_memory(self.memory)

    @cached_property
    def support(self) -> str:
        """Whether the engine runs it; if not, what is missing."""
        return supported(self.workload)

    @property
    def lacks(self) -> str:
        """The parts of it that the engine does not run."""
        return self.support.removeprefix(PLANNED)

    @property
    def runs(self) -> bool:
        return self.support == RUNS

    @property
    def command(self) -> str:
        """The command to run next: create a config to train or, if the engine does not run it yet, export."""
        asked = f"{ask(self.workload, self.called)} --layout {shlex.quote(str(self.layout))}"
        if (stack := self.workload.stack) is not SHOAL:
            return f"shoal plan {asked} --export {stack.name}"
        if self.runs:
            nodes = f" --nodes {self.nodes}" if self.nodes > 1 else ""
            return f"shoal plan {asked} --save plan.toml && shoal train plan.toml{nodes}"
        return f"shoal plan {asked} --export megatron"


def judge(workload: Workload, on: CostModel | None = None, against: Replicas | None = None) -> Plan:
    """The prediction for one layout. ``on`` and ``against`` are shared by the layouts of a search."""
    on = on or cost_model(workload)
    return Plan(workload, ledger(workload), step(workload, on), against or replicas(workload, on))


def replicas(workload: Workload, on: CostModel) -> Replicas:
    """Plain replicas on as many devices as the workload's layout has ranks."""
    world, recipe = workload.layout.world, workload.recipe
    # An indivisible batch is rounded up: the comparison is in throughput.
    batch = -(-recipe.batch // world) * world
    rounded = replace(workload, recipe=recipe.model_copy(update={"batch": batch}))
    best: Replicas | None = None
    for micro in divisors(batch // world):
        one = replace(rounded, layout=Layout(dp=world, micro=micro))
        memory = ledger(one)
        fits = memory.fits
        if best is not None and not fits:
            break  # a larger micro-batch needs more
        rate = batch * recipe.seq / step(one, on).seconds
        if best is None or rate > best.tokens_per_s:
            best = Replicas(micro, fits, rate, memory.device_p90)
        if not fits:
            break
    assert best is not None
    return best


def engine_runs(workload: Workload) -> bool:
    """Whether the engine runs the model and the recipe in some layout."""
    return supported(replace(workload, layout=Layout())) == RUNS


def supported(workload: Workload) -> str:
    """``runs``, or what the engine only plans so far; for another stack, what it does not run."""
    if (stack := workload.stack.name) in RULES:
        others = [gap.what for gap in gaps(stack, asked_of(workload))]
        return PLANNED + ", ".join(others) if others else RUNS
    asked = Config(recipe=workload.recipe, model=ModelSection(lora=workload.lora))
    lacking = support.missing(asked, workload.model, workload.layout)
    if not lacking:
        return RUNS
    return PLANNED + ", ".join(problem.what.rpartition(": ")[0] for problem in lacking)


def asked_of(workload: Workload) -> Asked:
    """The input of another stack's rules."""
    rank = workload.lora.rank if workload.lora else None
    return Asked(workload.layout, workload.model, workload.recipe, rank)


def ask(workload: Workload, called: str | None = None) -> str:
    """The workload without its layout, as shell-quoted arguments of ``shoal plan``."""
    recipe = workload.recipe
    model, cluster = shlex.quote(called or workload.model.name), shlex.quote(str(workload.cluster))
    words = f"{model} --on {cluster} --seq {recipe.seq} --batch {recipe.batch}"
    if workload.stack.name in RULES:
        words += f" --stack {workload.stack.name}"
    if recipe.tokens is not None:
        words += f" --tokens {write_count(recipe.tokens)}"
    for flag, usual in (
        ("precision", "bf16"),
        ("states", "fp32"),
        ("optimizer", "adamw"),
        ("reduce", "fp32"),
    ):
        if (asked := getattr(recipe, flag)) != usual:
            words += f" --{flag} {asked}"
    if workload.lora is not None:
        words += f" --lora {workload.lora.rank}"
        words += " --dora" if workload.lora.kind == "dora" else ""
        words += " --nf4" if workload.lora.base == "nf4" else ""
    return words


def as_json(plan: Plan) -> dict[str, Any]:
    spent = plan.step
    parts = ("seconds", "compute", "recompute", "exposed_comm", "bubble", "optimizer", "offload", "other")
    return {
        "layout": str(plan.layout),
        "degrees": plan.degrees,
        "world": plan.world,
        "fits": plan.fits,
        "memory": plan.memory.as_json(),
        "step": {name: getattr(spent, name) for name in parts},
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "model_tflops_per_gpu": plan.model_tflops_per_gpu,
        "tflops_by_convention": plan.tflops_by_convention,
        "mfu": plan.mfu,
        "vs_ddp": plan.vs_ddp,
        "ddp_fits": plan.ddp_fits,
        "traffic": [asdict(one) for one in plan.traffic],
        "error_bar": plan.error_bar,
        "told_apart": plan.told_apart,
        "unmeasured": plan.unmeasured,
        "tie": plan.tie,
        "headroom": free_bytes(plan.memory),
        "out_of_memory": plan.out_of_memory,
        "support": plan.support,
        "command": plan.command,
        "why": plan.why,
    }
