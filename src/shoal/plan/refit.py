"""Choose another layout for the same run when devices are lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from shoal.facts import support
from shoal.facts.layout import divisors, nearest
from shoal.facts.problem import BadInput
from shoal.plan.resolve import Job, choose


def refit(job: Job, devices: int, nodes: int = 1) -> Job:
    """The job on at most this many devices, equally many per node: as many as divide the batch, laid out by
    ``choose``. If that is impossible for a number of nodes, fewer nodes are used.
    """
    counts = [*reversed(divisors(job.config.recipe.batch_unit))]
    for on, count in product(range(nodes, 0, -1), counts):
        if count > devices // nodes * on or count % on:
            continue
        found = _laid_out(job, on, count // on)
        if found is not None:
            return found
    raise BadInput(
        f"no layout of {job.model.name} runs on {devices} device{'s' * (devices != 1)}",
        "wait for the others to come back",
    )


def _laid_out(job: Job, nodes: int, on_each: int) -> Job | None:
    """The job on all of these devices; None if no layout exists."""
    strict, recipe = job.config.run.strict, job.config.recipe
    domain = min(job.cluster.fast_domain, nodes * on_each)
    update = {"nodes": nodes, "devices_per_node": on_each, "fast_domain": domain}
    cluster = job.cluster.model_copy(update=update)
    try:
        layout = choose(job.config, cluster, job.model)
    except BadInput:
        return None  # nothing fits
    layout = layout.replace(micro=1) if strict else layout
    if layout.world % nodes or nearest.problems(layout, job.model, recipe, cluster, strict, support.runs):
        return None
    return replace(job, cluster=cluster, layout=layout)
