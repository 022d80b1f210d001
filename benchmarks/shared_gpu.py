"""Several NCCL ranks that share one GPU, against one rank: losses, gradients and weights of every kind of layout.

Right for correctness and memory, not for speed: ``python benchmarks/shared_gpu.py [--precision fp64] [LAYOUT ...]``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from record import record
from rich.console import Console

from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.launch import local
from shoal.plan.resolve import resolve
from shoal.prove.parity import ParityVerdict, Prover

LAYOUTS = (
    "dp=2",
    "fsdp=2",
    "fsdp=2,zero=1",
    "fsdp=2,zero=2,micro=2",
    "tp=2",
    "tp=2,sp=0",
    "pp=2",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zb",
    "pp=2,schedule=zbv",
    "pp=2,schedule=dualpipev",
    "dp=2,fsdp=2",
    "fsdp=2,tp=2",
    "fsdp=2,pp=2,schedule=zb",
    "tp=2,pp=2",
    "pp=4,schedule=interleaved",
    "dp=2,tp=2,recompute=full",
    "tp=4",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--precision", default="fp64", choices=["fp64", "fp32"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", action="append", default=[])
    asked = parser.parse_args()

    settings = ["cluster.share=true", "fault.timeout=40", "recipe.seq=64", *asked.set]
    config = load(None, settings, "dp=1").config
    job = resolve(config)
    dataset = local.tokenised(job, Console(stderr=True)).path
    local.warm_workers((*local.PRELOAD, "shoal.prove.parity_rank"))

    def tell(verdict: ParityVerdict) -> None:
        record(
            "shared_gpu",
            layout=str(verdict.layout),
            ranks=verdict.layout.world,
            precision=asked.precision,
            steps=asked.steps,
            ok=verdict.ok,
            max_loss_diff=verdict.max_loss_diff,
            max_grad_diff=verdict.max_grad_diff,
            max_param_diff=verdict.max_param_diff,
            reason=verdict.reason,
            model=job.model.name,
        )

    with tempfile.TemporaryDirectory() as folder:
        prover = Prover(config, dataset, asked.steps, asked.precision, Path(folder))
        proof = prover.prove([Layout.parse(text) for text in asked.layouts], tell)
    equal = sum(verdict.ok for verdict in proof.verdicts)
    print(f"{equal} of {len(proof.verdicts)} layouts equal one rank in {asked.precision}")


if __name__ == "__main__":
    main()
