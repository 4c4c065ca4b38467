"""The one rule for kernels, on names that the libraries really use."""

import pytest

from ddp_profiler.trace import kernels
from ddp_profiler.trace.kernels import Collective, Row, Work

# From sources and published traces of NCCL 2.4 to 2.28, RCCL, MSCCL, PyTorch, vLLM and DeepEP.
COLLECTIVES = {
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "AllReduce",
    "ncclAllReduceTreeLLKernel_sum_f16(ncclColl)": "AllReduce",
    "ncclAllGatherRingLLKernel_copy_i8(ncclColl)": "AllGather",
    "ncclReduceScatterRingLLKernel_sum_f32(ncclColl)": "ReduceScatter",
    "ncclBroadcastRingLLKernel_copy_i8(ncclColl)": "Broadcast",
    "ncclReduceRingLLKernel_sum_f32(ncclColl)": "Reduce",
    "ncclSendRecvKernel_copy_i8(ncclColl)": "SendRecv",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "AllReduce",
    "ncclKernel_AllReduce_TREE_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)": "AllReduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": (
        "SendRecv"
    ),
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "Broadcast",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "AllGather",
    "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": (
        "ReduceScatter"
    ),
    "ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "Reduce",
    "void ncclKernel_AllReduceSparseBlock_Unpack<float>(float*, float*)": "AllReduce",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "AllReduce",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "AllReduce",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
        "ReduceScatter"
    ),
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "AllGather",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "SendRecv",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "Reduce",
    "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)": "AllReduce",
    "ncclSymDevKernel_AllGather_LLMC(ncclSymDevArgs)": "AllGather",
    "ncclSymkDevKernel_ReduceScatter_RailA2A_LsaLD_sum_f32(ncclSymkDevWorkArgs4K)": "ReduceScatter",
    "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)": "Unknown",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)": "Unknown",
    "_Z23ncclDevKernel_Generic_224ncclDevKernelArgsStorageILm4096EE": "Unknown",
    "ncclDevKernelDebug_Generic(ncclDevComm*, channelMasks, ncclWork*)": "Unknown",
    "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)": "Unknown",
    "mscclKernel_Sum_hip_bfloat16_Simple_false": "Unknown",
    "rcclAllReduceKernel": "AllReduce",
    "void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*, vllm::RankSignals)": (
        "AllReduce"
    ),
    "void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8, false>(aiter::RankData*)": (
        "AllReduce"
    ),
    "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16**)": (
        "AllReduce"
    ),
    "void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16>(c10::BFloat16**)": "AllReduce",
    "void multimem_one_shot_all_reduce_kernel<float, 16>(float*)": "AllReduce",
    "void multimem_all_gather_kernel<16>(char*)": "AllGather",
    "void aiter::allreduce_fusion_kernel_1stage<__hip_bfloat16, 4>(aiter::RankData*)": "AllReduce",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half> >": (
        "AllReduce"
    ),
    "void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int)": "AllReduce",
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<4>(int, int)": "ReduceScatter",
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<4>(int, int)": "AllGather",
    "kuserbuffers_pushsend(int*, int*)": "SendRecv",
    "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)": "AllToAll",
}

NO_COLLECTIVES = (
    "ampere_sgemm_128x64_tn",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
    "triton_poi_fused_add_cos_sin_0",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(at::native::ReduceOp)",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<ncclTensors>(int)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)",
    "void c10d::symmetric::barrier_free_copy(ncclWork*)",
    "void softmax_warp_forward<float, float, 8, false>(float*)",
    "void oneRankReduce<FuncPreMulSum<float> >(void*, void*, unsigned long, ncclDevRedOp_t)",
)


@pytest.mark.parametrize(("name", "expected"), COLLECTIVES.items())
@pytest.mark.parametrize("case", [str, str.lower, str.upper])
def test_collectives_of_every_generation(name, expected, case):
    assert kernels.work(case(name)) == (Work.COMMUNICATION, Collective(expected))


@pytest.mark.parametrize("name", NO_COLLECTIVES)
@pytest.mark.parametrize("case", [str, str.lower])
def test_other_kernels_compute(name, case):
    assert kernels.work(case(name)) == (Work.COMPUTE, None)


@pytest.mark.parametrize(
    "name",
    [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "CopyDeviceToDevice",
        "__amd_rocclr_copyBuffer.kd",
        "__amd_rocclr_fillBufferAligned",
        "hipMemcpyAsync",
    ],
)
def test_copies_are_memory_even_where_they_are_kernels(name):
    assert kernels.work(name) == (Work.MEMORY, None)


@pytest.mark.parametrize(
    "name", ["Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event", "Device Sync"]
)
def test_waiting_is_no_work(name):
    assert kernels.work(name) == (None, None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("allreduce", "AllReduce"),
        ("_allgather_base", "AllGather"),
        ("_reduce_scatter_base", "ReduceScatter"),
        ("all_to_allv", "AllToAll"),
        ("broadcast", "Broadcast"),
        ("_reduce_oop", "Reduce"),
        ("send", "SendRecv"),
        ("recv", "SendRecv"),
        ("gather", "Gather"),
        ("scatter", "Scatter"),
        ("barrier", "Barrier"),
        ("reduce_scatter_tensor_coalesced", "ReduceScatter"),
        ("ALLGATHER_coalesced", "AllGather"),
    ],
)
def test_arguments_say_what_a_generic_kernel_was(said, expected):
    generic = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    assert kernels.work(generic, said) == (Work.COMMUNICATION, Collective(expected))


def test_arguments_go_before_the_name():
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    assert kernels.work(name, "all_to_all")[1] == Collective.ALL_TO_ALL
    # What they say and nobody knows does not hide what the name tells.
    assert kernels.work(name, "something_new")[1] == Collective.SEND_RECV


@pytest.mark.parametrize(
    ("category", "expected"),
    [
        ("kernel", Row.KERNEL),
        ("Kernel", Row.KERNEL),
        ("gpu_memcpy", Row.MEMORY),
        ("Memcpy", Row.MEMORY),
        ("gpu_memset", Row.MEMORY),
        ("Memset", Row.MEMORY),
        ("cuda_runtime", Row.LAUNCH),
        ("Runtime", Row.LAUNCH),
        ("cuda_driver", Row.LAUNCH),
        ("privateuse1_runtime", Row.LAUNCH),
        ("cpu_op", Row.OPERATOR),
        ("Operator", Row.OPERATOR),
        ("user_annotation", Row.ANNOTATION),
        ("gpu_user_annotation", Row.GPU_ANNOTATION),
        ("cuda_sync", Row.SYNC),
        ("mtia_sync", Row.SYNC),
        ("ac2g", Row.OTHER),
        ("cpu_instant_event", Row.OTHER),
        ("python_function", Row.OTHER),
    ],
)
def test_old_and_new_categories(category, expected):
    assert kernels.row(category) == expected


def test_kinds_of_host_collectives():
    kinds = {
        "gloo:all_reduce": "AllReduce",
        "gloo:broadcast": "Broadcast",
        "gloo:all_gather": "AllGather",
        "gloo:all_to_all": "AllToAll",
        "gloo:reduce": "Reduce",
        "mpi:barrier": "Barrier",
    }
    assert {name: kernels.host_collective(name) for name in kinds} == kinds
    assert kernels.host_collective("nccl:all_reduce") is None
    assert kernels.host_collective("aten::add") is None
