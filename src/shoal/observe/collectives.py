"""Count every collective and message that this rank issues, by operation and group.

    with CollectiveCounter({tensor_group.group_name: "tp"}) as counter:
        step()
    print(counter.traffic())

It sees everything that goes through torch's dispatcher, on any backend (gloo, NCCL, fake): also from autograd hooks,
with ``async_op=True``, from FSDP2, DTensor and DDP, ``isend``, ``irecv`` and ``batch_isend_irecv``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.facts.collectives import collective
from shoal.facts.traffic import Traffic, show_ranks
from shoal.observe.source_lines import line_of_ours
from shoal.observe.subclasses import plain_tensors, takes_itself_apart

# A group's readable name, from torch's name for it and its ranks; None if it has none.
Namer = Callable[[str, tuple[int, ...]], str | None]

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True)
class IssuedCall:
    """One call, as issued. A coalesced call is one call; its buffers count together."""

    op: str
    group: str
    bytes: int
    dtype: str
    peer: int | None  # sender or receiver of a message, as its rank in the group
    where: str  # the innermost line of Shoal's code
    purpose: str  # the strategy it serves; empty if unknown


class CollectiveCounter(TorchDispatchMode):
    """Counts while active; the counts stay readable afterwards, and ``reset`` starts again.

    ``names``: readable names of groups, by torch's name for the group (``group.group_name``), or as a function of that
    and its ranks. A group without a name is shown by its ranks. ``purposes``: what each group is for, by torch's name
    for it. With ``log``, ``calls`` keeps every call, in order.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        names: Mapping[str, str] | Namer | None = None,
        purposes: Mapping[str, str] | None = None,
        *,
        log: bool = False,
    ) -> None:
        super().__init__()
        self._purposes = purposes or {}
        self._name: Namer = names if callable(names) else lambda name, ranks: (names or {}).get(name)
        self._log = log
        self._known: dict[str, str] = {}
        self.reset()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled code stays compiled: its collectives are operators of their own, which are seen as it runs.
        return True

    def reset(self) -> None:
        self.calls: list[IssuedCall] = []
        self._sums: dict[tuple[str, str], tuple[int, int]] = {}

    def traffic(self) -> list[Traffic]:
        """The counts, sorted by operation and group."""
        return sorted(Traffic(*key, *sums) for key, sums in self._sums.items())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if takes_itself_apart(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in NAMESPACES:
            group = group_of_call(func, args, kwargs)
            if group is not None:
                for operation, buffers, peer in _operations(func, args, kwargs, result):
                    self._count(operation, group, buffers, peer)
        return result

    def _count(
        self,
        operation: str,
        group: dist.ProcessGroup,
        buffers: Sequence[list[torch.Tensor]],
        peer: int | None,
    ) -> None:
        largest = max((_bytes(buffer) for buffer in buffers), default=0)
        key = operation, self._readable(group)
        count, total = self._sums.get(key, (0, 0))
        self._sums[key] = (count + 1, total + largest)
        if self._log:
            dtype = next((str(tensor.dtype) for buffer in buffers for tensor in buffer), "")
            purpose = self._purposes.get(group.group_name, "")
            call = IssuedCall(*key, largest, dtype.removeprefix("torch."), peer, line_of_ours(), purpose)
            self.calls.append(call)

    def _readable(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self._known:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._known[name] = self._name(name, ranks) or show_ranks(ranks)
        return self._known[name]


def group_of_call(func: Any, args: tuple, kwargs: dict[str, Any]) -> dist.ProcessGroup | None:
    """The process group that a c10d operator communicates in; None if it does not communicate (a wait, a check).

    The only place that knows how torch passes a group to an operator: boxed as a script object, or by its name, which
    only a private function of torch (2.11 to 2.13) resolves.
    """
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    group = values.get("process_group", values.get("group_name"))
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return resolve(group)
    return dist.ProcessGroup.unbox(group)


def _operations(
    func: Any, args: tuple, kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[str, list[list[torch.Tensor]], int | None]]:
    """The operations of a call with their buffers: one list for each argument that holds tensors, and for the result.

    A message also has a peer.
    """
    name = func._schema.name.split("::")[1].strip("_")
    if name == "batch_p2p_ops":
        kinds, tensors = args[0], args[3]
        for kind, peer, tensor in zip(kinds, args[1], tensors, strict=True):
            yield collective(kind) or kind, [[tensor]], peer
        return
    # An operation that a later torch adds still shows, under torch's name.
    operation = collective(name) or name
    # A barrier's tensor only tells which device waits.
    values = () if operation == "barrier" else (*args, *kwargs.values(), result)
    peer = args[2] if operation in ("send", "receive") and isinstance(args[2], int) else None
    yield operation, [list(plain_tensors(value)) for value in values], peer


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
