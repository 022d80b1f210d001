"""Out of memory, explained: prediction next to measurement, and the nearest change that fits."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.facts.ledger import Ledger
from shoal.observe.flight_recorder import EXPLAIN, Announce
from shoal.parallel.mesh import Mesh
from shoal.plan.judge import judge
from shoal.plan.remedy import Remedy, for_layout
from shoal.plan.request import PlanRequest
from shoal.plan.resolve import Job
from shoal.predict.memory import ledgers
from shoal.train.program import Program

GIB = 2**30
# A prediction that is too low by less than this factor is not mentioned.
NOTICEABLE = 1.005
# Predicted times that differ by less than this are equal.
SAME_TIME = 0.0005
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}

# For errors without a type of their own: a CPU's allocator, the CUDA runtime, cuBLAS and NCCL.
WORDS = re.compile(
    r"DefaultCPUAllocator|CUDA error: out of memory|Cuda failure .*out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Failed to CUDA [cm]alloc"
)
# Sizes in allocators' messages at the time of the error; a little later some memory is free again.
SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
ASKED = re.compile(rf"[Tt]ried to allocate {SIZE}")
FREE = re.compile(rf"of which {SIZE} is free")
IN_USE = re.compile(rf"this process has {SIZE} memory in use")
ALLOWED = re.compile(rf"{SIZE} allowed")
ALLOCATED = re.compile(rf"{SIZE} is allocated by PyTorch")
UNUSED = re.compile(rf"{SIZE} is reserved by PyTorch but unallocated")


@dataclass(frozen=True)
class MeasuredMemory:
    """What one rank held when memory ran out, in bytes."""

    params: int
    grads: int
    optimizer: int
    asked: int  # the allocation that failed; 0: unknown
    allocated: int | None = None  # by tensors; a CPU's allocator does not count
    reserved: int | None = None  # by the allocator, for tensors now and later
    capacity: int | None = None  # of the device, without what other processes hold
    peak_allocated: int | None = None  # the peak so far
    peak_reserved: int | None = None
    resident: int | None = None  # the whole process, if its allocator does not count

    @property
    def states(self) -> int:
        return self.params + self.grads + self.optimizer

    @property
    def unused(self) -> int:
        """Memory that the allocator holds and no tensor uses."""
        return 0 if self.reserved is None or self.allocated is None else self.reserved - self.allocated

    @property
    def rest(self) -> int | None:
        return None if self.allocated is None else max(0, self.allocated - self.states)


class OutOfMemory(RuntimeError):
    """A rank ran out of memory; the message says what filled it and what would fit."""

    def __init__(self, message: str, step: int, predicted: Ledger, measured: MeasuredMemory) -> None:
        self.step, self.predicted, self.measured = step, predicted, measured
        super().__init__(message)


class RunningTraining(Protocol):
    """A running training: its program, and how many steps are done."""

    program: Program
    done: int
    announce: Announce


@dataclass
class MemoryWitness:
    """Knows what a rank holds, as soon as there is something to hold."""

    training: RunningTraining | None = None


@contextmanager
def explaining(job: Job, mesh: Mesh) -> Iterator[MemoryWitness]:
    """Turn an allocator's error inside the context into ``OutOfMemory``."""
    witness = MemoryWitness()
    try:
        yield witness
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        try:
            explained = _explained(job, mesh, witness.training, str(error))
        except Exception as trouble:
            # An error in the explanation must not hide the original error.
            raise error from trouble
        raise explained from error


def _explained(job: Job, mesh: Mesh, training: RunningTraining | None, message: str) -> OutOfMemory:
    measured = measure(training.program if training else None, message)
    step = training.done + 1 if training else 0
    if training:
        # Tell the others, so that they may wait a little longer.
        training.announce(EXPLAIN, step)
    predicted = ledgers(job.workload())[mesh.coords["pp"]]
    return OutOfMemory(verdict(job, predicted, measured), step, predicted, measured)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of any kind ran out of memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or WORDS.search(str(error)) is not None


def measure(program: Program | None, message: str) -> MeasuredMemory:
    """What is allocated, by purpose; each storage counts once, however many tensors share it."""
    params = grads = optimizer = 0
    if program is not None:
        seen: set[int] = set()
        _bytes(program.placed.host.buffers, seen)  # offloaded weights are not on the device
        params = _bytes((part.local for _, part in program.placed.weights), seen)
        # During a backward pass gradients may still be on the working copies.
        held = (piece.held.parameter.grad for piece in program.pieces)
        grads = _bytes((*(piece.tensor.grad for piece in program.pieces), *held), seen)
        states = [value for states in program.optimizer.state.values() for value in states.values()]
        optimizer = _bytes([*(piece.tensor for piece in program.pieces), *states], seen)
    asked, allocated, unused = (_said(pattern, message) for pattern in (ASKED, ALLOCATED, UNUSED))
    found = MeasuredMemory(params, grads, optimizer, asked or 0, allocated)
    if torch.cuda.is_initialized():
        stats = torch.cuda.memory_stats()
        peaks = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        found = replace(found, peak_allocated=peaks[0], peak_reserved=peaks[1])
    if allocated is None or unused is None:
        # The state at the moment of the error is unknown, but it was close to the peak.
        resident = _resident() if found.peak_allocated is None else None
        return replace(found, allocated=found.peak_allocated, reserved=found.peak_reserved, resident=resident)
    return replace(found, reserved=allocated + unused, capacity=_said_capacity(message))


def _resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize()


def _said_capacity(message: str) -> int | None:
    """What this process has plus what it could still get; other processes' part of the device does not count."""
    free, used, allowed = (_said(pattern, message) for pattern in (FREE, IN_USE, ALLOWED))
    if free is None or used is None:
        return allowed
    return min(free + used, allowed or free + used)


def _bytes(tensors: Iterable[object], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        # A sharded tensor's local part: the whole has only a shape.
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _said(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return round(float(found[1]) * UNITS[found[2]]) if found else None


# The verdict.


def verdict(job: Job, predicted: Ledger, measured: MeasuredMemory) -> str:
    """The ledger beside what was measured, and what to change."""
    capacity = _capacity(job, predicted, measured)
    lines = [
        f"out of memory: tried to allocate another {amount(measured.asked)} of {amount(capacity)}",
        f"  {'':32} {'predicted':>9} {'measured':>9}  GiB",
    ]
    rest = predicted.activations + predicted.logits + predicted.buffers
    for name, foreseen, seen in (
        ("parameters", predicted.params, measured.params),
        ("gradients", predicted.grads, measured.grads),
        ("optimizer states", predicted.optimizer, measured.optimizer),
        ("activations, logits, buffers", rest, measured.rest),
        ("all tensors", predicted.peak_allocated, measured.allocated),
        ("held by the allocator", predicted.reserved, measured.reserved),
    ):
        lines.append(f"  {name:32} {_gib(foreseen):>9} {_gib(seen):>9}")
    moment = f" ({predicted.instant})" if predicted.instant else ""
    lines.append(f"  predicted: at the step's peak{moment}; measured: at the error")
    if measured.peak_allocated is not None:
        peaks = f"{_gib(measured.peak_allocated)} GiB, allocator {_gib(measured.peak_reserved)} GiB"
        lines.append(f"  peak so far: tensors {peaks}")
    if measured.resident is not None:
        lines.append(f"  resident set of this process, code included: {_gib(measured.resident)} GiB")
    factor = _shortfall(predicted, measured)
    if factor > NOTICEABLE:
        lines.append(
            f"  the run needs at least {factor:.2f} times the predicted memory; the fix below allows for it"
        )
    if measured.unused and measured.unused >= measured.asked:
        lines.append(
            f"  the allocator holds {_gib(measured.unused)} GiB in free blocks that are too small: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True avoids that"
        )
    found = nearest(job, predicted, measured)
    if found is None:
        fix = "no other layout is predicted to fit on these devices; use more devices or a smaller batch"
    else:
        fix = f"nearest change that is predicted to fit: {found}; {_slower(job, found)}"
    return "\n".join([*lines, f"  fix: {fix}"])


def nearest(job: Job, predicted: Ledger, measured: MeasuredMemory) -> Remedy | None:
    """The smallest layout change that fits on the same number of devices, even if mispredicted by as much as this
    one.
    """
    room = int(_capacity(job, predicted, measured) / _shortfall(predicted, measured))
    device = job.cluster.device.model_copy(update={"memory_bytes": max(1, room)})
    cluster = job.cluster.model_copy(update={"device": device})
    asked = PlanRequest(
        job.model,
        job.model.name,
        cluster,
        job.config.recipe,
        job.layout,
        job.config.model.lora,
        tune=job.config.tune,
        compile=job.compilation.on,
    )
    for remedy in for_layout(asked, job.layout):
        plan = remedy.plan
        # The prediction saw no problem at all, so a layout that needs as much is not credible.
        smaller = plan.memory.peak_allocated < predicted.peak_allocated
        same_run = plan.workload.recipe == job.config.recipe and plan.workload.lora == job.config.model.lora
        if plan.world == job.layout.world and plan.runs and smaller and same_run:
            return remedy
    return None


def _slower(job: Job, found: Remedy) -> str:
    """How much longer a step takes with the change, compared with the original layout had it fit."""
    change = found.plan.step.seconds / judge(job.workload()).step.seconds - 1
    if abs(change) < SAME_TIME:
        return "the step time stays the same"
    return f"a step takes {abs(change):.1%} {'longer' if change > 0 else 'less time'}"


def _shortfall(predicted: Ledger, measured: MeasuredMemory) -> float:
    """The factor by which at least more was needed than predicted: what was held plus what was requested; at least
    1.
    """
    if measured.allocated is None:
        return 1.0
    return max(1.0, (measured.allocated + measured.asked) / predicted.peak_allocated)


def _capacity(job: Job, predicted: Ledger, measured: MeasuredMemory) -> int:
    """A device's memory; for ranks that share a machine's CPU, one rank's part."""
    if measured.capacity is not None:
        return measured.capacity
    return predicted.capacity // (job.layout.world if job.cluster.device.name == "cpu" else 1)


def amount(count: int) -> str:
    if not count:
        return "an unknown amount"
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.2f} MiB"


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.2f}"
