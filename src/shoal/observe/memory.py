"""Track live tensor bytes by category, and what the peak consists of.

    with MemoryTracker() as tracker:
        tracker.mark(model.parameters(), "params")
        step()
    print(tracker.peak, tracker.peak_by_category())

It tracks storages, so views count once and bytes live as long as anything (autograd too) holds them. Memory that an
operator allocates and frees internally is not seen; compiled functions run as eager code while the tracker is active.
gloo's threads release a collective's buffers shortly after the wait; until then these count.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.facts.ledger import HOST
from shoal.observe.attribution import Attribution, Attributions
from shoal.observe.subclasses import is_fake, plain_tensors, takes_itself_apart


def live_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Total bytes of the storages under these tensors, each storage once, on any device."""
    storages = [plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor)]
    # A storage keeps one Python object for life, so ids distinguish even meta storages, which have no address.
    return sum(storage.nbytes() for storage in {id(storage): storage for storage in storages}.values())


class AllocationSite(NamedTuple):
    """What is held, for which module, and the line of Shoal's code that allocated it."""

    category: str
    module: str
    where: str


@dataclass(eq=False, slots=True)
class _Followed:
    """One storage: its category, its current size, and when it reached that size."""

    watch: weakref.ref[torch.UntypedStorage]
    category: str
    module: str = ""
    where: str = ""
    bytes: int = 0
    since: int = 0


class MemoryTracker(TorchDispatchMode):
    """Tracks every storage that an operator creates while active, and those of marked tensors.

    ``round_to`` rounds every storage up (512: the granularity of CUDA's allocator). ``device`` restricts counting to
    one kind of device, for example "cuda". ``origins`` attributes every new storage. ``fake`` also counts FakeTensors,
    as if they were on the device that they pretend to be on; tensors on the meta device never count. It may be entered
    inside or outside a FakeTensorMode.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        round_to: int = 1,
        fake: bool = False,
        device: str | None = None,
        origins: Attributions | None = None,
    ) -> None:
        super().__init__()
        self._origins = origins
        self._round_to = round_to
        self._fake = fake
        self._device = device
        self._followed: dict[int, _Followed] = {}
        # A storage may be freed during our bookkeeping or on another thread, so its finalizer only adds a note here.
        self._dead: deque[int] = deque()
        self._category = "other"
        self._paused = False
        self._patches: list[ExitStack] = []
        self._total = 0
        self._moment = 0
        self._newest: Attribution | None = None
        self.reset_peak()

    # Information from the caller.

    def mark(self, tensors: Iterable[torch.Tensor], category: str, module: str | None = None) -> None:
        """Assign a category to these tensors' storages for all of their life; track those not yet known.

        ``module``: their owner, if it is not the module that created them.
        """
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                followed = self._follow(plain)
                if followed is not None:
                    if (followed.category == HOST) != (category == HOST):
                        self._take_size(followed, 0)
                    followed.category = category
                    self._take_size(followed, plain.untyped_storage().nbytes())
                    followed.module = followed.module if module is None else module

    @contextmanager
    def labelled(self, category: str) -> Iterator[None]:
        """Storages created inside get this category, until marked otherwise."""
        before, self._category = self._category, category
        try:
            yield
        finally:
            self._category = before

    def reset_peak(self) -> None:
        """Restart the peak at what is held now."""
        self._bury()
        self._peak = self._total
        self._peak_moment = self._moment
        self._peak_origin: Attribution | None = None
        # Storages alive at the peak that have since been freed or resized, with their size at the time.
        self._past: list[tuple[_Followed, int]] = []

    # Results.

    def live(self) -> dict[str, int]:
        """Bytes held now, by category."""
        self._bury()
        return _by_category((followed, followed.bytes) for followed in self._followed.values())

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return self._peak

    def peak_by_category(self) -> dict[str, int]:
        """The peak by category. Marks apply retroactively: a gradient marked after the peak counts as one."""
        self._bury()
        return _by_category(self._at_peak())

    def peak_by_place(self) -> Counter[AllocationSite]:
        """The peak by module and allocating line, if there are origins."""
        self._bury()
        total: Counter[AllocationSite] = Counter()
        for followed, size in self._at_peak():
            total[AllocationSite(followed.category, followed.module, followed.where)] += size
        return total

    @property
    def peak_origin(self) -> Attribution | None:
        """The origin of the storage that set the peak, which identifies the moment."""
        return self._peak_origin

    # Tracking.

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if takes_itself_apart(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        if result is None:
            # An operator without a result may have resized its arguments.
            for tensor in plain_tensors(args):
                if tensor.layout == torch.strided:
                    self._resized(tensor.untyped_storage())
        for tensor in plain_tensors(result):
            self._follow(tensor, func, args)
        if self._origins is not None and (category := self._origins.sent_as(func, args)):
            self.mark(plain_tensors(args), category)
        return result

    def __enter__(self) -> MemoryTracker:
        with ExitStack() as patches:
            patches.enter_context(_storage_resizes_told_to(self._resized))
            if self._fake:
                patches.enter_context(_around_shape_propagation(self._pause))
            self._patches.append(patches.pop_all())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.pop().close()

    def _follow(
        self, tensor: torch.Tensor, operator: Any = None, arguments: tuple[Any, ...] = ()
    ) -> _Followed | None:
        if not self._counts(tensor):
            return None
        self._bury()
        storage = tensor.untyped_storage()
        # The Python object of a storage lives exactly as long as the storage (since torch 2.1), whether or not Python
        # holds it: its id is a key, and a weak reference reports its end.
        key = id(storage)
        followed = self._followed.get(key)
        if followed is None:
            dead = self._dead
            followed = _Followed(weakref.ref(storage, lambda _: dead.append(key)), self._category)
            if self._origins is not None and operator is not None:
                self._newest = self._origins.of(operator, arguments, tensor, self._known)
                followed.category, followed.module = self._newest.category, self._newest.module
                followed.where = self._newest.where
            self._followed[key] = followed
        self._take_size(followed, storage.nbytes())
        return followed

    def _known(self, tensor: torch.Tensor) -> str | None:
        followed = self._followed.get(id(tensor.untyped_storage()))
        return None if followed is None else followed.category

    def _at_peak(self) -> Iterator[tuple[_Followed, int]]:
        there = [
            item
            for item in self._followed.values()
            if item.since <= self._peak_moment and item.category != HOST
        ]
        yield from ((item, item.bytes) for item in there)
        yield from self._past

    def _counts(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided or (is_fake(tensor) and not self._fake):
            return False
        kind = tensor.device.type
        return kind != "meta" and self._device in (None, kind)

    def _take_size(self, followed: _Followed, size: int) -> None:
        size = -(-size // self._round_to) * self._round_to
        if size == followed.bytes:
            return
        if followed.category == HOST:
            followed.bytes = size
            return
        if followed.since <= self._peak_moment and followed.bytes:
            self._past.append((followed, followed.bytes))
        self._moment += 1
        self._total += size - followed.bytes
        followed.bytes, followed.since = size, self._moment
        if self._total > self._peak:
            self._peak, self._peak_moment = self._total, self._moment
            self._peak_origin = self._newest
            self._past.clear()

    def _bury(self) -> None:
        """Remove storages freed since the last call. Always before adding one, so the peak is correct."""
        while self._dead:
            self._take_size(self._followed.pop(self._dead.popleft()), 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._bury()
        followed = self._followed.get(id(storage))
        if followed is not None:
            self._take_size(followed, storage.nbytes())

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def _by_category(held: Iterable[tuple[_Followed, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for followed, size in held:
        total[followed.category] += size
    return {category: size for category, size in sorted(total.items()) if size}


# Two things go through no operator. Both are patched in torch here, only while a tracker is active.


def _storage_resizes_told_to(tell: Callable[[torch.UntypedStorage], None]) -> Any:
    """FSDP2 frees gathered parameters, and allocates them again, by resizing their storage."""
    resize = torch.UntypedStorage.resize_

    @functools.wraps(resize)
    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        tell(storage)
        return result

    return _replaced(torch.UntypedStorage, "resize_", resize_and_tell)


@contextmanager
def _around_shape_propagation(pause: Callable[[], Any]) -> Iterator[None]:
    """DTensor computes an operator's global output shape by running it on fake tensors of global shape.

    In a fake run nothing else distinguishes these from the run's own. The method is private; torch 2.11 to 2.13 have
    it.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    method = "_propagate_tensor_meta_non_cached"
    if not hasattr(ShardingPropagator, method):
        raise RuntimeError(
            f"torch {torch.__version__} has no ShardingPropagator.{method}: fake memory would be wrong"
        )
    propagate = getattr(ShardingPropagator, method)

    @functools.wraps(propagate)
    def propagate_unseen(*args: Any, **kwargs: Any) -> Any:
        with pause():
            return propagate(*args, **kwargs)

    with _replaced(ShardingPropagator, method, propagate_unseen):
        yield


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    inherited = name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
