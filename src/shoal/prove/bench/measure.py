"""Measure a step of each peer in one run, in turns, so that temporary slowdowns of the machine affect all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from shoal.launch import local
from shoal.plan.resolve import Job
from shoal.predict.memory import ledger
from shoal.predict.memory.states import rank_states
from shoal.prove.bench.rank import PeerRequest
from shoal.prove.bench.registry import PeerKind, strategy
from shoal.prove.bench.result import PeerResult, StepBench
from shoal.prove.bench.tokens import write_tokens
from shoal.prove.bench.turns import PeerFailed, PeerRanks

# A turn begins with an unmeasured step: released memory has to be allocated again.
SETTLING_STEPS = 1
# What a process holds of a GPU besides its tensors.
CONTEXT_BYTES = 1 << 30

Say = Callable[[str], None]


def measure(
    job: Job, kinds: Sequence[PeerKind], rounds: int, steps: int, warm_up: int, say: Say
) -> StepBench:
    """Measure ``steps`` of each peer, ``rounds`` times. ``say`` reports each turn."""
    together = all_fit(job, kinds)
    results = {kind.name: PeerResult(kind.name, kind.what, kind.versions) for kind in kinds}
    local.warm_workers((*local.PRELOAD, "shoal.prove.bench.rank"), job.config)
    with TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        dataset = write_tokens(job, warm_up + rounds * (SETTLING_STEPS + steps), folder / "tokens")
        alive: dict[str, PeerRanks] = {}
        for number in range(rounds):
            # Alternate the direction, so that no peer always follows the same neighbour.
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                own = results[kind.name]
                if own.failure is not None:
                    continue
                try:
                    ranks = alive.pop(kind.name, None)
                    if ranks is None:
                        place = folder / f"{kind.name}-{number}"
                        ranks = begin(job, kind, own, dataset, place, warm_up)
                    own.add(ranks.turn(SETTLING_STEPS + steps), SETTLING_STEPS)
                    if together and number + 1 < rounds:
                        alive[kind.name] = ranks
                    else:
                        ranks.end()
                except PeerFailed as failure:
                    own.failure, own.traceback = str(failure), failure.text
                    say(f"{kind.name} failed: {failure}")
                else:
                    say(f"round {number + 1}: {kind.name} {median(own.rounds[-1]) * 1e3:,.1f} ms a step")
    return StepBench(job, list(results.values()), rounds, steps, warm_up, together)


def begin(job: Job, kind: PeerKind, own: PeerResult, dataset: Path, place: Path, warm_up: int) -> PeerRanks:
    """Start a peer's processes and run their warm-up: built, compiled, with memory at its steady state."""
    module = kind.modules.get("*") or kind.modules[strategy(job.layout) or ""]
    place.mkdir()
    started = time.perf_counter()
    ranks = PeerRanks(PeerRequest(job, module, kind.compiled, dataset, place))
    reports = ranks.turn(warm_up)
    if own.setup_s is None:
        own.setup_s = time.perf_counter() - started
        own.losses = reports[0]["losses"]
    return ranks


def all_fit(job: Job, kinds: Sequence[PeerKind]) -> bool:
    """Whether all peers fit in memory at the same time; otherwise each is restarted for every turn.

    One computes at a time, while the others hold their states. Estimated from the prediction for Shoal's own step.
    Every peer has its own processes in either case: stacks keep global state (process groups, compiler caches,
    Accelerate's singletons), and the allocator's peak then belongs to a single peer.
    """
    recipe, cluster = job.config.recipe, job.cluster
    waiting = sum(rank_states(job.model, recipe, job.layout).values()) + CONTEXT_BYTES
    computing = ledger(job.workload()).peak_allocated * max((kind.hunger for kind in kinds), default=1.0)
    on_cpu = cluster.device.name == "cpu"
    # Several ranks share one device if so configured, and always on a CPU.
    ranks = job.layout.world if on_cpu or job.config.cluster.share else 1
    return ranks * (len(kinds) * waiting + computing) <= cluster.device.memory_bytes
