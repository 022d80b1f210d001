"""From a config to a job: names looked up, the layout chosen, everything checked; nothing spawned or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.facts import clusters, nearest, presets, support
from shoal.facts.cluster import Cluster
from shoal.facts.config import Config
from shoal.facts.layout import Layout, divisors
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem

Found = TypeVar("Found")


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
    path, preset = config.model.path, config.model.preset
    if path is None:
        model = _found("model.preset", lambda: presets.find(preset), problems)
    else:
        model = _found("model.path", lambda: presets.at(path), problems)
    cluster = _found("cluster.on", lambda: clusters.find(config.cluster.on, visible), problems)
    if config.layout != "auto":
        layout = Layout.parse(config.layout)
    else:
        layout = choose(config, cluster) if cluster else Layout()
    if config.run.strict and layout.micro is None:
        layout = layout.replace(micro=1)  # the bits of a matrix product depend on how many rows it has
    problems.extend(support.missing(config, model, layout))
    if model is not None:
        strict = config.run.strict
        # Where ranks share devices there may be any number of them.
        devices = None if config.cluster.share else cluster
        problems.extend(nearest.problems(layout, model, config.recipe, devices, strict, support.runs))
    if problems or model is None or cluster is None:
        raise BadInput(problems)
    return Job(config, model, cluster, layout)


def _found(key: str, look: Callable[[], Found], problems: list[Problem]) -> Found | None:
    """What ``look`` finds; else None, and why, under the key that asked for it."""
    try:
        return look()
    except BadInput as error:
        problems.extend(Problem(f"{key}: {problem.what}", problem.fix) for problem in error.problems)
        return None


def choose(config: Config, cluster: Cluster) -> Layout:
    """A replica on every device; memory is not weighed yet.

    Devices of this machine, and processes on a CPU, may also stay idle: there, as many as the batch divides over.
    """
    if cluster.name != "local" and cluster.device.name != "cpu":
        return Layout(dp=cluster.devices)
    return Layout(dp=max(count for count in divisors(config.recipe.batch) if count <= cluster.devices))
