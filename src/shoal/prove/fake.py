"""A world that is not there: one rank of any number of ranks runs here alone, on tensors that have no data.

The rank's own code runs as it always does. Its process group answers every collective at once and carries nothing; its
tensors have shapes, types and storages of the right size, and no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# Private, as all of torch that runs without data is (2.11 to 2.13).
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.facts.layout import Layout
from shoal.observe.subclasses import takes_itself_apart
from shoal.parallel.mesh import Mesh


@contextmanager
def fake_rank(layout: Layout, rank: int, transport: str) -> Iterator[Mesh]:
    """This process as one rank of a layout's world, which talks as if over ``transport``."""
    if layout.world > 1:
        dist.init_process_group("fake", rank=rank, world_size=layout.world)
    mesh = Mesh(layout, rank, torch.device("cpu"), transport=transport)
    try:
        # A message that nobody carries is never done; who asks must hear that it is.
        with patch.object(dist.Work, "is_completed", lambda work: True):
            yield mesh
    finally:
        mesh.close()


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors that are made inside have no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Readings():
        yield


class _Readings(TorchDispatchMode):
    """A number that is read off a tensor without data is 1: a finite loss and a finite norm, so the step goes on."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            # Asked for more often than all else together; the answer is here.
            return args[0].fake_device
        if takes_itself_apart(types):
            return NotImplemented
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        try:
            return func(*args)
        except DataDependentOutputException:
            return 1.0 if args[0].dtype.is_floating_point else 1
