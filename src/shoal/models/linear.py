"""Linear layers and embeddings whose parameters keep their dtype and are cast on use.

So autocast is not needed. If the dtypes already agree, as for working copies (``parallel/shards.py``) and for what
FSDP gathers, the cast is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.dropout import Dropout
from shoal.models.float8 import WeightScales
from shoal.models.nf4 import PACKED, PackedProduct, unpack

T = TypeVar("T")


class MatrixProduct(Protocol):
    """How a projection multiplies. The parts are independent of autograd, so that each can be computed when its turn
    comes.

    ``scales``: the weight's, if products need them.
    """

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: WeightScales | None) -> Tensor:
        """x·Wᵀ + b, all of one dtype."""

    def input_gradient(self, gradient: Tensor, weight: Tensor, scales: WeightScales | None) -> Tensor: ...

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """From rows: gradient [N, out], x [N, in]."""


class PlainProduct:
    """Multiplies in the dtype of its arguments."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: WeightScales | None = None
    ) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor, scales: WeightScales | None = None) -> Tensor:
        return gradient @ weight

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.T @ x


class TransformSlot(Generic[T]):
    """Holds one transform of a projection. Setting a second one raises, since it would silently replace the first."""

    def __init__(self, default: T) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, linear: Linear, owner: type) -> T:
        # Not through __dict__: the compiler would not notice that a slot has been set.
        held: T = getattr(linear, f"_{self.name}", self.default)
        return held

    def __set__(self, linear: Linear, transform: T) -> None:
        if (held := self.__get__(linear, Linear)) is not self.default:
            raise RuntimeError(
                f"a projection's {self.name} is {held} already; it cannot be {transform} as well"
            )
        setattr(linear, f"_{self.name}", transform)


class Linear(nn.Linear):
    """y = x·Wᵀ + b in the dtype of x.

    It is transformed from outside, through slots. They apply in this order, whichever was set first, and each is
    independent of the others:

    1. ``product``: how x·Wᵀ and its two gradients are computed.
    2. ``defer``: is offered a weight gradient before it is computed, and takes it (True) to have it computed later.
    3. ``lora_A``, ``lora_B``: a low-rank pair beside a frozen weight (``models/lora.py``), whose output for the same x
       is added, times ``lora_scale``. In training the first of them reads x with some features dropped
       (``lora_dropout``), as determined by the tokens' positions and noise. With ``lora_magnitude_vector`` (DoRA)
       every output is then divided by the norm of its row of the combined weight, and multiplied by a trained one.
    4. ``reduce``: completes the result if the weight is one rank's part. The bias, which is not split, is added after.

    Recomputation and compilation wrap whole blocks, and so include all of these.
    """

    product: TransformSlot[MatrixProduct] = TransformSlot(PlainProduct())
    defer: TransformSlot[Callable[[WeightGradient], bool] | None] = TransformSlot(None)
    reduce: TransformSlot[Callable[[Tensor], Tensor] | None] = TransformSlot(None)
    # Reduces row norms over the ranks that hold other inputs of the same rows.
    sum_rows: TransformSlot[Callable[[Tensor], Tensor] | None] = TransformSlot(None)

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        self.lora_scale = 1.0
        self.lora_dropout: Dropout | None = None
        self.lora_magnitude_vector: nn.Parameter | None
        self.register_parameter("lora_magnitude_vector", None)
        # Updated whenever weights change, by whatever set a product that needs them.
        self.weight_scales: WeightScales | None = None
        # The weight as its product takes it, if it was gathered that way (``parallel/float8_gather.py``).
        self.rounded_weight: Tensor | None = None
        # While a graph is traced: two of its inputs, whose gradients carry x and the output gradient out of the
        # backward graph, which then computes no weight gradient (``parallel/deferred.py``).
        self.carriers: tuple[Tensor, Tensor] | None = None

    def reset_parameters(self) -> None:
        """Leave parameters uninitialised: ``initial.initialise`` or a checkpoint sets them."""

    def forward(self, x: Tensor, positions: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """``positions``, ``noise``: of the tokens x, for an adapter's dropout."""
        if self.lora_dropout is None or positions is None:
            read = x
        else:
            read = self.lora_dropout(x, positions, noise)
        if self.reduce is None and self.lora_magnitude_vector is None:
            return self.multiply(x, read, self.bias)
        output = self.multiply(x, read, None)
        if self.reduce is not None:
            output = self.reduce(output)
        return output if self.bias is None else output + self.bias.to(x.dtype)

    def multiply(self, x: Tensor, read: Tensor, bias: Tensor | None) -> Tensor:
        """``read``: x as the adapters read it, after dropout."""
        bias = None if bias is None else bias.to(x.dtype)
        if self.weight.dtype == PACKED:
            output = PackedProduct.apply(x, self.weight, bias)
            return self.adapt(read, output, self.weight)
        weight = self.weight.to(x.dtype)
        # Only an eager backward pass asks whether to defer; a graph's defers where it has carriers.
        whole = self.carriers is None and (self.defer is None or torch.compiler.is_compiling())
        if whole and isinstance(self.product, PlainProduct):
            output = self.product(x, weight, bias)  # autograd's own functions cost the host less
        else:
            scales, carriers = self.weight_scales or (None, None), self.carriers or (None, None)
            output = _InParts.apply(x, weight, bias, self, *scales, self.rounded_weight, *carriers)
        return self.adapt(read, output, weight)

    def adapt(self, x: Tensor, output: Tensor, weight: Tensor) -> Tensor:
        """Add the adapters' output for x."""
        if self.lora_A is not None and self.lora_B is not None:
            narrow, out = self.lora_A(x), self.lora_B.weight.to(x.dtype)
            # Accumulated in the product: the second one needs no tensor of its own.
            flat = torch.addmm(output.flatten(0, -2), narrow.flatten(0, -2), out.T, alpha=self.lora_scale)
            output = flat.view(output.shape)
        if self.lora_magnitude_vector is not None:
            lengths = self.lora_magnitude_vector.to(wide_type(x.dtype))
            output = output * (lengths / self.row_lengths(weight)).to(x.dtype)
        return output

    @torch.no_grad()
    def row_lengths(self, weight: Tensor) -> Tensor:
        """Row norms of W + scale · B·A without the sum: |w|² + 2·scale·(w·a) b + scale²·b (a·a) b. No gradient."""
        assert self.lora_A is not None and self.lora_B is not None
        if weight.dtype == PACKED:
            weight = unpack(weight, self.lora_A.weight.dtype)
        wide = wide_type(weight.dtype)
        into, out = self.lora_A.weight.to(weight.dtype), self.lora_B.weight.to(wide)
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        across = 2 * self.lora_scale * (F.linear(weight, into).to(wide) * out).sum(1)
        own = self.lora_scale**2 * ((out @ F.linear(into.to(wide), into.to(wide))) * out).sum(1)
        found = squares + across + own
        return (found if self.sum_rows is None else self.sum_rows(found)).sqrt()


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The precision of row norms: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


class WeightGradient(NamedTuple):
    """The gradients of a projection's weight and bias, not computed yet."""

    linear: Linear
    x: Tensor | None  # None: the weight is frozen
    gradient: Tensor  # output gradient
    with_bias: bool

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = self.gradient.flatten(0, -2), None
        if self.x is not None:
            weight = self.linear.product.weight_gradient(rows, self.x.flatten(0, -2))
        return weight, rows.sum(0) if self.with_bias else None


class _InParts(torch.autograd.Function):
    """A product whose backward pass computes the input gradient, and the weight gradients unless deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: Linear,
        forward: Tensor | None,
        backward: Tensor | None,
        rounded: Tensor | None,
        carries_x: Tensor | None,
        carries_gradient: Tensor | None,
    ) -> Tensor:
        with_input, with_weight, *_ = ctx.needs_input_grad
        weight = weight if rounded is None else rounded
        ctx.save_for_backward(x if with_weight else None, weight if with_input else None, forward, backward)
        ctx.linear = linear
        return linear.product(x, weight, bias, _scales(forward, backward))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        back = None
        if weight is not None:
            back = ctx.linear.product.input_gradient(gradient, weight, _scales(*scales))
        with_bias = ctx.needs_input_grad[2]
        if ctx.needs_input_grad[7]:
            rows = gradient.flatten(0, -2)
            bias = rows.sum(0) if with_bias else None
            return back, None, bias, None, None, None, None, x.flatten(0, -2), rows
        if x is None and not with_bias:
            return back, *[None] * 8
        # Detached: otherwise x would keep its graph alive, and with it the stage's input.
        rest = WeightGradient(ctx.linear, None if x is None else x.detach(), gradient, with_bias)
        deferred = False
        if not torch.compiler.is_compiling():
            deferred = ctx.linear.defer is not None and ctx.linear.defer(rest)
        return back, *((None, None) if deferred else rest.compute()), *[None] * 6


def _scales(forward: Tensor | None, backward: Tensor | None) -> WeightScales | None:
    return None if forward is None else WeightScales(forward, backward)


class Embedding(nn.Embedding):
    """A lookup with its result in the compute dtype, where activations get their dtype."""

    def __init__(self, count: int, width: int, compute: torch.dtype) -> None:
        super().__init__(count, width)
        self.compute = compute

    def reset_parameters(self) -> None:
        """As for ``Linear``."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index).to(self.compute)
