"""Another layout for the same run, when devices are gone: the run stays the same, so only the layout may change."""

from __future__ import annotations

from dataclasses import replace

from shoal.facts import nearest, support
from shoal.facts.layout import divisors
from shoal.facts.problem import BadInput
from shoal.plan.resolve import Job, choose


def refit(job: Job, devices: int) -> Job:
    """The job on at most so many devices of one node: as many as the batch divides over, as ``choose`` lays it out."""
    strict, recipe = job.config.run.strict, job.config.recipe
    for count in reversed(divisors(recipe.batch)):
        if count > devices:
            continue
        domain = min(job.cluster.fast_domain, count)
        cluster = job.cluster.model_copy(
            update={"nodes": 1, "devices_per_node": count, "fast_domain": domain}
        )
        layout = choose(job.config, cluster, job.model)
        layout = layout.replace(micro=1) if strict else layout
        if not nearest.problems(layout, job.model, recipe, cluster, strict, support.runs):
            return replace(job, cluster=cluster, layout=layout)
    raise BadInput(
        f"no layout of {job.model.name} is left on {devices} devices", "wait for the others to come back"
    )
