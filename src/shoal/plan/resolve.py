"""From a config to a job: names looked up, the layout chosen, everything checked; nothing spawned or written."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from shoal.facts import legality, presets, support
from shoal.facts.cluster import Cluster
from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem


@dataclass(frozen=True)
class Job:
    """A config with its names resolved: what prediction, proof and training all start from."""

    config: Config
    model: Model
    cluster: Cluster
    layout: Layout


def resolve(config: Config, visible: str | None = None) -> Job:
    """Look up model and cluster, choose the layout where it is ``auto``, and report every problem at once.

    ``visible`` is what CUDA_VISIBLE_DEVICES says, for a cluster that is this machine.
    """
    problems: list[Problem] = []
    model = cluster = None
    try:
        model = presets.find(config.model.written)
    except BadInput as error:
        problems.extend(error.problems)
    try:
        cluster = Cluster.parse(config.cluster.on, visible)
    except BadInput as error:
        problems.extend(error.problems)
    if model is None or cluster is None:
        raise BadInput(problems)
    layout = choose(config, cluster) if config.layout == "auto" else Layout.parse(config.layout)
    problems.extend(legality.violations(layout, model, config.recipe, cluster, config.run.strict))
    try:
        support.check(config, model, layout)
    except BadInput as error:
        problems.extend(error.problems)
    if problems:
        raise BadInput(problems)
    return Job(config, model, cluster, layout)


def choose(config: Config, cluster: Cluster) -> Layout:
    """A replica on every device, or on as many of them as the batch divides over; memory is not weighed yet."""
    return Layout(dp=gcd(cluster.devices, config.recipe.batch))
