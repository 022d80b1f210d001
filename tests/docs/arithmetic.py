"""The figures of docs/arithmetic.md, by the planner. ``python -m tests.docs.arithmetic`` writes them there."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.docs.scenarios import block

from shoal.facts.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from shoal.facts.cluster.datasheets import DEVICES, NDR
from shoal.facts.cluster.stack import MEGATRON, SHOAL, TITAN_COMPILED, Stack
from shoal.facts.ledger import Ledger
from shoal.facts.model.parameters import parameter_count
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.facts.schedules.programs import bubble, in_flight, instructions, simulate
from shoal.plan.request import plan_request
from shoal.predict.flops import flops_per_token
from shoal.predict.memory import ledger, ledgers
from shoal.predict.memory.micro_batch import BlockKind, micro_batch_bytes
from shoal.predict.memory.states import rank_states
from shoal.predict.time.bubble import idle
from shoal.predict.time.links import ROUNDS
from shoal.predict.traffic import traffic
from shoal.predict.workload import Workload

PAGE = Path(__file__).parents[2] / "docs" / "arithmetic.md"
GIB, YEAR = 2**30, 365.25 * 86400
(H100,) = (device for device in DEVICES if device.name == "H100")
USABLE = f"{H100.memory_bytes / 1e9:.0f} GB ({H100.memory_bytes / GIB:.1f} GiB)"


def of(stack: Stack, sharded: bool = False) -> BytesPerParameter:
    """Bytes per parameter in bf16 with AdamW."""
    recipe = Recipe(precision="bf16", states="fp32", reduce="fp32", optimizer="adamw")
    return bytes_per_parameter(recipe, stack, sharded)


def weighs(hold: BytesPerParameter) -> float:
    return hold.weight + hold.gradient + hold.master + hold.moments


WIDE_GRADIENTS = replace(MEGATRON, gradient_bytes=4)
BOTH_GRADIENTS = replace(MEGATRON, gradient_bytes=2 + 4)
PLAIN, WIDE, BOTH = of(MEGATRON), of(WIDE_GRADIENTS), of(BOTH_GRADIENTS)
ONCE = of(SHOAL, sharded=True)
NO_MASTER = replace(PLAIN, master=0)
TEXTBOOKS = {
    "blog posts and calculators that leave the master weights out": NO_MASTER,
    "ZeRO (Rajbhandari et al., 2020): half-precision gradients": PLAIN,
    'Megatron Core\'s "fp32 parameters, fp32 gradients"; Shoal, whose shards (zero=3) rest once, in fp32': ONCE,
    "Megatron Core's \"bf16 parameters, fp32 gradients\"; Hugging Face's page on GPU memory; Shoal elsewhere": WIDE,
    'Megatron Core\'s "fp16 parameters, fp16 gradients"; the Ultra-Scale Playbook, summing in fp32': BOTH,
}


def written_out(hold: BytesPerParameter) -> list[str]:
    """Weights, gradients, master weights, moments."""
    gradients = "2 + 4" if hold is BOTH else f"{hold.gradient:g}"
    return [f"{hold.weight:g}", gradients, f"{hold.master:g}", f"{hold.moments / 2:g} + {hold.moments / 2:g}"]


def bytes_table() -> str:
    rows = ["| counted by | weights | gradients | master weights | moments | sum | 70B |", f"|{'---|' * 7}"]
    for who, hold in TEXTBOOKS.items():
        columns = written_out(hold)
        total = f"**{weighs(hold):g}** = {' + '.join(part for part in columns if part != '0')}"
        rows.append(f"| {who} | {' | '.join(columns)} | {total} | {70e9 * weighs(hold) / 1e12:.2f} TB |")
    optimizer, without = PLAIN.master + PLAIN.moments, BOTH.weight + BOTH.gradient + BOTH.master
    rows += [
        "",
        f"{weighs(NO_MASTER):g} is met with two more meanings: ZeRO's K = {optimizer:g} is the optimizer's part "
        f"alone, master weights and moments; the Playbook's {without:g} are weights and gradients in both "
        "precisions, before any moment.",
    ]
    return "\n".join(rows)


# One function a row: what is often read, what is right, and why.

Row = tuple[str, str, str]


def asked(command: str, stack: Stack = SHOAL) -> Workload:
    """The question that a ``shoal plan`` command puts."""
    _, _, model, *words = shlex.split(command)
    options: dict[str, Any] = {
        name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    on, seq, batch = options.pop("on"), int(options.pop("seq")), int(options.pop("batch"))
    found = plan_request(model, on, seq=seq, batch=batch, **options)
    assert found.layout is not None
    return replace(found.workload(found.layout), stack=stack)


def shown(memory: Ledger) -> str:
    """As the table of ``shoal plan`` has it."""
    sizes = (memory.peak_allocated, memory.device_p90, memory.capacity)
    least, most, capacity = (f"{size / GIB:.1f}" for size in sizes)
    return f"{least} … {most} of {capacity} GiB, {'fits' if memory.fits else 'does not fit'}"


def sum_of_bytes() -> Row:
    parts = f"{WIDE.weight:g} + {WIDE.gradient:g} + {WIDE.master:g} + {WIDE.moments:g}"
    why = f"bf16 weights, fp32 gradients, master weights, moments. {weighs(BOTH):g} keeps bf16 gradients as well"
    return "2 + 4 + 4 + 8 = 20 bytes per parameter", f"{parts} = {weighs(WIDE):g}", why


def seventy_on_eight() -> Row:
    lean, full = (70e9 * weighs(hold) / 8 / 1e9 for hold in (NO_MASTER, PLAIN))
    command = "shoal plan llama3-70b --on 8xH100 --seq 4096 --batch 8 --layout fsdp=8,micro=1,recompute=full"
    workload = asked(command)
    states = sum(rank_states(workload.model, workload.recipe, workload.layout).values())
    why = (
        f"70e9 · {weighs(NO_MASTER):g} / 8, and · {weighs(PLAIN):g} / 8. A program can use {USABLE} of an H100. "
        f"Llama 3's 70B has {parameter_count(workload.model) / 1e9:.1f}e9 parameters, {states / 1e9:.0f} GB per GPU. "
        f"`{command}`: {shown(ledger(workload))}"
    )
    right = f"{lean:.0f} GB per GPU at {weighs(NO_MASTER):g} bytes, {full:.0f} GB at {weighs(PLAIN):g}: neither fits"
    return "sharded over 8 GPUs of 80 GB, 70B fits", right, why


def giant_on_eight() -> Row:
    model = PRESETS["gpt3-175b"]
    count = parameter_count(model)
    states, lean = count * weighs(PLAIN) / 1e12, count * weighs(NO_MASTER) / 1e12
    plain = "shoal plan gpt3-175b --on 8xH100 --seq 2048 --batch 8 --layout fsdp=8,micro=1,recompute=full"
    away = f"{plain},offload=optimizer+params"
    narrow = f"{away} --states bf16 --reduce bf16"
    host, half = (ledger(asked(command)) for command in (away, narrow))
    why = (
        f"{count / 1e9:.1f}e9 · {weighs(PLAIN):g}; {lean:.1f} TB even at {weighs(NO_MASTER):g} bytes. `{plain}`: "
        f"{shown(ledger(asked(plain)))}. With `offload=optimizer+params`: {shown(host)}, since then "
        f"{host.host * 8 / 1e12:.1f} TB wait in the host's memory, of which a node of 2 TiB can give "
        f"{host.host_capacity * 8 / 1e12:.1f}; with `--states bf16 --reduce bf16` as well "
        f"{half.host * 8 / 1e12:.1f} TB: {shown(half)}"
    )
    right = f"{states:.1f} TB of states, {8 * 80 / 1e3:g} TB of memory: impossible without offload"
    return "ZeRO-3 trains 175B on 8 GPUs of 80 GB", right, why


STAGES, MICRO_BATCHES = 4, 16


def idle_share() -> Row:
    waits = idle("1f1b", STAGES, 1, MICRO_BATCHES).work
    total = MICRO_BATCHES + waits
    why = (
        f"{waits:g}/{total:g} of the step. {waits:g}/{MICRO_BATCHES} is idle time over useful time. "
        f"`shoal schedule pp={STAGES} --micro-batches {MICRO_BATCHES}`"
    )
    often = f"{STAGES} stages and {MICRO_BATCHES} micro-batches idle {100 * waits / MICRO_BATCHES:g} %"
    return often, f"{100 * waits / total:.1f} %", why


def two_schedules() -> Row:
    shares, held, gigabytes = [], [], []
    command = "shoal plan llama2-7b --on 4xH100 --seq 4096 --batch 16 --layout pp=4,schedule={},micro=1"
    for schedule in ("gpipe", "1f1b"):
        programs = instructions(schedule, STAGES, 1, MICRO_BATCHES)
        shares.append(f"{bubble(simulate(programs)):.1%}".replace("%", " %"))
        held.append(in_flight(programs)[0])
        gigabytes.append(ledgers(asked(command.format(schedule)))[0].activations / 1e9)
    why = (
        f"{shares[0]} and {shares[1]} as above. The first stage of GPipe holds {held[0]} micro-batches, that of 1F1B "
        f"{held[1]}: {gigabytes[0]:.0f} and {gigabytes[1]:.0f} GB of activations, `{command.format('1f1b')}` and "
        f"`schedule=gpipe`"
    )
    return "1F1B has a smaller bubble than GPipe", "the same bubble, less memory", why


def sent(layout: str, **recipe: str) -> float:
    """Bytes that a rank of eight sends in a step, in rings."""
    options = " ".join(f"--{name} {value}" for name, value in recipe.items())
    workload = asked(f"shoal plan llama2-7b --on 8xH100 --seq 4096 --batch 8 --layout {layout} {options}")
    moved = sum(ROUNDS[one.op] * one.bytes for one in traffic(workload) if one.group != "world")
    # The step's loss and norm travel in the group of the only axis too.
    return 7 / 8 * (moved - ROUNDS["all_reduce"] * 16)


def sharded_traffic() -> Row:
    rule = (2 * ROUNDS["all_gather"] + ROUNDS["reduce_scatter"]) / ROUNDS["all_reduce"]
    plain, sharded, second = (
        sent(layout, precision="fp32") for layout in ("dp=8", "fsdp=8", "fsdp=8,zero=2")
    )
    narrow = sent("fsdp=8") / sent("dp=8")
    why = (
        f"Sent in a ring of n ranks: an all-reduce {ROUNDS['all_reduce']:g}·(n−1)/n of its buffer, all-gather and "
        f"reduce-scatter (n−1)/n each; FSDP gathers weights twice and scatters gradients once. In fp32, llama2-7b "
        f"on 8 GPUs: {plain / 1e9:.1f} GB with `dp=8`, {sharded / 1e9:.1f} GB with `fsdp=8`, which is "
        f"{sharded / plain:.2f}: embedding, head and last block are gathered once. `zero=2`: {second / plain:.2f}. "
        f"With bf16 weights and fp32 gradients on the way, {narrow:.2f}"
    )
    return "FSDP sends as much as DDP; or 3 times as much", f"{rule:g} times, in one precision", why


def two_directions() -> Row:
    assert H100.fast is not None
    one_way = H100.fast.bandwidth / 1e9
    why = (
        f"2 · {one_way:g}: the vendor adds both directions, a ring sends in one. Networks are quoted one way, in "
        f"bits: {NDR.kind} are {NDR.bandwidth / 1e9:g} GB/s (`facts/cluster/devices.py`)"
    )
    return f"NVLink of an H100 moves {2 * one_way:g} GB/s", f"{one_way:g} GB/s each way", why


def seven_alone() -> Row:
    rate, flops = H100.peaks["bf16"], 6 * 7e9 * 1e12
    real = flops_per_token(PRESETS["llama2-7b"], 4096) * 1e12
    why = (
        f"6 · 7e9 · 1e12 = {flops / 1e21:g}e21 FLOP at {rate / 1e12:.0f} TFLOP/s, the peak. llama2-7b with attention "
        f"over 4096 tokens: {real / 1e21:.1f}e21, {real / rate / YEAR:.2f} years (`predict/flops.py`)"
    )
    right = f"{flops / rate / YEAR:.2f} years at full rate"
    return "one H100 trains 7B on 1T tokens in weeks", right, why


def seventy_for_long() -> Row:
    rate, flops = 400e12, 6 * 70e9 * 15e12
    years = flops / rate / YEAR
    real = flops_per_token(PRESETS["llama3-70b"], 8192) * 15e12
    why = (
        f"6 · 70e9 · 15e12 = {flops / 1e24:g}e24 FLOP at {rate / 1e12:g} TFLOP/s; {years / 8:.0f} years on 8 GPUs, "
        f"{years * 365.25 / 1024:.0f} days on 1024. llama3-70b with attention over 8192 tokens: {real / 1e24:.1f}e24, "
        f"{real / rate / YEAR:.0f} years"
    )
    return "70B on 15T tokens is for a node or two", f"{years:.0f} years of one GPU", why


ACTIVATIONS = "shoal plan llama2-7b --on 1xH100 --seq 4096 --batch 4 --layout micro=4"


# With FlashAttention, whose result needs no copy; cuDNN's, which our engine gets on an H200, does.
FLASH = replace(SHOAL, kernel="flash")


def kept(
    stack: Stack = FLASH, recompute: str = "none", command: str = ACTIVATIONS, compile: bool = False
) -> float:
    """Bytes that all blocks keep of a micro-batch."""
    workload = replace(asked(f"{command},recompute={recompute}", stack), compile=compile)
    return workload.model.layers * micro_batch_bytes(workload).blocks[BlockKind(False, False, False)].resting


def a_token(model: str, stack: Stack) -> float:
    """Bytes that a block keeps of a token, over the model's width."""
    command = ACTIVATIONS.replace("llama2-7b", model).replace("4096", "2048")
    shape = PRESETS[model]
    return kept(stack, command=command) / (shape.layers * shape.hidden * 4 * 2048)


def activations() -> Row:
    gpt = a_token("gpt3-175b", replace(MEGATRON, attention="flash"))
    states = weighs(ONCE) * parameter_count(PRESETS["llama2-7b"])
    why = (
        f"Beside {states / 1e9:.0f} GB of states. llama2-7b, bf16, flash attention, eager kernels: "
        f"{a_token('llama2-7b', FLASH):.1f} · width bytes per token and layer ({a_token('llama3-8b', FLASH):.1f} in "
        f"llama3-8b's shape). Norms and SwiGLU fused: {kept(TITAN_COMPILED) / 1e9:.0f} GB; Shoal's compiled blocks, "
        f"which keep products alone: {kept(compile=True) / 1e9:.0f} GB; attention not fused, with dropout: "
        f"{kept(MEGATRON) / 1e9:.0f} GB; `recompute=full`: {kept(recompute='full') / 1e9:.1f} GB. The "
        f"{gpt:.0f} · width of Korthikanti et al. (2022) is GPT's block with dropout, without attention's scores. "
        f"`{ACTIVATIONS}`: {shown(ledger(asked(ACTIVATIONS)))}"
    )
    right = f"{kept() / 1e9:.0f} GB without recomputation"
    return "activations of 7B at 4 × 4096 tokens are small beside its states", right, why


FIGURES: tuple[Callable[[], Row], ...] = (
    sum_of_bytes,
    seventy_on_eight,
    giant_on_eight,
    idle_share,
    two_schedules,
    sharded_traffic,
    two_directions,
    seven_alone,
    seventy_for_long,
    activations,
)


def figures_table() -> str:
    rows = (f"| {' | '.join(row())} |" for row in FIGURES)
    return "\n".join(["| often read | right | why, and how to see it |", "|---|---|---|", *rows])


def written(page: str) -> str:
    return block("figures", figures_table(), block("bytes", bytes_table(), page))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
