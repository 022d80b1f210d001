"""From a config to a job: names looked up, the layout chosen, everything checked; nothing spawned or written."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.facts import clusters, nearest, presets, support
from shoal.facts.cluster import Cluster
from shoal.facts.config import Config
from shoal.facts.layout import Layout, divisors
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem, seek
from shoal.plan.judge import replicas
from shoal.plan.search import search
from shoal.predict.question import Question
from shoal.predict.step import bench


@dataclass(frozen=True)
class Job:
    """A config with its names resolved: what prediction, proof and training all start from."""

    config: Config
    model: Model
    cluster: Cluster
    layout: Layout


def resolve(config: Config, visible: str | None = None, nodes: int = 1) -> Job:
    """Look up model and cluster, choose the layout where it is ``auto``, and report every problem at once.

    ``visible`` is what CUDA_VISIBLE_DEVICES says, for a cluster that is this machine, or so many like it.
    """
    problems: list[Problem] = []
    key = "model.preset" if config.model.path is None else "model.path"
    model = seek(key, lambda: look_up(config), problems)
    cluster = seek("cluster.on", lambda: clusters.find(config.cluster.on, visible), problems)
    if cluster is not None and nodes > 1 and cluster.name == "local":
        cluster = cluster.model_copy(update={"nodes": nodes})
    if config.layout != "auto":
        layout = Layout.parse(config.layout)
    else:
        layout = choose(config, cluster, model) if model and cluster else Layout()
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


def choose(config: Config, cluster: Cluster, model: Model | None = None) -> Layout:
    """Replicas where they fit; else the fastest layout that does, of those that the engine runs.

    Devices of this machine, and processes on a CPU, may also stay idle: there, as many as the batch divides over.
    """
    recipe, counts = config.recipe, [cluster.devices]
    if cluster.name == "local" or cluster.device.name == "cpu":
        counts = [count for count in reversed(divisors(recipe.batch)) if count <= cluster.devices]
    plain = Layout(dp=counts[0])
    # What a CPU's processes may hold is no device's memory, and strict mode has rules that the search does not know.
    if cluster.device.name == "cpu" or config.run.strict:
        return plain
    model = model or look_up(config)
    question = Question(model, cluster, recipe, plain, tune=config.tune)
    alone = replicas(question, bench(question))
    if alone.fits:
        everything = recipe.batch <= alone.micro * plain.dp
        return plain if everything else plain.replace(micro=alone.micro)
    for devices in counts:
        found = search(model, cluster, recipe, top=1, tune=config.tune, runnable=True, devices=devices)
        if found.plans:
            return found.plans[0].layout
    return plain


def look_up(config: Config) -> Model:
    """The model that a config names."""
    path = config.model.path
    return presets.find(config.model.preset) if path is None else presets.at(path)
