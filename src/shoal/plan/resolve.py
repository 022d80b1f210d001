"""Resolve a config into a job: look up names, choose the layout, check everything; spawns and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.facts import support
from shoal.facts.cluster import Cluster, assemble, notation, precisions
from shoal.facts.compilation import Compilation, compilation
from shoal.facts.config import Config
from shoal.facts.layout import Layout, nearest
from shoal.facts.layout.legality import violations
from shoal.facts.model import Model, presets
from shoal.facts.problem import BadInput, Problem, seek
from shoal.plan.choose import replicas_only
from shoal.plan.judge import ask, engine_runs
from shoal.plan.search import searched, usable
from shoal.predict.workload import Workload


@dataclass(frozen=True)
class Job:
    """A config with its names resolved: the input of prediction, proof and training."""

    config: Config
    model: Model
    cluster: Cluster
    layout: Layout
    notes: tuple[str, ...] = ()  # what differs from the config, and why

    @property
    def network(self) -> Model:
        """The model as trained: with adapters, if the config has them."""
        return self.workload().network

    @property
    def compilation(self) -> Compilation:
        """Whether the engine compiles the blocks."""
        config, on_gpu = self.config, self.cluster.device.name != "cpu"
        precision, strict = config.recipe.precision, config.run.strict
        return compilation(config.compile.enabled, on_gpu, self.layout, precision, strict)

    @property
    def processes(self) -> int:
        """How many processes the agent starts, watches and restarts together: ranks or, if there are any, servers."""
        return self.config.server.servers or self.layout.world

    def workload(self) -> Workload:
        """The workload to predict, with everything in the config that affects cost."""
        config = self.config
        return Workload(
            self.model,
            self.cluster,
            config.recipe,
            self.layout,
            tune=config.tune,
            lora=config.model.lora,
            compile=self.compilation.on,
        )


def resolve(
    config: Config,
    visible: str | None = None,
    nodes: int = 1,
    ranks: int | None = None,
    trains: bool = True,
) -> Job:
    """Look up model and cluster, choose the layout if it is ``auto``, and report every problem at once.

    ``visible``: CUDA_VISIBLE_DEVICES, for a cluster of this machine, or of several like it. ``ranks``: how many
    another launcher has started per node, if known. ``trains``: weights are trained on rows of ``recipe.seq``;
    generation instead stops at the model's positions.
    """
    problems: list[Problem] = []
    key = "model.preset" if config.model.path is None else "model.path"
    if config.model.path is not None and config.model.path == config.model.init_from:
        key = "model.init_from"  # which implies the shape
    model = seek(key, lambda: look_up(config), problems)
    cluster = seek("cluster.on", lambda: notation.find(config.cluster.on, visible), problems)
    if cluster is not None and cluster.name == "local" and (nodes > 1 or ranks is not None):
        cluster = _several(cluster, nodes, ranks)
    config, notes = _as_computed(config, cluster)
    layout = Layout()
    if config.layout != "auto":
        layout = Layout.parse(config.layout)
    elif model and cluster:
        found = seek("layout", lambda: choose(config, cluster, model), problems)
        if found is None:
            raise BadInput([*problems, *support.missing(config, model, layout)])
        layout = found
    rows = config.recipe.loss_facts.rows
    if config.run.strict and layout.micro is None:
        layout = layout.replace(micro=rows)  # the bits of a matrix product depend on its number of rows
    elif layout.pp > 1 and layout.micro is None and layout.micro_batch(config.recipe.batch) % rows:
        layout = layout.replace(micro=rows)  # filling a pipeline would separate rows that belong together
    problems.extend([*support.missing(config, model, layout), *support.of_another_loss(config)])
    if model is not None:
        if trains:
            problems.extend(_beyond_weights(config, model))
        strict = config.run.strict
        # Ranks that share devices may be any number.
        devices = None if config.cluster.share else cluster
        illegal = nearest.problems(layout, model, config.recipe, devices, strict, support.runs)
        problems.extend(replace(problem, where="layout") for problem in illegal)
        if not illegal:
            problems.extend(_ramp_problems(config, layout, model, devices))
    if problems or model is None or cluster is None:
        raise BadInput(problems)
    return Job(config, model, cluster, layout, notes)


def _several(cluster: Cluster, nodes: int, ranks: int | None) -> Cluster:
    """``nodes`` machines like this one; a scheduler may show each rank only its own device."""
    if ranks is None or cluster.devices_per_node == ranks:
        return cluster.model_copy(update={"nodes": nodes})
    return assemble(cluster.name, cluster.device, nodes, ranks, host_memory=cluster.host_memory)


def _beyond_weights(config: Config, model: Model) -> Iterator[Problem]:
    """Rotary positions have no limit, but pretrained weights do not work well beyond their own."""
    seq, most = config.recipe.seq, model.max_positions
    if config.model.init_from is not None and model.positions != "learned" and seq > most:
        what = f"seq={seq} is longer than the {most:,} positions that the weights of model.init_from know"
        fix = f"recipe.seq = {most} or less; to extend them, model.path = a config.json with more positions"
        yield Problem(what, fix, "recipe.seq")


def _ramp_problems(
    config: Config, layout: Layout, model: Model, cluster: Cluster | None
) -> Iterator[Problem]:
    """What a layout cannot do with the smaller batches before ``recipe.batch``."""
    for stage in config.recipe.batch_ramp:
        recipe = config.recipe.model_copy(update={"batch": stage.batch, "batch_ramp": ()})
        for problem in violations(layout, model, recipe, cluster, config.run.strict):
            fix = "batches that divide as recipe.batch does, or a layout with fewer data ranks or a smaller micro"
            yield Problem(f"recipe.batch_ramp: {problem.what}", fix, "layout")


def _as_computed(config: Config, cluster: Cluster | None) -> tuple[Config, tuple[str, ...]]:
    """The config with a precision that the devices support. A CPU supports all of them, slowly."""
    asked = config.recipe.precision
    if asked not in ("fp8", "bf16") or cluster is None or precisions.has_units(cluster.device, asked):
        return config, ()
    taken, newer = precisions.usual(cluster.device), {"fp8": "Hopper", "bf16": "Ampere"}[asked]
    recipe = config.recipe.model_copy(update={"precision": taken})
    note = f"precision: {taken}, for {cluster.device.name} does not multiply in {asked}; {newer} and newer GPUs do"
    return config.model_copy(update={"recipe": recipe}), (note,)


def choose(config: Config, cluster: Cluster, model: Model | None = None) -> Layout:
    """The choice of ``shoal plan``, by the same rule (``plan/choose.py``), among layouts that the engine runs."""
    # A divisor of the ramp's smallest batch divides all batches.
    recipe = config.recipe.model_copy(update={"batch": config.recipe.batch_unit, "batch_ramp": ()})
    plain = Layout(dp=usable(cluster, recipe.batch // recipe.loss_facts.rows)[0])
    model = model or look_up(config)
    workload = Workload(
        model,
        cluster,
        recipe,
        plain,
        tune=config.tune,
        lora=config.model.lora,
        compile=config.compile.enabled,
    )
    # Strict mode has rules that the search does not know. Unsupported settings are rejected later, by name. A
    # parameter server has only replicas.
    if config.run.strict or config.server.servers or replicas_only(cluster) or not engine_runs(workload):
        return plain
    chosen = searched(workload, runnable=True).chosen
    if chosen is None:
        path = config.model.path
        asked = ask(workload, str(path) if path is not None else None)
        raise BadInput(
            f"auto: no layout that the engine runs is predicted to fit {cluster}",
            f"shoal plan {asked} says what would; a layout that you name is tried in any case",
        )
    return chosen.plan.layout


def look_up(config: Config) -> Model:
    """The model that a config names, without adapters."""
    path = config.model.path
    return presets.find(config.model.preset) if path is None else presets.at(path).base
