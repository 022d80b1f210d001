"""Check what a run of the user's own loop supports (layouts, schedulers) before anything is placed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.train.library import given_optimizer


def check_layout(layout: Layout) -> None:
    for axis, why, instead in (
        ("cp", "a module's attention is its own", "cp=1 here"),
        ("ep", "a module sends its tokens itself", "tp= here, whose ranks share a model's experts out"),
    ):
        if getattr(layout, axis) > 1:
            raise BadInput(
                f"layout {axis}={getattr(layout, axis)}: {why}",
                f"{instead}; shoal train has it for the architectures that Shoal builds",
            )
    for part in layout.offload:
        if part.what != "optimizer":
            raise BadInput(
                f"offload={part.what} needs a network that Shoal built",
                "offload=optimizer, zero=3 or recompute=full here; shoal train has it",
            )
        if part.nvme:
            raise BadInput(
                "offload=optimizer@nvme: the states of a script's own optimizer are in memory",
                "offload=optimizer: the host's memory",
            )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, torch.amp.GradScaler):
        given_optimizer.check_optimizer(scheduler, nn.Module(), False)
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise BadInput(
            f"{type(scheduler).__name__} is not a function of the step, so a resume could not repeat it",
            "one of torch's other schedulers, or set optimizer.param_groups[i]['lr'] in the loop",
        )
    if scheduler.optimizer is not optimizer:
        raise BadInput("the scheduler is another optimizer's", "prepare both together")
