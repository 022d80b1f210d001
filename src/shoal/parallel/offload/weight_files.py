"""Weights in files: the storage of parameters with ``offload=params@nvme``, in the dtype that the network reads."""

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
        """``rows``: gives shape and dtype; values come later."""
        self._name, self._staged = f"{number:05d}.resting", staged
        self.stands = absent(rows.shape, rows.dtype)  # stands for it where a tensor is needed
        staged.files.make(self._name, rows.numel() * rows.element_size())

    def fetch(self, into: Tensor) -> FileTransfer:
        """Start reading its values into a tensor in any memory."""
        return self._staged.fetch(self._name, into)

    def send(self, values: Tensor) -> FileTransfer:
        """Start writing new values from a tensor in any memory."""
        assert values.numel() == self.stands.numel()
        return self._staged.send(self._name, values.to(self.stands.dtype))

    def write(self, values: Tensor) -> None:
        """Like ``send``, but wait until it is done."""
        self.send(values).result()

    def read(self) -> Tensor:
        """A copy in host memory, owned by the caller."""
        values = torch.empty(self.stands.shape, dtype=self.stands.dtype, device="cpu")
        self.fetch(values).result()
        return values

    def start_read(self, into: Tensor, after: Callable[[], None] | None) -> FileTransfer:
        """Start reading all values into an aligned buffer, once ``after`` has returned."""
        return self._staged.files.read(self._name, into, after=after)

    def start_write(self, start: int, values: Tensor) -> FileTransfer:
        """Start writing some elements, from ``start`` on, from an aligned buffer."""
        return self._staged.files.write(self._name, values, start * values.element_size())
