"""The figures of docs/choosing.md, by the planner. ``python -m tests.docs.choosing`` writes them there."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.arithmetic import BOTH, H100, NO_MASTER, WIDE, weighs
from tests.docs.scenarios import block

from shoal.facts.cluster.clouds import find
from shoal.facts.cluster.datasheets import DEVICES, NDR
from shoal.facts.model.parameters import parameter_count
from shoal.facts.model.presets import PRESETS
from shoal.plan.decide import duration
from shoal.plan.judge import Plan, judge
from shoal.plan.request import PlanRequest, plan_request
from shoal.predict.flops import flops_per_token
from shoal.predict.time.links import ROUNDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "choosing.md"
GIB = 2**30
FLAGS = ("nf4", "dora")


def asked(command: str) -> PlanRequest:
    """The question that a ``shoal plan`` command puts."""
    _, _, model, *words = shlex.split(command)
    options: dict[str, Any] = {}
    while words:
        name = words.pop(0).removeprefix("--")
        options[name] = True if name in FLAGS else words.pop(0)
    numbers = {name: int(options.pop(name)) for name in ("seq", "batch", "lora") if name in options}
    on = options.pop("on")
    return plan_request(model, str(ROOT / on) if on.endswith(".toml") else on, **numbers, **options)


def judged(command: str) -> Plan:
    found = asked(command)
    assert found.layout is not None
    return judge(found.workload(found.layout))


# One step of the ladder a row: the same job without a strategy and with it.


@dataclass(frozen=True)
class Rung:
    """A question, the job that asks it, and the layouts that are compared."""

    question: str
    job: str
    without: str
    with_it: str
    more: str = ""  # of the command that has the strategy

    @property
    def commands(self) -> tuple[str, str]:
        command = f"shoal plan {self.job} --layout "
        return command + self.without, command + self.with_it + self.more


RUNGS = (
    Rung("A replica fits", "gpt2 --on 8xH100 --seq 1024 --batch 512", "fsdp=8", "dp=8"),
    Rung(
        "Its states do not fit: shard them",
        "llama3-8b --on 8xH100 --seq 4096 --batch 64",
        "dp=8,micro=2",
        "fsdp=8,micro=2",
    ),
    Rung(
        "Activations do not fit: recompute",
        "llama3-70b --on 64xH100 --seq 8192 --batch 256",
        "fsdp=64,micro=2",
        "fsdp=64,micro=2,recompute=full",
    ),
    Rung(
        "One sequence does not fit: split it",
        "llama3-8b --on 8xH100 --seq 131072 --batch 8",
        "fsdp=8,micro=1,recompute=full",
        "cp=8,micro=4,recompute=full",
    ),
    Rung(
        "More GPUs than sequences: split matrices within a node, layers across nodes",
        "llama3-405b --on 16384xH100 --seq 8192 --batch 2048",
        "fsdp=1024,tp=16,micro=2,recompute=full",
        "fsdp=256,tp=8,pp=8,schedule=interleaved,chunks=8,recompute=full",
    ),
    Rung(
        "Links are slow: send hidden states only",
        "llama3-8b --on benchmarks/data/four_hosts.toml --seq 4096 --batch 64",
        "fsdp=4,micro=4,recompute=full",
        "pp=4,schedule=interleaved,micro=1",
    ),
    Rung(
        "Experts: move tokens, not weights",
        "mixtral-8x7b --on 64xH100 --seq 4096 --batch 1024",
        "fsdp=64,micro=1,recompute=full",
        "fsdp=64,ep=8,micro=1,recompute=full",
    ),
    Rung(
        "Nothing fits, and every weight must train: offload",
        "llama3-70b --on 8xH100 --seq 4096 --batch 64",
        "fsdp=8,micro=4,recompute=full",
        "fsdp=8,micro=4,recompute=full,offload=optimizer",
    ),
    Rung(
        "Nothing fits, and adapters will do: LoRA, QLoRA",
        "llama3-70b --on 1xH100 --seq 2048 --batch 8 --lora 16",
        "micro=4,recompute=full",
        "micro=4,recompute=full",
        " --nf4",
    ),
)


def said(plan: Plan) -> str:
    memory = plan.memory
    size = f"{memory.device_p90 / GIB:.0f} of {memory.capacity / GIB:.0f} GiB"
    if not memory.fits:
        return f"{size}: does not fit"
    return f"{size}, {duration(plan.step.seconds)}/step ± {plan.error_bar:.0%}"


def ladder() -> str:
    rows = ["| | the job | without | with |", "|---|---|---|---|"]
    for rung in RUNGS:
        without, with_it = (said(judged(command)) for command in rung.commands)
        rows.append(
            f"| {rung.question} | `shoal plan {rung.job}` | `{rung.without}`: {without} | "
            f"`{rung.with_it}{rung.more}`: {with_it} |"
        )
    return "\n".join(rows)


# The errors that circulate: what is read, what is right, and the arithmetic.

Row = tuple[str, str, str]


def twenty_bytes() -> Row:
    parts = f"{WIDE.weight:g} + {WIDE.gradient:g} + {WIDE.master:g} + {WIDE.moments:g}"
    why = (
        f"bf16 weights, fp32 gradients, master weights and moments are {parts} = {weighs(WIDE):g}. "
        f"{weighs(BOTH):g} is right of programs that keep half-precision gradients as well, and "
        f"{weighs(NO_MASTER):g} of those without master weights: "
        "[bytes per parameter](arithmetic.md#bytes-per-parameter)"
    )
    return (
        "mixed precision takes 20 bytes per parameter",
        f"{weighs(WIDE):g}, or what your program keeps",
        why,
    )


def gradients_over_nvlink() -> Row:
    assert H100.fast is not None
    size, one_way = 70e9 * 4, H100.fast.bandwidth
    rounds = ROUNDS["all_reduce"] * 7 / 8
    inside, narrow = rounds * size / one_way, rounds * size / 2 / one_way
    out = ROUNDS["all_reduce"] * 63 / 64 * size / NDR.bandwidth
    why = (
        f"280 GB are the fp32 gradients of 70B. A ring of 8 sends 2 · 7/8 of them, {rounds * size / 1e9:.0f} GB, "
        f"and sends one way: {one_way / 1e9:.0f} GB/s of the {2 * one_way / 1e9:.0f}. "
        f"That is {inside:.2f} s at the full rate, "
        f"{narrow:.2f} s in bf16. In a flat ring of 64 over {NDR.kind}, {NDR.bandwidth / 1e9:g} GB/s, it would be "
        f"{out:.0f} s. And 70B on GPUs of 80 GB has no replicas to sum over: it is sharded"
    )
    often = "summing the gradients of 70B takes 280 GB ÷ 900 GB/s = 0.31 s"
    return often, f"{inside:.2f} s, if a replica fitted", why


def p5() -> Row:
    nodes = {name: find(name) for name in ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge")}
    named = ", ".join(f"{name} {one.devices} × {one.device}" for name, one in nodes.items() if one)
    peaks = {device.name: device.peaks["bf16"] / 1e12 for device in DEVICES if "bf16" in device.peaks}
    why = (
        f"{named}. In dense bf16 an H100 has {peaks['H100']:.0f} TFLOP/s, an A100 {peaks['A100-80GB']:.0f}: "
        f"{peaks['H100'] / peaks['A100-80GB']:.1f} times. `--on p5.48xlarge` takes the instance by its name"
    )
    return "p5 instances have A100s", "H100s; p4d and p4de have A100s", why


def hours_of_70b() -> Row:
    model, tokens, hours = PRESETS["llama3-70b"], 15e12, 6.4e6
    simple, real = 6 * parameter_count(model) * tokens, flops_per_token(model, 8192) * tokens
    rate = real / hours / 3600
    peaks = {device.name: device.peaks["bf16"] for device in DEVICES if "bf16" in device.peaks}
    why = (
        f"The model card's 6.4M are H100-hours. 15T tokens are {simple / 1e24:.1f}e24 FLOP, with attention over 8192 "
        f"tokens {real / 1e24:.1f}e24: {real / 400e12 / 3600e6:.1f}M hours at 400 TFLOP/s. 6.4M would be "
        f"{rate / 1e12:.0f} TFLOP/s, an MFU of {rate / peaks['H100']:.0%}, so count with what you reach, not back from "
        f"that figure. As A100-hours they "
        f"would be an MFU of {rate / peaks['A100-80GB']:.0%}, which no program reaches"
    )
    right = f"{real / 400e12 / 3600e6:.1f}M at 400 TFLOP/s"
    return "Llama 3 70B on 15T tokens takes 6.4M GPU-hours, of any GPU and in any program", right, why


ERRORS: tuple[Callable[[], Row], ...] = (twenty_bytes, gradients_over_nvlink, p5, hours_of_70b)


def errors() -> str:
    rows = (f"| {' | '.join(row())} |" for row in ERRORS)
    return "\n".join(["| often read | right | why |", "|---|---|---|", *rows])


def written(page: str) -> str:
    return block("errors", errors(), block("ladder", ladder(), page))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
