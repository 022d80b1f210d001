"""Time the host: the real network and the real step, so small that the device waits for it."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from shoal.comm.measure import wait
from shoal.facts.calibration.measurements import HostWork
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout, Recompute
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.models import initial
from shoal.models.decoder import Network, build
from shoal.models.initial import Slice
from shoal.parallel.mesh import Mesh
from shoal.parallel.recompute import recompute
from shoal.predict.time import operators as eager
from shoal.predict.time.operators import Widths
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint, compute_dtype

# Two depths: the difference is due to layers, the rest to everything else.
SHALLOW, DEEP = 2, 8
TIMES = 15
SEQ = 32
RECIPE = Recipe(seq=SEQ, batch=1, steps=TIMES, precision="bf16", states="fp32")


class HostTime(NamedTuple):
    forward: float
    backward: float


def host_work(device: torch.device) -> HostWork:
    """Zero on a CPU, where the host itself computes."""
    if device.type == "cpu":
        return HostWork(forward=0, backward=0, selective=0, full=0, once=0, tensor=0)
    return started(device)


def started(device: torch.device) -> HostWork:
    """How long launching takes, by kind of work."""
    kinds: dict[Recompute, tuple[HostTime, HostTime]] = {}
    for kind in ("none", "selective", "full"):
        kinds[kind] = _passes(device, SHALLOW, kind), _passes(device, DEEP, kind)
    shallow, deep = kinds["none"]
    forward, backward = (_slope(a, b) for a, b in zip(shallow, deep, strict=True))
    operators = eager.operators(_model(1), Widths(2, 4))
    again = {
        kind: (_slope(sum(kinds[kind][0]), sum(kinds[kind][1])) - forward - backward) / operators[0]
        for kind in ("selective", "full")
    }
    # A whole step minus its two passes: work done once, and per parameter.
    rest = [_step(device, layers) - sum(spent) for layers, spent in ((SHALLOW, shallow), (DEEP, deep))]
    tensors = [eager.tensors(_model(layers)) for layers in (SHALLOW, DEEP)]
    tensor = max(0.0, (rest[1] - rest[0]) / (tensors[1] - tensors[0]))
    return HostWork(
        forward=forward / operators[0],
        backward=backward / operators[1],
        selective=max(0.0, again["selective"]),
        full=max(0.0, again["full"]),
        once=max(0.0, rest[0] - tensor * tensors[0]),
        tensor=tensor,
    )


def _slope(shallow: float, deep: float) -> float:
    return max(0.0, (deep - shallow) / (DEEP - SHALLOW))


def _model(layers: int) -> Model:
    return Model(
        name="small",
        family="llama",
        layers=layers,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=512,
        vocab=512,
        max_positions=SEQ,
    )


def _batch(device: torch.device) -> Batch:
    tokens = torch.randint(512, (1, SEQ), device=device)
    positions = torch.arange(SEQ, device=device).expand(1, SEQ)
    return Batch(tokens, tokens, positions, None, torch.zeros(1, dtype=torch.int64, device=device), SEQ)


def _passes(device: torch.device, layers: int, kind: Recompute) -> HostTime:
    """Seconds until a forward and a backward pass are launched."""
    network = build(_model(layers), compute=compute_dtype(RECIPE), device=device)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    recompute(list(network.model.layers.values()), kind)
    batch = _batch(device)
    found = [_pass(network, batch, device) for _ in range(TIMES)][TIMES // 3 :]
    return HostTime(*(statistics.median(way) for way in zip(*found, strict=True)))


def _pass(network: Network, batch: Batch, device: torch.device) -> HostTime:
    for parameter in network.parameters():
        parameter.grad = None
    wait(device)
    start = time.perf_counter()
    loss, _ = network.lm_head(network(batch.tokens, batch.positions), batch.targets)
    middle = time.perf_counter()
    loss.backward()
    return HostTime(middle - start, time.perf_counter() - middle)


def _step(device: torch.device, layers: int) -> float:
    """Seconds of a whole step of one micro-batch."""
    model = _model(layers)

    def fill(slices: list[tuple[str, Slice]]) -> None:
        initial.fill(slices, model, RECIPE.seed)

    step = assemble(blueprint(model, RECIPE), RECIPE, TuneSection(), Mesh(Layout(), 0, device), fill)
    batch = _batch(device)
    found = []
    for number in range(TIMES):
        wait(device)
        start = time.perf_counter()
        step(number + 1, [batch], SEQ)
        wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[TIMES // 3 :])
