"""Digests of tensors: what changes them for certain, and what they do not depend on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.models import random
from shoal.train.guard import digest as digests
from shoal.train.guard.digest import AT_ONCE, AT_ONCE_ON_GPU, BLOCK, Digests, _weights, digest

CPU = torch.device("cpu")
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]


def of(*tensors: Tensor) -> Digests:
    return digest(tensors, CPU)


def total(tensor: Tensor) -> int:
    return int(of(tensor).totals)


def some(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return (values * 50).to(dtype) if dtype == torch.int8 else values.to(dtype)


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """In place; flipped twice is as before."""
    integers = tensor.view(-1).view(INTEGERS[tensor.element_size()])
    width = 8 * tensor.element_size()
    integers[element] ^= 1 << bit if bit < width - 1 else -(1 << bit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit(dtype: torch.dtype) -> None:
    values = some(33, dtype)
    before = total(values)
    for element in range(values.numel()):
        for bit in range(8 * values.element_size()):
            flip(values, element, bit)
            assert total(values) != before, (element, bit)
            flip(values, element, bit)
    assert total(values) == before


@pytest.mark.parametrize("bit", [0, 13, 31])
@pytest.mark.parametrize("element", [0, BLOCK - 1, BLOCK, AT_ONCE * BLOCK, (AT_ONCE + 2) * BLOCK + 4])
def test_a_bit_of_a_large_tensor_and_the_block_it_is_in(element: int, bit: int) -> None:
    """More than what is taken at once, and a block that is not full."""
    values = some((AT_ONCE + 2) * BLOCK + 5)
    before = of(values)
    flip(values, element, bit)
    now = of(values)
    assert now.totals.tolist() != before.totals.tolist()
    assert before.changed_blocks(now) == [[element // BLOCK]]


def test_why_it_is_certain() -> None:
    """A block is a sum of words times weights, modulo 2⁶⁴."""
    weights = [int(weight) for weight in _weights(CPU)]
    # An odd number has an inverse modulo 2⁶⁴, so times a difference of two 32-bit words that is not 0 it is not 0.
    assert all(weight % 2 for weight in weights)
    # Two flipped bits of different weight cannot cancel: odd multiples of different powers of 2. Nor can those of the
    # same weight, at most 2³¹, if neither the sum nor the difference of two weights is a multiple of 2³³.
    lower = [weight % 2**33 for weight in weights]
    assert len(set(lower) | {-weight % 2**33 for weight in lower}) == 2 * BLOCK
    # From a block's number and its place to what is added up is one to one: it can be undone.
    numbers = random.bits(17, torch.arange(1000))
    places = torch.arange(1000)
    assert [
        undone(int(mixed), place) for place, mixed in enumerate(random.bits(numbers, places))
    ] == numbers.tolist()


def undone(mixed: int, place: int) -> int:
    """The inverse of ``random.bits``."""
    modulus = 2**64
    value = unshifted(mixed % modulus, 31)
    value = unshifted(value * pow(random.SECOND % modulus, -1, modulus) % modulus, 27)
    value = unshifted(value * pow(random.FIRST % modulus, -1, modulus) % modulus, 30)
    return random.signed((value - (place + 1) * random.GOLDEN) % modulus)


def unshifted(value: int, count: int) -> int:
    """Undo ``value ^ value >> count``."""
    found = value
    for _ in range(64 // count):
        found = value ^ found >> count
    return found


def test_elements_that_change_places() -> None:
    values = some(3 * BLOCK)
    before = total(values)
    for one, other in ((0, 1), (5, BLOCK + 5), (7, 2 * BLOCK + 9)):
        swapped = values.clone()
        swapped[[one, other]] = values[[other, one]]
        assert total(swapped) != before


def test_zeros_of_different_sign_and_number() -> None:
    assert total(torch.zeros(8)) != total(-torch.zeros(8))
    totals = {total(torch.zeros(blocks * BLOCK)) for blocks in range(5)}
    assert len(totals) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_it_lies_does_not_matter(dtype: torch.dtype) -> None:
    """Pieces are views of larger buffers, which begin elsewhere on other ranks."""
    values = some(5000, dtype)
    for before in range(1, 4):
        buffer = torch.cat([some(before, dtype), values])
        assert total(buffer[before:]) == total(values)
    matrix = values.view(50, 100)
    assert total(matrix) == total(values)
    assert total(matrix.T.contiguous().T) == total(values)


def test_several_tensors_each_have_their_own() -> None:
    """As if they were alone, with nothing among them too."""
    tensors = [some(5), torch.empty(0), some(2 * BLOCK + 1), some(1, torch.bfloat16), torch.tensor(3.0)]
    together = of(*tensors)
    assert together.totals.tolist() == [total(tensor) for tensor in tensors]
    assert together.counts == (1, 0, 3, 1, 1)
    flip(tensors[2], BLOCK, 3)
    assert together.changed_blocks(of(*tensors)) == [[], [], [1], [], []]


def test_nothing_at_all() -> None:
    assert of().totals.tolist() == []


def test_against_whole_numbers() -> None:
    """As the definition reads, in arithmetic that knows no overflow."""
    weights = [int(weight) for weight in _weights(CPU)]
    tensors = [some(BLOCK + 3), some(7, torch.bfloat16), some(2 * BLOCK, torch.int8), some(3, torch.float64)]
    found = of(*tensors)
    numbers, totals = [], []
    for tensor in tensors:
        words = tensor.view(INTEGERS[min(tensor.element_size(), 4)]).tolist()
        blocks = [words[start : start + BLOCK] for start in range(0, len(words), BLOCK)]
        mine = [
            random.signed(sum(word * weight for word, weight in zip(block, weights, strict=False)))
            for block in blocks
        ]
        mixed = random.bits(torch.tensor(mine), torch.arange(len(mine))).tolist()
        numbers += mine
        totals.append(random.signed(sum(mixed)))
    assert found.blocks.tolist() == numbers
    assert found.totals.tolist() == totals


def mixture() -> list[Tensor]:
    """All kinds of words, and tensors that are empty, tiny, not full, not contiguous, or begin at odd addresses."""
    matrix = some(90 * 50).view(90, 50)
    return [
        *(some(count, dtype) for dtype in DTYPES for count in (1, BLOCK, BLOCK + 5)),
        torch.empty(0),
        torch.tensor(3.0),
        matrix.T,
        some(BLOCK + 2)[1:],
        some(BLOCK + 2, torch.int8)[1:],
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [True, False], ids=["one kernel", "torch"])
def test_a_gpu_has_a_cpus_numbers(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    if compiled:
        assert digests._kernel(device) is not None
    else:
        monkeypatch.setattr(digests, "_kernel", lambda device: None)
    for tensors in (mixture(), [some((AT_ONCE_ON_GPU + 2) * BLOCK + 5)], []):
        on_cpu = of(*tensors)
        # As views of something larger, so that what is odd about their addresses stays.
        on_gpu = digest([moved(tensor, device) for tensor in tensors], device)
        assert on_gpu.counts == on_cpu.counts
        assert torch.equal(on_gpu.blocks.cpu(), on_cpu.blocks)
        assert torch.equal(on_gpu.totals.cpu(), on_cpu.totals)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    storage = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("trouble", ["none of it", "no compiler", "wrong numbers"])
def test_a_kernel_that_is_not_to_be_had_or_trusted_is_not_used(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported(name: str) -> None:
        if trouble == "none of it":
            raise ModuleNotFoundError(name)

    def compiled(triton: None, language: None) -> digests.Numbers:
        if trouble == "no compiler":
            raise RuntimeError("Failed to find C compiler")
        return lambda tensors, owner, place: torch.zeros_like(owner)

    monkeypatch.setattr(digests, "import_module", imported)
    monkeypatch.setattr(digests, "_compiled", compiled)
    assert digests._kernel.__wrapped__(CPU) is None


def test_a_kernel_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "import_module", lambda name: None)
    monkeypatch.setattr(digests, "_compiled", lambda triton, language: digests._in_torch)
    assert digests._kernel.__wrapped__(CPU) is digests._in_torch
