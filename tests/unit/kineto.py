"""Traces like Kineto's, built by hand or at random, with the truth about them."""

import gzip
import json
import random
import re
from dataclasses import dataclass, field

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "ampere_sgemm_128x64_tn"
NORM = (
    "void at::native::vectorized_layer_norm_kernel<float, float>(int, float, float const*, "
    "float const*, float const*, float*, float*, float*)"
)
PID, COMPUTE_STREAM, COMM_STREAM = 4711, 7, 20


def us(ns):
    """Text of a time in us with all its digits, and no more."""
    sign, ns = ("-" if ns < 0 else ""), abs(ns)
    whole, part = divmod(ns, 1000)
    return f"{sign}{whole}" + (f".{part:03d}" if part else "")


_NUMBER = re.compile(r'"@@(-?[0-9.]+)@@"')


def number(ns):
    """A time that ``dumps`` writes in us with all its digits."""
    return f"@@{us(ns)}@@"


def dumps(value, *, indent=None):
    return _NUMBER.sub(r"\1", json.dumps(value, indent=indent))


@dataclass
class Recording:
    """A trace that is being built. Times are in ns, from the recording's begin."""

    rank: int | None = 0
    world_size: int | None = 2
    backend: str | None = "nccl"
    origin_ns: int = 1_700_000_000_000_000_000
    base_ns: int | None = None
    events: list = field(default_factory=list)
    correlation: int = 1000
    more: dict = field(default_factory=dict)

    def event(self, category, name, begin, duration, *, pid=PID, tid=PID, **arguments):
        made = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": number(begin + self.origin_ns - (self.base_ns or 0)),
            "dur": number(duration),
            "args": arguments,
        }
        self.events.append(made)
        return made

    def step(self, number_, begin, duration, **more):
        return self.event("user_annotation", f"ProfilerStep#{number_}", begin, duration, **more)

    def launch(self, begin, *, name="cudaLaunchKernel", duration=5000, **more):
        self.correlation += 1
        self.event(
            "cuda_runtime", name, begin, duration, cbid=211, correlation=self.correlation, **more
        )
        return self.correlation

    def kernel(
        self,
        begin,
        duration,
        name=GEMM,
        *,
        stream=COMPUTE_STREAM,
        launched=None,
        category="kernel",
        **arguments,
    ):
        """Adds a kernel and, where ``launched`` says when, its launch."""
        given = {"device": 0, "context": 1, "stream": stream}
        if launched is not None:
            given["correlation"] = self.launch(launched)
        return self.event(
            category, name, begin, duration, pid=0, tid=stream, **{**given, **arguments}
        )

    def comm(self, begin, duration, name=ALL_REDUCE, *, stream=COMM_STREAM, **more):
        return self.kernel(begin, duration, name, stream=stream, **more)

    def copy(self, begin, duration, *, launched=None, stream=COMPUTE_STREAM):
        return self.kernel(
            begin, duration, "Memcpy HtoD (Pinned -> Device)", stream=stream, launched=launched,
            category="gpu_memcpy", bytes=4096,
        )  # fmt: skip

    def metadata(self):
        found = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": 'GPU "A" },{'}]}
        given = {"backend": self.backend, "rank": self.rank, "world_size": self.world_size}
        given = {key: value for key, value in given.items() if value is not None}
        if given:
            found["distributedInfo"] = given
        found["displayTimeUnit"] = "ns"
        if self.base_ns is not None:
            found["baseTimeNanoseconds"] = self.base_ns
        return {**found, **self.more}

    def text(self, *, indent=None, as_list=False, events_first=False):
        if as_list:
            return dumps(self.events, indent=indent).encode()
        meta = self.metadata()
        root = {"traceEvents": self.events, **meta}
        if not events_first:
            root = {**meta, "traceEvents": self.events, "traceName": "/tmp/trace.json"}
        return dumps(root, indent=indent).encode()

    def write(self, path, **how):
        data = self.text(**how)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def training(seed, *, steps=3, rank=0, layers=6, **settings):
    """A recording of some steps with random times, in which the CPU runs ahead of the GPU.

    Returns:
        The recording, and for each step the intervals in ns of (compute, comm, memory).
    """
    draw = random.Random(seed)
    made = Recording(rank=rank, **settings)
    truth, host, gpu, comm_free = [], 0, 0, 0
    for step in range(steps):
        begin = host
        compute, comm, memory = [], [], []
        host += draw.randrange(1000, 50_000)
        gpu = max(gpu, host) + draw.randrange(0, 20_000)
        length = draw.randrange(1, 9000)
        made.copy(gpu, length, launched=host)
        memory.append((gpu, gpu + length))
        gpu += length
        for layer in range(layers):
            host += draw.randrange(2000, 12_000)
            gpu = max(gpu, host + 3000) + draw.randrange(0, 9000)
            length = draw.randrange(1, 400_000)
            made.kernel(gpu, length, draw.choice([GEMM, NORM]), launched=host)
            compute.append((gpu, gpu + length))
            gpu += length
            if layer % 2:
                at = max(comm_free, gpu - length // 2)
                length = draw.randrange(1, 500_000)
                made.comm(at, length, launched=host + 1500)
                comm.append((at, at + length))
                comm_free = at + length
        host += draw.randrange(2000, 5000)
        made.step(step, begin, host - begin)
        # The next step's kernels use what was reduced.
        gpu = max(gpu, comm_free)
        truth.append((compute, comm, memory))
    draw.shuffle(made.events)
    return made, truth
