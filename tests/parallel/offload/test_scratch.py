"""The scratch directory: owned by a live process, cleared of the dead, refused with the reason; and its files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.facts.problem import BadInput
from shoal.parallel.offload import scratch
from shoal.parallel.offload.direct_files import PIECE, DirectFiles, ScratchDamaged, aligned
from shoal.parallel.offload.scratch import (
    BLOCK,
    LOCK,
    PREFIX,
    Scratch,
    file_system,
    remove_leftovers,
    scratch_problems,
)
from shoal.train.files import disk_is_full

CPU = torch.device("cpu")
HOLD = """
import sys, time
from pathlib import Path
from shoal.parallel.offload.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]), "other", 3)
(scratch.path / "states").write_bytes(b"x" * 10000)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another run's rank, alive, with a file in its directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()


def said(root: Path, needed: int = 0, made_by_us: bool = False) -> str:
    (problem,) = scratch_problems(root, needed, made_by_us)
    assert problem.fix
    return problem.what


def test_a_good_directory_has_no_problem_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert scratch_problems(tmp_path, 2**20) == []
    assert scratch_problems(tmp_path / "run" / "scratch", 2**20, made_by_us=True) == []
    assert list(tmp_path.iterdir()) == []


def test_a_bad_directory_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(tmp_path / "no").endswith("no does not exist")
    (tmp_path / "file").touch()
    assert said(tmp_path / "file").endswith("is no directory")
    (problem,) = scratch_problems(tmp_path / "file", 0)
    assert "mkdir" not in problem.fix
    assert "room for" in said(tmp_path, 2**60) and "GiB there" in said(tmp_path, 2**60)
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))
    assert "room for 3.0 MiB, and this layout keeps 7.5 MiB there" in said(tmp_path, 15 * 2**19)
    memory = Path("/dev/shm")
    assert file_system(memory) == "tmpfs"
    assert said(memory).endswith("is in memory (tmpfs)")


def test_a_live_run_is_refused_by_name_and_a_dead_one_is_cleared(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "mine.txt").touch()
    assert f"in use by the run other (process {other.pid}" in said(tmp_path)
    assert remove_leftovers(tmp_path) == []
    with pytest.raises(BadInput, match="in use by the run other"):
        Scratch(tmp_path, "other", 3)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    held = tmp_path / f"{PREFIX}other-00003"
    assert (held / "states").exists(), "kill -9 leaves its files"
    assert scratch_problems(tmp_path, 0) == []
    assert remove_leftovers(tmp_path) == [held]
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]


def test_a_directory_that_a_launcher_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, removed = scratch._locked, list[Path]()

    def remove_first(handle: int) -> bool:
        if not removed:
            removed.extend(scratch.remove_leftovers(tmp_path))
        return locked(handle)

    monkeypatch.setattr(scratch, "_locked", remove_first)
    made = Scratch(tmp_path, "mine", 0)
    assert removed == [made.path]
    assert scratch.remove_leftovers(tmp_path) == []
    assert [owner["run"] for owner in scratch._live(tmp_path)] == ["mine"]
    made.remove()


def test_a_rank_clears_its_own_and_removes_it_at_the_end(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}run-00001"
    left.mkdir()
    (left / "states").write_bytes(b"old")
    scratch = Scratch(tmp_path, "run", 1)
    assert [one.name for one in scratch.path.iterdir()] == [LOCK]
    assert '"rank": 1' in (scratch.path / LOCK).read_text()
    scratch.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DirectFiles]:
    opened = DirectFiles(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("size", [1, 4096, 100_003, 2 * PIECE + 12345])
def test_what_is_written_is_read(files: DirectFiles, size: int) -> None:
    files.make("a", size)
    there, back = aligned(size, CPU), aligned(size, CPU)
    for round_ in range(2):
        there.copy_(torch.arange(size) % (251 - round_))
        # The read is started while the write runs, and waits for it.
        written, read = files.write("a", there), files.read("a", back)
        written.result()
        read.result()
        assert torch.equal(there, back)
    assert files.bytes == -(-size // BLOCK) * BLOCK == (files.directory / "a").stat().st_size


def test_tensors_of_any_type(files: DirectFiles) -> None:
    files.make("states", 4 * 999)
    tensor = aligned(4 * 999, CPU).view(torch.float32)
    tensor.copy_(torch.randn(999))
    kept = tensor.clone()
    files.write("states", tensor).result()
    tensor.zero_()
    files.read("states", tensor).result()
    assert torch.equal(tensor, kept)


def test_other_buffers_and_sizes_are_refused(files: DirectFiles) -> None:
    files.make("a", 5000)
    with pytest.raises(ValueError, match="aligned"):
        files.write("a", torch.empty(5001, dtype=torch.uint8)[1:])
    with pytest.raises(ValueError, match="5,000 bytes"):
        files.write("a", aligned(4999, CPU))
    with pytest.raises(ValueError, match="never written"):
        files.read("a", aligned(5000, CPU))


def test_a_flipped_bit_is_found(files: DirectFiles) -> None:
    size = PIECE + 5000
    files.make("a", size)
    buffer = aligned(size, CPU)
    buffer.fill_(7)
    files.write("a", buffer).result()
    with (files.directory / "a").open("r+b") as file:
        file.seek(PIECE + 17)
        file.write(b"\x05")
        os.fsync(file.fileno())
    with pytest.raises(ScratchDamaged, match=r"a gave back other bytes .* from byte 8,388,608 on"):
        files.read("a", buffer).result()


def test_short_reads_and_writes_go_on(files: DirectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move less than it was asked to, and not even whole blocks."""
    size = 10 * BLOCK + 100
    files.make("a", size)
    monkeypatch.setattr(os, "pwritev", _at_most(os.pwritev, 3 * BLOCK))
    monkeypatch.setattr(os, "preadv", _at_most(os.preadv, 2 * BLOCK))
    there, back = aligned(size, CPU), aligned(size, CPU)
    there.copy_(torch.arange(size) % 251)
    files.write("a", there).result()
    files.read("a", back).result()
    assert torch.equal(there, back)


def test_a_full_disk_says_so_with_the_file(files: DirectFiles) -> None:
    """The kernel refuses every byte beyond the limit, as a full disk does: at the start, and in the midst of a step."""
    buffer = aligned(20 * BLOCK, CPU)
    files.make("before", buffer.numel())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * BLOCK, limits[1]))
    try:
        with pytest.raises(OSError) as at_start:
            files.make("after", buffer.numel())
        with pytest.raises(OSError) as in_step:
            files.write("before", buffer).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for caught, name in ((at_start, "after"), (in_step, "before")):
        assert disk_is_full(caught.value) and caught.value.filename.endswith(name)


def test_a_file_that_ends_early_is_an_error_of_the_disk(files: DirectFiles) -> None:
    files.make("a", 4 * BLOCK)
    buffer = aligned(4 * BLOCK, CPU)
    files.write("a", buffer).result()
    os.truncate(files.directory / "a", BLOCK)
    with pytest.raises(
        ScratchDamaged, match=r"a cannot be read or written from byte 4,096 on \(Input/output error\)"
    ):
        files.read("a", buffer).result()


def _at_most(call: Callable[..., int], most: int) -> Callable[..., int]:
    def moved(handle: int, buffers: list[memoryview], offset: int) -> int:
        return call(handle, [buffers[0][:most]], offset)

    return moved
