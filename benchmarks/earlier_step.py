"""Processor seconds of a step, of whichever tree is imported: what ``earlier.py --processor`` runs with each.

Other work on the machine changes how long a step takes, but hardly what it costs the processor. Nothing is used here
that earlier trees do not have.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

from shoal.facts.cluster.notation import find
from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.launch import local
from shoal.launch.init_rank import init_rank
from shoal.launch.ranks import run_ranks
from shoal.plan.resolve import Job
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint

try:
    from shoal.train.first_weights import first_weights
except ImportError:  # where earlier trees have it
    from shoal.train.program import first_weights  # type: ignore[attr-defined, no-redef]

MODEL, SEQ, BATCH = "tiny", 128, 16
WARM_UP, STEPS = 5, 40


def measure(rank: int, world: int, store: dist.Store, layout: str) -> float:
    """Of one rank with one thread, all of its threads together; the median of its steps."""
    recipe = {"seq": SEQ, "batch": BATCH, "steps": 100, "precision": "fp32", "lr": 1e-3}
    config = Config.model_validate({"recipe": recipe, "layout": layout, "cluster": {"share": True}})
    job = Job(config, PRESETS[MODEL], find("local"), Layout.parse(layout))
    mesh = init_rank(job, rank, rank, store)
    torch.set_num_threads(1)
    step = assemble(blueprint(job.model, config.recipe), config.recipe, config.tune, mesh, first_weights(job))
    rows = BATCH // world
    tokens = torch.randint(job.model.vocab, (rows, SEQ + 1))
    positions = torch.arange(SEQ).repeat(rows, 1)
    parts = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = Batch(*parts, positions, None, torch.arange(rows), rows * SEQ)
    taken = []
    for number in range(1, WARM_UP + STEPS + 1):
        began = time.process_time()
        targets, _ = step.agree(batch.count)
        step(number, [batch], targets)
        taken.append(time.process_time() - began)
    mesh.close()
    return statistics.median(taken[WARM_UP:])


if __name__ == "__main__":
    local.warm_workers((*local.PRELOAD, "shoal.launch.init_rank"))
    layout = sys.argv[1]
    print(max(run_ranks(Layout.parse(layout).world, measure, (layout,), 300.0)))
