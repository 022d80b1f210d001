"""Shoal's layouts beside plain PyTorch, Accelerate and DeepSpeed: same model, data sizes, machine, in one run.

Repeats are interleaved: every contender once, then every contender again. A repeat gives each its median step; a
ratio pairs the two of one repeat, so that what slows the whole machine for a while slows both.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import signal
import statistics
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders import FAMILIES, RANKS, REFERENCE, Contender, Failed, Family, run
from peers.common import SIZES

BENCHMARKS = Path(__file__).parent.parent
ENVIRONMENTS = BENCHMARKS.parent.parent / "peers"  # beside the repository
RESAMPLES = 10_000
CHECKED_STEPS = 5
TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare losses from equal weights, time nothing"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12, help="measured in each repeat")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those")
    parser.add_argument("--tied", action="store_true", help="embedding and head are one matrix")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="of the peers")
    parser.add_argument("--no-record", action="store_true", help="leave results/parallel.jsonl alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks are ended with us
    families = [
        without_untied(FAMILIES[name]) if options.tied else FAMILIES[name] for name in options.families
    ]
    fine = check(families, options) if options.check else measure(families, options)
    sys.exit(0 if fine else 1)


def without_untied(family: Family) -> Family:
    """The hand-written pipeline cannot share a matrix between its stages."""
    return Family(family.shoal, tuple(peer for peer in family.peers if peer.script != "peers/plain_pp.py"))


def contenders_of(families: list[Family]) -> list[Contender]:
    return [contender for family in families for contender in (family.shoal, *family.peers)]


def check(families: list[Family], options: argparse.Namespace) -> bool:
    """Do all train the same? From the same weights, on the same rows, every loss against a single process's."""
    arguments = ("--steps", str(CHECKED_STEPS), *(["--tied"] if options.tied else []))
    expected = run(REFERENCE, options.environments, arguments, ranks=1)["losses"]
    print(f"{REFERENCE.name}: {' '.join(f'{loss:.6f}' for loss in expected)}")
    fine = True
    for contender in contenders_of(families):
        extra = ("--as-peers",) if contender.is_shoal else ()
        try:
            losses = run(contender, options.environments, (*arguments, *extra))["losses"]
            difference = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
            equal = difference <= TOLERANCE
            verdict = f"largest difference {difference:.1e}{'' if equal else ': NOT the same'}"
        except Failed as failure:
            equal, verdict = False, f"failed: {failure}"
        print(f"{contender.name:28} {verdict}", flush=True)
        fine = fine and equal
    return fine


def measure(families: list[Family], options: argparse.Namespace) -> bool:
    load = os.getloadavg()[0]
    seconds, versions, failures = repeat(contenders_of(families), options)
    conditions = {
        "ranks": RANKS,
        "threads_a_rank": 1,
        "sizes": asdict(SIZES),
        "tied": options.tied,
        "repeats": options.repeats,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "load_before": load,
    }
    rows = [
        contender_row(contender, seconds[contender], versions[contender])
        for contender in seconds
        if contender not in failures
    ]
    rows += [
        ratio_row(family.shoal, peer, seconds, versions)
        for family in families
        for peer in family.peers
        if not {family.shoal, peer} & failures.keys()
    ]
    show(rows)
    for contender, why in failures.items():
        print(f"{contender.name} failed: {why}", file=sys.stderr)
    if not options.no_record:
        write([row | conditions for row in rows])
    return not failures


def repeat(
    contenders: list[Contender], options: argparse.Namespace
) -> tuple[dict[Contender, list[float]], dict[Contender, dict[str, str]], dict[Contender, str]]:
    """The median step of each contender in each repeat; versions; and who failed, why."""
    arguments = ("--steps", str(options.warm_up + options.steps), *(["--tied"] if options.tied else []))
    seconds: dict[Contender, list[float]] = {contender: [] for contender in contenders}
    versions: dict[Contender, dict[str, str]] = {}
    failures: dict[Contender, str] = {}
    for number in range(options.repeats):
        # There and back, so that nobody always follows the same neighbour.
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if contender in failures:
                continue
            try:
                answer = run_again_if_needed(contender, options.environments, arguments)
            except Failed as failure:
                failures[contender] = str(failure)
                continue
            versions[contender] = answer["versions"]
            seconds[contender].append(statistics.median(answer["step_s"][options.warm_up :]))
            progress = f"repeat {number + 1}: {contender.name:28} {seconds[contender][-1]:.4f} s a step"
            print(progress, file=sys.stderr, flush=True)
    return seconds, versions, failures


def run_again_if_needed(
    contender: Contender, environments: Path, arguments: tuple[str, ...]
) -> dict[str, Any]:
    """An hour's measurement does not end with one accident; a second one in a row is no accident."""
    try:
        return run(contender, environments, arguments)
    except Failed as failure:
        print(f"{contender.name} failed, once more: {failure}", file=sys.stderr, flush=True)
        return run(contender, environments, arguments)


def contender_row(contender: Contender, seconds: list[float], versions: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "contender",
        "contender": contender.name,
        "versions": versions,
        "step_s": seconds,
        "tokens_per_s": SIZES.tokens_per_step / statistics.median(seconds),
    }


def ratio_row(
    ours: Contender,
    peer: Contender,
    seconds: dict[Contender, list[float]],
    versions: dict[Contender, dict[str, str]],
) -> dict[str, Any]:
    """Tokens a second of Shoal over the peer's: the median over repeats, and where it lies with 95 % confidence."""
    ratios = [theirs / mine for mine, theirs in zip(seconds[ours], seconds[peer], strict=True)]
    low, high = bootstrap(ratios)
    return {
        "kind": "ratio",
        "shoal": ours.name,
        "peer": peer.name,
        "versions": versions[ours] | versions[peer],
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "ratios": ratios,
    }


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'contender':28} {'tokens/s':>9} {'step, s':>8}")
    for row in rows:
        if row["kind"] == "contender":
            step = statistics.median(row["step_s"])
            print(f"{row['contender']:28} {row['tokens_per_s']:9.0f} {step:8.4f}")
    print(f"\n{'Shoal':28} {'against':28} {'ratio':>6}  95 % interval")
    for row in rows:
        if row["kind"] == "ratio":
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            print(f"{row['shoal']:28} {row['peer']:28} {row['ratio']:6.3f}  {interval}")


def write(rows: list[dict[str, Any]]) -> None:
    """As benchmarks/record.py does it, less what it prints: the table has said that."""
    sys.path.append(str(BENCHMARKS))
    from record import record

    for row in rows:
        with redirect_stdout(io.StringIO()):
            record("parallel", **row)


if __name__ == "__main__":
    main()
