"""Weights in files: where parameters rest with ``offload=params@nvme``, in the precision that the network reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.parallel.offload.direct_files import FileTransfer
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.offload.state_files import absent


class FiledWeight:
    """One parameter's file, or that of this rank's rows of it."""

    def __init__(self, number: int, rows: Tensor, staged: StagedFiles) -> None:
        """``rows``: its shape and type; its values are yet to come."""
        self._name, self._staged = f"{number:05d}.resting", staged
        self.stands = absent(rows.shape, rows.dtype)  # for it, where a tensor is asked for
        staged.files.make(self._name, rows.numel() * rows.element_size())

    def fetch(self, into: Tensor) -> FileTransfer:
        """Its values into a tensor of any memory."""
        return self._staged.fetch(self._name, into)

    def send(self, values: Tensor) -> FileTransfer:
        """New ones from there."""
        assert values.numel() == self.stands.numel()
        return self._staged.send(self._name, values.to(self.stands.dtype))

    def write(self, values: Tensor) -> None:
        """As ``send``, which has ended when this returns."""
        self.send(values).result()

    def read(self) -> Tensor:
        """A copy in the host's memory, its reader's own."""
        values = torch.empty(self.stands.shape, dtype=self.stands.dtype, device="cpu")
        self.fetch(values).result()
        return values

    def start_read(self, into: Tensor, after: Callable[[], None] | None) -> FileTransfer:
        """All of them into an aligned buffer, when ``after`` has returned."""
        return self._staged.files.read(self._name, into, after=after)

    def start_write(self, start: int, values: Tensor) -> FileTransfer:
        """Some elements, from ``start`` on, that lie in an aligned buffer."""
        return self._staged.files.write(self._name, values, start * values.element_size())
