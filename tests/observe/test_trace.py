"""From events to where the time went: traces made by hand, where every second is known, and a real one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from shoal.facts.layout import Layout
from shoal.observe import kinds, trace
from shoal.observe.breakdown import breakdown, extents
from shoal.observe.trace import Span, sort_out
from shoal.prove.measured_bubble import compare
from shoal.prove.profile_rank import RankProfile

MAIN, AUTOGRAD, GLOO = 1, 2, 3


def named(name: str, start: float, end: float, thread: int = MAIN) -> Span:
    return Span(name, "user_annotation", start, end, thread)


def operator(name: str, start: float, end: float, thread: int = MAIN, recorded: bool = False) -> Span:
    return Span(name, "cpu_op", start, end, thread, recorded=recorded)


def test_a_step_on_a_cpu_is_shared_out_to_the_second() -> None:
    recording = sort_out(
        [
            named("shoal step", 0, 100),
            named("shoal input", 0, 5),
            named("gloo:all_reduce", 3, 5, GLOO),
            named("shoal F0.0", 5, 30),
            operator("aten::embedding", 6, 8),
            operator("aten::index_select", 7, 8),
            operator("aten::linear", 8, 20),
            operator("aten::mm", 9, 19),
            operator("aten::scaled_dot_product_attention", 20, 25),
            operator("aten::bmm", 21, 24),
            operator("aten::cross_entropy_loss", 25, 27),
            named("shoal B0.0", 30, 60),
            operator("autograd::engine::evaluate_function: MmBackward0", 30, 50),
            operator("aten::mul", 31, 35, recorded=True),
            operator("MmBackward0", 35, 50),
            operator("aten::mm", 36, 48),
            # Sent at 40, there at 70.
            named("gloo:all_reduce", 40, 70, GLOO),
            operator("Optimizer.step#AdamW.step", 70, 90),
            operator("aten::_fused_adamw_", 72, 88),
            # Another thread's business.
            operator("aten::stack", 10, 80, thread=9),
        ],
        {"0": "dp"},
    )
    assert not recording.kernels
    result = breakdown(recording)
    assert result.kinds == {
        "matrix products": 22,
        "attention": 5,
        "elementwise": 2,
        "embedding": 2,
        "loss": 2,
    }
    assert result.recompute == 4
    assert result.optimizer == 16
    assert result.communication == 32
    # The rest of it lies beside the last product; the first sum is a part of waiting for input.
    assert result.exposed == {"all_reduce dp": 70 - 48}
    assert result.input_wait == 5
    assert result.bubble == 0
    assert result.host_gaps == 1 + 4 + 1 + 2 + 12  # before and between operators, and after the update
    assert result.compute == 33


def test_ranges_of_python_and_waits_in_them_are_not_computed() -> None:
    """FSDP names what it does with ranges that look like operators, and waits inside of them."""
    recording = sort_out(
        [
            named("shoal step", 0, 40),
            named("shoal F0.0", 0, 10),
            named("FSDP::pre_forward (layers.0)", 0, 9),
            operator("c10d::_allgather_base_", 1, 3),
            named("gloo:all_gather", 3, 8, GLOO),
            operator("fsdp::split_with_sizes_copy", 8, 9),
            named("shoal B0.0", 10, 30),
            operator("autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward", 10, 28),
            operator("RegisterPostBackwardFunctionBackward", 10, 28),
            named("FSDP::post_backward_reduce (layers.0)", 11, 28),
            operator("fsdp::chunk_cat", 11, 12),
            operator("c10d::_reduce_scatter_base_", 12, 13),
            named("gloo:all_reduce", 14, 27, GLOO),  # how gloo scatters sums
        ],
        {"0": "fsdp"},
    )
    result = breakdown(recording)
    assert result.kinds == {"elementwise": 1 + 1}
    assert result.exposed == {"all_gather fsdp": 2 + 5, "reduce_scatter fsdp": 1 + 13}
    assert result.communication == 21
    assert result.host_gaps == 40 - 2 - 21


def chrome(category: str, name: str, start: float, end: float, **details: Any) -> dict[str, Any]:
    """An event as Kineto writes it, from milliseconds."""
    thread = {"kernel": 7, "gpu_memcpy": 7}.get(category, details.pop("tid", MAIN))
    times = {"ts": start * 1e3, "dur": (end - start) * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "args": details, **times}


def test_a_step_on_a_gpu_counts_kernels_by_the_operator_that_started_them() -> None:
    def launch(at: float, number: int, tid: int = MAIN, call: str = "cuda_runtime") -> dict[str, Any]:
        return chrome(call, "cudaLaunchKernelExC", at, at + 0.5, correlation=number, tid=tid)

    again = {"Sequence number": 5, "Fwd thread id": 0}
    node = "autograd::engine::evaluate_function: "
    sdpa = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_128x64x128"
    events = [
        chrome("user_annotation", "shoal step", 0, 60),
        chrome("gpu_user_annotation", "shoal step", 4, 41),
        chrome("user_annotation", "shoal input", 0, 2),
        chrome("user_annotation", "gloo:all_reduce", 0.5, 2.5, tid=GLOO),
        chrome("user_annotation", "shoal F0.0", 2, 6),
        chrome("cpu_op", "aten::linear", 2, 4),
        chrome("cpu_op", "aten::mm", 2, 4),
        launch(3, 1),
        chrome("kernel", "some_kernel", 4, 10, correlation=1),
        chrome("cpu_op", "aten::mul", 4, 6),
        launch(5, 2),
        chrome("kernel", "void at::native::vectorized_elementwise_kernel<4>", 10, 12, correlation=2),
        chrome("user_annotation", "shoal B0.0", 6, 20),
        # A piece of the loss is always computed again: that is no recomputation that a layout asks for.
        chrome("cpu_op", f"{node}NllLossBackward0", 6, 7, tid=AUTOGRAD),
        chrome("cpu_op", "aten::mm", 6, 6.9, tid=AUTOGRAD, **again),
        launch(6, 9, AUTOGRAD),
        chrome("kernel", "nvjet_sm90_tst_128x256_64x4", 12, 13, correlation=9),
        chrome("cpu_op", f"{node}MulBackward0", 7, 12, tid=AUTOGRAD),
        chrome("cpu_op", "aten::add", 8, 9, tid=AUTOGRAD, **again),
        launch(8, 3, AUTOGRAD, "cuda_driver"),
        chrome("kernel", "void at::native::vectorized_elementwise_kernel<4>", 13, 15, correlation=3),
        chrome("cpu_op", f"{node}ScaledDotProductCudnnAttentionBackward0", 12, 13, tid=AUTOGRAD),
        chrome("cpu_op", "aten::_scaled_dot_product_cudnn_attention_backward", 12, 13, tid=AUTOGRAD),
        launch(12, 10, AUTOGRAD),
        chrome("kernel", sdpa, 15, 16, correlation=10),
        # Compiled code calls no operator: its kernels' names decide.
        launch(14, 4, AUTOGRAD),
        chrome("kernel", "nvjet_hsh_128x256", 16, 20, correlation=4),
        launch(15, 11, AUTOGRAD),
        chrome("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 20, 20.5, correlation=11),
        chrome(
            "kernel",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            *(18, 26),
            **{"correlation": 5, "Process Group Name": "3", "Collective name": "allreduce"},
        ),
        # As torch sees it: until somebody waits.
        chrome("user_annotation", "nccl:all_reduce", 13, 45, tid=AUTOGRAD),
        launch(21, 6),
        chrome("kernel", "multi_tensor_apply_kernel<AdamW>", 30, 34, correlation=6),
        chrome("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 40, 41, correlation=0),
    ]
    recording = sort_out(trace.spans({"traceEvents": events}), {"3": "tp", "4": "fsdp", "9": "world"})
    assert recording.kernels
    result = breakdown(recording)
    milliseconds = {kind: round(seconds * 1e3, 6) for kind, seconds in result.kinds.items()}
    assert milliseconds == {"matrix products": 6 + 1 + 4, "attention": 1, "elementwise": 2 + 0.5}
    assert result.recompute == pytest.approx(2e-3)
    assert result.optimizer == pytest.approx(4e-3 + 1e-3)
    assert result.exposed == pytest.approx({"all_reduce tp": 5.5e-3, "all_reduce world": 0.5e-3})
    assert result.communication == pytest.approx(8e-3 + 2e-3)
    assert result.input_wait == pytest.approx(2e-3)
    assert result.host_gaps == pytest.approx((1.5 + 4 + 6 + 19) / 1e3)


def test_kernels_that_run_side_by_side_count_once() -> None:
    ranges = [named("shoal step", 0, 10), named("shoal F0.0", 0, 10)]
    beside = [Span("gemm", "kernel", 1, 5, 7), Span("copy", "kernel", 3, 8, 8)]
    result = breakdown(sort_out([*ranges, *beside]))
    assert result.kinds == {"matrix products": 4, "elementwise": 3}
    assert result.host_gaps == 3


def test_the_bubble_is_what_lies_between_a_ranks_computations_while_others_compute() -> None:
    recording = sort_out(
        [
            named("shoal step", 0, 40),
            named("shoal RF1.0<0", 1, 1.5),
            operator("aten::empty", 1, 1.25),
            named("gloo:recv", 1, 10),
            # The range opens while the message is still awaited; the stage begins with its first operator.
            named("shoal F1.0", 2, 16),
            operator("aten::mm", 10, 14),
            operator("aten::mul", 15, 16),
            named("shoal B1.0", 16, 22),
            operator("aten::mm", 16, 22),
            operator("aten::_foreach_norm", 23, 24),
            named("gloo:all_reduce", 24, 32, GLOO),
            operator("aten::_fused_adamw_", 32, 36),
        ]
    )
    assert extents(recording) == {"F1.0": (10, 16), "B1.0": (16, 22)}
    result = breakdown(recording, pipeline=(2, 30))
    assert result.bubble == (10 - 2) + 1 + (30 - 24)
    assert result.exposed_comm == 2  # what of the sum comes after the other stages have finished
    assert result.optimizer == 1 + 4
    assert result.compute == 11.25
    assert result.host_gaps == 40 - 15 - 2 - 5 - 11.25


def test_only_messages_between_stages_are_no_communication_of_the_step() -> None:
    """gloo names no group. What a computation sends goes to another axis, whose step waits for it."""
    recording = sort_out(
        [
            named("shoal step", 0, 40),
            named("shoal RF1.0<0", 0, 1),
            operator("c10d::recv_", 0, 1),
            named("gloo:recv", 0.5, 4),
            named("shoal F1.0", 1, 20),
            operator("aten::mm", 4, 6),
            operator("c10d::send", 6, 7),
            named("gloo:send", 6.5, 9),
            operator("c10d::recv_", 7, 8),
            named("gloo:recv", 7.5, 12),
            operator("aten::mm", 12, 20),
            named("shoal SF1.0>2", 20, 21),
            operator("c10d::send", 20, 21),
            named("gloo:send", 20.5, 30),
        ],
        {"0": "world", "1": "cp", "2": "pp"},
        {"0": "control", "1": "context", "2": "pipeline", "7": "pipeline"},
    )
    assert [(talk.operation, talk.start, talk.end) for talk in recording.talks] == [
        ("send", 6.5, 9),
        ("receive", 7.5, 12),
        ("send", 6, 7),
        ("receive", 7, 8),
    ]
    assert breakdown(recording).communication == 12 - 6


def test_on_a_gpu_the_group_tells_whose_message_it_is() -> None:
    def kernel(start: float, end: float, group: str, number: int) -> dict[str, Any]:
        details = {"correlation": number, "Process Group Name": group}
        return chrome(
            "kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", start, end, **details
        )

    def launch(at: float, number: int) -> dict[str, Any]:
        return chrome("cuda_runtime", "cudaLaunchKernelExC", at, at + 0.1, correlation=number)

    events = [
        chrome("user_annotation", "shoal step", 0, 60),
        chrome("user_annotation", "shoal RF1.0<0", 0, 2),
        launch(1, 1),
        kernel(1, 9, "7", 1),
        chrome("user_annotation", "shoal F1.0", 2, 6),
        launch(3, 2),
        kernel(10, 14, "3", 2),  # an all-to-all, as NCCL does it
        chrome("user_annotation", "shoal SF1.0>2", 6, 8),
        # Of a batch torch does not tell the group; the instruction that launched it does.
        launch(7, 3),
        kernel(20, 30, "", 3),
    ]
    names, purposes = {"3": "ep"}, {"3": "expert", "7": "pipeline"}
    recording = sort_out(trace.spans({"traceEvents": events}), names, purposes)
    assert [(talk.operation, talk.group) for talk in recording.talks] == [("all_to_all", "ep")]


def test_a_pipeline_of_two_ranks_from_its_traces() -> None:
    """1f1b with two micro-batches, forward 10 and backward 20 seconds; every message takes a second."""
    made = {
        0: {"F0.0": (0, 10), "F0.1": (10, 20), "B0.0": (42, 62), "B0.1": (72, 92)},
        1: {"F1.0": (11, 21), "B1.0": (21, 41), "F1.1": (41, 51), "B1.1": (51, 71)},
    }
    ranks = []
    for number, computations in made.items():
        spans = [named("shoal step", -1, 100)]
        free = -1.0
        for name, (start, end) in computations.items():
            # A rank opens the range as soon as it can, and then waits for what it needs.
            spans.append(named(f"shoal {name}", free, end))
            free = end
            spans.append(operator("aten::mm", start, end - 2))
            spans.append(operator("aten::mul", end - 1, end))
        recording = sort_out(spans)
        assert extents(recording) == computations
        shares = breakdown(recording, pipeline=(0, 92))
        assert shares.bubble == 92 - 60
        assert shares.host_gaps == 4 + 9  # a second within each computation, and around the pipeline
        ranks.append((number, extents(recording), shares))
    layout = Layout.parse("pp=2,schedule=1f1b")
    found = compare(
        layout,
        2,
        [
            RankProfile(number, {"pp": number}, [], [], shares, when, 0, {}, "", [])
            for number, when, shares in ranks
        ],
    )
    assert found is not None
    assert found.even == found.scheduled == pytest.approx(1 / 3)
    assert found.measured == pytest.approx(1 - 120 / 184)
    assert found.apart == pytest.approx((1 - 120 / 184) * 3 - 1)
    assert found.busy == [60, 60]


def test_a_chrome_trace_is_read_in_seconds(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 2e6, "dur": 5e5, "tid": 4}
    noted = {**event, "args": {"Sequence number": 3, "Fwd thread id": 0, "correlation": 8}}
    backward = {**event, "args": {"Sequence number": 3, "Fwd thread id": 1}}
    flow: dict[str, Any] = {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "ts": 1}
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"baseTimeNanoseconds": 10**9, "traceEvents": [noted, backward, flow]}, file)
    assert trace.read(path) == [
        Span("aten::mm", "cpu_op", 3.0, 3.5, 4, 8, True),
        Span("aten::mm", "cpu_op", 3.0, 3.5, 4, 0, False),
    ]


def test_of_a_real_trace_the_repeated_half_of_a_checkpoint_is_told_apart(tmp_path: Path) -> None:
    weight = torch.randn(160, 160, requires_grad=True)
    path = tmp_path / "trace.json.gz"

    def block(inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(inputs @ weight) @ weight

    for kept in (True, False):
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(trace.STEP):
            with record_function("shoal F0.0"):
                inputs = torch.randn(400, 160)
                output = block(inputs) if kept else checkpoint(block, inputs, use_reentrant=False)
            with record_function("shoal B0.0"):
                output.sum().backward()
        profiler.export_chrome_trace(str(path))
        result = breakdown(sort_out(trace.read(path)))
        assert result.kinds[kinds.MATRIX] > 0
        assert (result.recompute > 0) is not kept
        parts = result.compute + result.recompute + result.optimizer + result.host_gaps
        assert parts == pytest.approx(result.seconds)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", kinds.MATRIX),
        ("aten::_scaled_mm", kinds.MATRIX),
        ("aten::_scaled_dot_product_cudnn_attention_backward", kinds.ATTENTION),
        ("aten::embedding_dense_backward", kinds.EMBEDDING),
        ("aten::_log_softmax_backward_data", kinds.LOSS),
        ("CrossEntropyBackward", kinds.LOSS),
        ("aten::mul", None),
    ],
)
def test_names_of_operators(name: str, kind: str | None) -> None:
    assert kinds.of_operator(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x208_64x4_2x1_v_bz_coopB_NNT", kinds.MATRIX),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", kinds.MATRIX),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>",
            kinds.MATRIX,
        ),
        ("ampere_sgemm_128x64_nt", kinds.MATRIX),
        ("void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", kinds.MATRIX),
        ("void gemv2T_kernel_val<int, int, float>", kinds.MATRIX),
        ("triton_tem_fused_addmm_3", kinds.MATRIX),
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128>>",
            kinds.ATTENTION,
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", kinds.ATTENTION),
        ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80(PyTorchMemEffAttention)", kinds.ATTENTION),
        ("void cunn_SoftMaxForward<8, float, float, float, LogSoftMaxForwardEpilogue>", kinds.LOSS),
        ("void nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>", kinds.LOSS),
        ("triton_red_fused__log_softmax_nll_loss_backward_2", kinds.LOSS),
        ("void embedding_backward_feature_kernel<float, float, int>", kinds.EMBEDDING),
        ("triton_poi_fused__scaled_dot_product_flash_attention_mul_1", kinds.MEMORY_BOUND),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", None),
    ],
)
def test_names_of_kernels(name: str, kind: str | None) -> None:
    assert kinds.of_kernel(name) == kind


@pytest.mark.parametrize(
    ("name", "talks", "operation"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True, "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", True, "reduce_scatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", True, "all_gather"),
        ("ncclSymkDevKernel_AllGather_LL", True, "all_gather"),
        ("ncclDevKernel_SendRecv", True, "all_to_all"),
        ("gloo:all_to_all", True, "all_to_all"),
        ("nccl:all_reduce", False, "all_reduce"),
        ("nvjet_hsh_128x256", False, "other"),
    ],
)
def test_names_of_collectives(name: str, talks: bool, operation: str) -> None:
    assert (kinds.is_collective(name), kinds.operation(name)) == (talks, operation)
