"""``shoal.run``: your own training loop on several ranks; ``shoal.launch``: start the ranks from Python."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput, did_you_mean
from shoal.launch.adopt.launched_rank import told
from shoal.launch.adopt.library import join_ranks
from shoal.launch.init_rank import INTERFACES, given_threads
from shoal.launch.interfaces import interface_of
from shoal.launch.ranks import RankFailed, run_ranks
from shoal.parallel import device_context
from shoal.parallel.signed_store import SignedStore
from shoal.train.library.run import Run

# How a function started by ``launch`` gets its layout, if it asks for none.
LAYOUT = "SHOAL_LAYOUT"
LONGEST = 20 * 86400.0  # seconds: the longest wait of the system


def run(
    layout: str | Layout | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    clip: float | None = None,
    dir: str | Path | None = None,
    device: str | torch.device | None = None,
    bucket_mb: float = 25.0,
    timeout: float = 600.0,
) -> Run:
    """Join the ranks of a run; use the result in a ``with`` statement.

    ``layout``: as on the command line, ``fsdp=4`` or ``fsdp=2,zero=1``; ``auto`` chooses by the model's size.
    ``batch``: rows per step over all ranks, if no loader says so. ``clip``: the maximum gradient norm, None for no
    clipping. ``dir``: the run directory; ``prepare`` resumes what was saved there. ``timeout``: seconds before a
    collective gives up.
    """
    wanted = _parsed(layout or os.environ.get(LAYOUT, "auto"))
    if batch is not None and batch < 1:
        raise BadInput(f"batch={batch} is no number of rows", "batch=1 or more")
    if clip is not None and not clip >= 0:
        raise BadInput(f"clip={clip} is no norm", "clip=1.0, or leave it out")
    _check_world(wanted)
    ranks = join_ranks(device, timeout)
    if wanted is not None and wanted.world != ranks.world:
        raise BadInput(*_words(wanted, ranks.world))
    tune = TuneSection(bucket_mb=bucket_mb)
    return Run(ranks, wanted, batch, seed, clip, None if dir is None else Path(dir), tune)


def _parsed(layout: str | Layout) -> Layout | None:
    if isinstance(layout, Layout):
        return layout
    return None if layout.strip() == "auto" else Layout.parse(layout)


def _check_world(layout: Layout | None) -> None:
    """Check before any rank waits for another."""
    if layout is None or torch.distributed.is_initialized():
        return
    found = told()
    if (world := found.world if found else 1) != layout.world:
        raise BadInput(*_words(layout, world))


def _words(layout: Layout, world: int) -> tuple[str, str]:
    return (
        f"layout {layout} has {layout.world} rank(s), and {world} were started",
        f"torchrun --nproc-per-node {layout.world} script.py, or shoal.launch(fn, layout={str(layout)!r})",
    )


def launch(
    fn: Callable[..., Any],
    layout: str | Layout = "auto",
    *arguments: Any,
    timeout: float = LONGEST,
    **options: Any,
) -> list[Any]:
    """Start the ranks of a layout on this machine; each calls ``fn``. Returns the results in rank order.

    ``fn`` gets the run, which takes ``options`` as in ``shoal.run``, and then ``arguments``. A function without
    parameters gets nothing, and its own ``shoal.run()`` has this layout. ``timeout``: seconds for the whole call.
    """
    wanted = _parsed(layout) or Layout(dp=max(1, torch.cuda.device_count()))
    known = set(inspect.signature(run).parameters) - {"layout"}
    if unknown := options.keys() - known:
        raise BadInput(f"shoal.launch has no option {min(unknown)!r}", did_you_mean(min(unknown), known))
    importable = all(_importable(one) for one in (fn, *arguments) if isinstance(one, FunctionType | type))
    if not importable and torch.cuda.is_initialized():
        raise BadInput(
            "this process has used a GPU, and its copies could not",
            "shoal.launch before that, or fn in a module that can be imported",
        )
    given = (fn, str(wanted), arguments, options)
    try:
        return run_ranks(wanted.world, _work, given, timeout, "forkserver" if importable else "fork")
    except RankFailed as failure:
        raise RuntimeError(f"rank {failure.rank} of shoal.launch failed:\n{failure.text}") from None


def _importable(one: FunctionType | type) -> bool:
    """Whether a new process can import it by name; what a notebook or another function defines exists only in a fork
    of this process.
    """
    found = getattr(sys.modules.get(one.__module__), one.__qualname__, None) is one
    return found and (one.__module__ != "__main__" or hasattr(sys.modules["__main__"], "__file__"))


def _work(
    rank: int,
    world: int,
    store: SignedStore,
    fn: Callable[..., Any],
    layout: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ[LAYOUT] = layout
    for variable in INTERFACES:
        os.environ.setdefault(variable, interface_of(None))
    devices = torch.cuda.device_count()
    if not devices:
        torch.set_num_threads(given_threads() or max(1, usable_threads() // world))
    elif world > devices:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # otherwise NCCL rejects two ranks on one device
    if world > 1:
        if devices:
            device_context.take(torch.device("cuda", rank % devices))
        patience = timedelta(seconds=options.get("timeout", 600.0))
        backend = "nccl" if devices and str(options.get("device", "cuda")).startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store.plain, rank=rank, world_size=world, timeout=patience)
    if not inspect.signature(fn).parameters:
        return fn()
    with run(layout, **options) as one:
        return fn(one, *arguments)
