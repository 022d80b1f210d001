"""The flight recorder: what it notes of real collectives, and what a reader in another process sees."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch.distributed.fsdp import fully_shard

from shoal.facts.layout import Layout
from shoal.observe import nccl
from shoal.observe.flight_recorder import MOST_CHANNELS, MOST_ENTRIES, Channel, FlightReader, FlightRecorder
from shoal.observe.record import METHODS, recording
from shoal.parallel.mesh import Mesh
from shoal.parallel.tensor_region import all_gather, all_reduce, reduce_scatter

HERE = Path(__file__).name


def _everything(rank: int, world: int, path: Path) -> None:
    """One of every collective, in the groups of a mesh; then a step of FSDP2."""
    mesh = Mesh(Layout(fsdp=2, tp=2), rank, torch.device("cpu"))
    tp = mesh.group("tp")
    assert tp is not None
    before = dict(vars(dist.ProcessGroup))
    with FlightRecorder(path / f"rank-{rank}") as flight, recording(flight, mesh.names):
        all_reduce(torch.ones(4), tp)
        all_gather(torch.ones(1, 2, 3), tp, 2)
        reduce_scatter(torch.ones(1, 2, 3), tp, 2)
        dist.broadcast(torch.ones(5), 0)
        dist.all_to_all_single(torch.ones(8), torch.ones(8))
        dist.barrier()
        own = mesh.subgroup("tp", [[0, 1]])
        if mesh.coords["tp"] == 0:
            dist.send(torch.ones(6), group=own, group_dst=1)
        else:
            dist.recv(torch.ones(6), group=own, group_src=0)
        layer = torch.nn.Linear(8, 8, bias=False)
        fully_shard(layer, mesh=mesh.sharding)
        layer(torch.ones(2, 8)).sum().backward()
    assert vars(dist.ProcessGroup) == before
    dist.barrier()


def test_every_collective_is_noted_with_its_group_its_bytes_and_its_line(tmp_path: Path) -> None:
    run_ranks(4, _everything, tmp_path)
    snapshots = [FlightReader(tmp_path / f"rank-{rank}").look(entries=True) for rank in range(4)]
    for rank, snapshot in enumerate(snapshots):
        assert snapshot is not None and snapshot.phase == "end"
        seen = [
            (entry.op, entry.channel.group, entry.channel.ranks, entry.bytes) for entry in snapshot.entries
        ]
        first = rank // 2 * 2
        pair, across, world = (first, first + 1), (rank % 2, rank % 2 + 2), (0, 1, 2, 3)
        assert seen == [
            ("all_reduce", "tp", pair, 16),
            ("all_gather", "tp", pair, 48),
            ("reduce_scatter", "tp", pair, 24),
            ("broadcast", "world", world, 20),
            ("all_to_all", "world", world, 32),
            ("barrier", "world", world, 0),
            ("send" if rank == first else "receive", "tp", pair, 24),
            ("all_gather", "fsdp", across, 256),
            ("reduce_scatter", "fsdp", across, 256),
        ]
        assert "tensor_region.py:" in snapshot.entries[0].where
        # FSDP2 calls from inside of torch; what led there is in this file.
        assert all(HERE in entry.where for entry in snapshot.entries[3:])
        assert [entry.number for entry in snapshot.entries[:3]] == [1, 2, 3]


def test_every_method_of_a_process_group_that_communicates_is_known() -> None:
    """A torch that adds or renames one fails here. The others are for failures, or nobody here calls them."""
    others = {"recv_anysource", "_end_coalescing", "_register_on_completion_hook"}
    told = [
        name
        for name, method in vars(dist.ProcessGroup).items()
        if "Work" in (getattr(method, "__doc__", None) or "").rpartition("->")[2]
    ]
    assert set(told) - others <= set(METHODS)
    assert len(told) > 10


def test_a_reader_sees_the_last_entries_and_all_counts(tmp_path: Path) -> None:
    reader = FlightReader(tmp_path / "flight" / "rank")
    assert reader.look() is None
    flight = FlightRecorder(tmp_path / "flight" / "rank")
    channel = Channel("0", "dp", tuple(range(64)))
    index = flight.describe(channel)
    assert index == 0
    flight.enter("step", 3)
    for number in range(MOST_ENTRIES + 10):
        flight.note(index, b"all_reduce", number, b"x.py:1")
    snapshot = reader.look(entries=True)
    assert snapshot is not None
    assert (snapshot.step, snapshot.phase) == (3, "step")
    assert snapshot.counts == {channel: MOST_ENTRIES + 10}
    assert [entry.number for entry in snapshot.entries] == list(range(11, MOST_ENTRIES + 11))
    again = FlightRecorder(tmp_path / "flight" / "rank")
    assert again.describe(channel) == 0
    fresh = reader.look()
    assert fresh is not None and fresh.counts == {channel: 0}


def test_more_channels_than_there_is_room_for_are_left_out(tmp_path: Path) -> None:
    flight = FlightRecorder(tmp_path / "rank")
    found = [flight.describe(Channel(str(number), "dp", (0, 1))) for number in range(MOST_CHANNELS + 1)]
    assert found == [*range(MOST_CHANNELS), None]


def _recorded_by_torch(rank: int, world: int, path: Path) -> None:
    """Torch's own record of two collectives; the second one as it is while a device still works on it."""
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), group=group)
    content = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    first, second = content["entries"][-2:]
    # gloo's own thread retires an entry some time after the caller has gone on: what a device would say is set here.
    first["retired"], second["retired"] = True, False
    nccl.dump_of(path, rank).write_bytes(pickle.dumps({**content, "entries": [first, second]}, protocol=2))
    assert nccl.pending(nccl.dump_of(path, rank)) == [nccl.Pending(group.group_name, "all_reduce", 1, False)]


def test_what_torch_recorded_of_a_device_is_read(tmp_path: Path) -> None:
    run_ranks(2, _recorded_by_torch, tmp_path)


def test_messages_of_a_batch_are_read_with_the_state_of_the_batch(tmp_path: Path) -> None:
    """NCCL's group writes down each message of a batch without ever saying that it is done; the batch says it."""

    def entry(name: str, number: int, state: str) -> dict[str, object]:
        shared = {"process_group": ("7", "pp"), "collective_seq_id": 0, "p2p_seq_id": number, "is_p2p": True}
        return {**shared, "profiling_name": f"nccl:{name}", "state": state, "retired": state == "completed"}

    entries = [
        entry("send 0->1", 1, "scheduled"),
        entry("coalesced", 1, "completed"),
        entry("recv 0<-1", 2, "scheduled"),
        entry("coalesced", 2, "started"),
        entry("send 0->1", 3, "scheduled"),  # its batch is not yet written down
    ]
    nccl.dump_of(tmp_path, 0).write_bytes(pickle.dumps({"entries": entries}, protocol=2))
    assert nccl.pending(nccl.dump_of(tmp_path, 0)) == [
        nccl.Pending("7", "recv 0<-1", 2, True),
        nccl.Pending("7", "send 0->1", 3, False),
    ]


def test_torch_calls_none_of_our_settings_deprecated(tmp_path: Path) -> None:
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "assert torch._C._distributed_c10d._dump_fr_trace()\n"
    )
    environment = {**os.environ, **nccl.settings(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_a_record_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    dump = nccl.dump_of(tmp_path, 0)
    dump.write_bytes(pickle.dumps(_Planted(marker)))
    assert nccl.pending(dump) == [] and not marker.exists()
    pickle.loads(dump.read_bytes())
    assert marker.exists()


class _Planted:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.marker,)


def test_a_rank_that_listens_is_asked_and_one_that_does_not_is_left(tmp_path: Path) -> None:
    assert not nccl.ask(tmp_path, 0)
    pipe = Path(nccl.settings(tmp_path)["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe")
    os.mkfifo(pipe)
    assert not nccl.ask(tmp_path, 0)
    listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert nccl.ask(tmp_path, 0)
    assert os.read(listening, 8) == b"1"
    os.close(listening)
