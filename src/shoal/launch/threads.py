"""How many threads a rank computes with on a CPU.

A function of the run and of the machine, never of the moment's load: the bits of a matrix product depend on how many
threads share it, so a resume on the same machine has to come to the same number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shoal.facts.local import usable_threads
from shoal.plan.resolve import Job

GIVEN = "OMP_NUM_THREADS"
# A thread is worth its while from so many FLOPs of a layer's square matrix product, 2 · tokens · hidden². Threads wait
# for each other at the end of every operator; where another process has one of the cores, that is a whole time slice.
# Measured on a decoder of 8 layers (benchmarks/results/threads.jsonl), two threads in steps of one:
#     1 MFLOP:  0.97 times as fast on 2 quiet cores, 0.07 times where each core has another process
#    17 MFLOP:  1.3 times on 2 quiet cores (tiny at its defaults); 0.15 times where four others compute on each
#    67 MFLOP:  1.7 times on 2 quiet cores; 4.9 times with eight threads on 8 quiet cores
FLOPS_A_THREAD = 10e6


def thread_count(
    job: Job, ranks: int, available: int | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """For each of the ``ranks`` on this machine. What the user says holds, except in strict mode, which has one."""
    if job.config.run.strict:
        return 1
    given = given_threads(environment)
    if given is not None:
        return given
    share = (available or usable_threads()) // ranks
    return max(1, min(share, int(work(job) // FLOPS_A_THREAD)))


def work(job: Job) -> float:
    """FLOPs of a square matrix product of a layer, of one micro-batch on one rank."""
    tokens = job.workload().tokens
    return 2.0 * tokens * job.model.hidden**2 / job.layout.tp


def given_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """What OMP_NUM_THREADS says: ``4``, or ``4,2`` for threads within threads. None where it says nothing of use."""
    first = environment.get(GIVEN, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and len(first) < 6 and int(first) > 0 else None
