"""The columns of every table: name, type and meaning. docs/python-api.md has the same rows.

A name ends in its unit. Columns may be added; none is renamed, none gets another unit or meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_profiler.analysis.parts import PARTS

TEXT = "string"
WHOLE = "Int64"
NUMBER = "float64"
TRUTH = "boolean"
ANY = "object"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Ends in its unit where it has one.
        kind: The dtype. In ``Int64``, ``boolean`` and ``string`` what does not apply is
            ``pandas.NA``, in ``float64`` NaN.
        meaning: In words.
    """

    name: str
    kind: str
    meaning: str


_LEVEL = Column("level", TEXT, "id of the level")
_DP = Column("dp", WHOLE, "data-parallel replicas")
_RANK = Column("rank", WHOLE, "global rank")
_STEP = Column("step", WHOLE, "number of the step at its level, from 0, as in the heat map")
_PARTS_MS = tuple(Column(f"{part}_ms", NUMBER, f"part `{part}`") for part in PARTS)
_BATCH = (
    Column("micro_batch", WHOLE, "samples of a rank in a micro-step"),
    Column("accumulation", WHOLE, "micro-steps in an optimizer step"),
    Column("global_batch", WHOLE, "micro_batch x accumulation x dp, in samples"),
)
_IN_FLIGHT = (
    Column("begin_ms", NUMBER, "hand-over, after the step's begin on this rank"),
    Column("hidden_until_ms", NUMBER, "end of what is hidden behind computation"),
    Column("end_ms", NUMBER, "completion"),
    Column("hidden_ms", NUMBER, "hidden_until_ms - begin_ms"),
    Column("exposed_ms", NUMBER, "end_ms - hidden_until_ms"),
    Column(
        "completion_noticed", TRUTH, "whether completion was seen; else end_ms is backward's end"
    ),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "levels": (
        _LEVEL,
        _DP,
        Column("nodes", WHOLE, "nodes that its ranks are on"),
        Column("placement", TEXT, "`packed` or `spread`"),
        *_BATCH,
        Column("repetitions", WHOLE, "times that the level was measured afresh"),
        Column("steps", WHOLE, "plain steps"),
        Column("step_mean_ms", NUMBER, "plain step, mean over ranks and steps"),
        Column("step_median_ms", NUMBER, "its median"),
        Column("step_p10_ms", NUMBER, "its 10th percentile"),
        Column("step_p90_ms", NUMBER, "its 90th percentile"),
        Column("step_ci95_low_ms", NUMBER, "95 % interval of the median, lower end"),
        Column("step_ci95_high_ms", NUMBER, "upper end"),
        Column("instrumented_step_mean_ms", NUMBER, "step with all marks: the sum of the parts"),
        Column("overhead_pct", NUMBER, "what the marks add to a step, in per cent"),
        Column("samples_per_s", NUMBER, "throughput of all ranks"),
        Column("tokens_per_s", NUMBER, "the same in tokens"),
        Column("speedup", NUMBER, "throughput over that of `reference`"),
        Column("efficiency", NUMBER, "speedup / dp"),
        Column("reference", TEXT, "id of the dp = 1 level that it is compared with"),
        Column("mfu", NUMBER, "achieved over peak FLOP/s"),
        Column("bound", TEXT, "`input`, `communication`, `compute`, `memory` or `none`"),
        Column("comm_busy_ms", NUMBER, "gradient collectives in flight, a step"),
        Column("comm_overlapped_ms", NUMBER, "the part of it behind computation"),
        Column("overlap_fraction", NUMBER, "comm_overlapped_ms / comm_busy_ms"),
        Column("gradient_bytes", WHOLE, "bytes reduced in a step"),
        Column("num_buckets", WHOLE, "DDP's buckets"),
        Column("contention_ms", NUMBER, "what communication costs the backward beside it"),
        Column("wrapper_ms", NUMBER, "DDP at dp = 1 less the bare model"),
        Column("clock_uncertainty_ms", NUMBER, "how far ranks' clocks may be apart"),
        Column("withheld", TEXT, "why waiting and transfer are not told apart"),
        Column("batch_declared", WHOLE, "global batch by the user's word"),
        Column("batch_configured", WHOLE, "global batch by the settings"),
        Column("batch_observed", WHOLE, "samples that entered forward in a step"),
        Column("batch_ok", TRUTH, "whether all that are known agree"),
        Column("gradient_max_rel_error", NUMBER, "against one process that sees the global batch"),
        Column("ranks_agree", TRUTH, "whether gradients were equal on all ranks"),
    ),
    "parts": (
        _LEVEL,
        _DP,
        Column("part", TEXT, "name of the part, in the order of the step"),
        Column("time_ms", NUMBER, "mean over ranks and steps"),
        Column("ci95_low_ms", NUMBER, "95 % interval of the mean over steps, lower end"),
        Column("ci95_high_ms", NUMBER, "upper end"),
    ),
    "ranks": (
        _LEVEL,
        _DP,
        _RANK,
        Column("node", WHOLE, "index of its node"),
        Column("hostname", TEXT, "the node's name"),
        Column("steps", WHOLE, "instrumented steps"),
        Column("step_ms", NUMBER, "instrumented step, mean"),
        *_PARTS_MS,
        Column("machine_wall_ms", NUMBER, "time that the machine figures cover"),
        Column("machine_user_ms", NUMBER, "processor time outside the kernel, all threads"),
        Column("machine_system_ms", NUMBER, "processor time inside the kernel, all threads"),
        Column("machine_run_delay_ms", NUMBER, "time that ready threads had no core"),
        Column("machine_preemptions", WHOLE, "involuntary context switches"),
        Column("machine_steal_fraction", NUMBER, "share of its cores given to other machines"),
        Column("machine_busy_fraction", NUMBER, "share of its cores in use by anything"),
        Column("machine_throttled_ms", NUMBER, "held back by the cgroup's limit"),
        Column("machine_cpu_mhz", NUMBER, "mean clock of its cores"),
        Column("machine_cores", WHOLE, "cores that it may use"),
        Column("machine_threads", WHOLE, "threads that torch computes with"),
        Column("gpu_sm_mhz", NUMBER, "mean clock of the GPU's multiprocessors"),
        Column("gpu_power_w", NUMBER, "mean power draw in W"),
        Column("gpu_temperature_c", NUMBER, "highest temperature in degrees Celsius"),
    ),
    "steps": (
        _LEVEL,
        _DP,
        Column("variant", TEXT, "`instrumented`, `plain` or `warmup`"),
        _RANK,
        _STEP,
        Column("repetition", WHOLE, "which measurement of the level"),
        Column("recorded_step", WHOLE, "the step's number in the record"),
        Column("block", WHOLE, "block of steps of one variant"),
        Column("step_ms", NUMBER, "length of the step"),
        *_PARTS_MS,
        Column("samples", WHOLE, "samples that entered forward"),
        Column("micro_steps", WHOLE, "forward calls"),
        Column("comm_busy_ms", NUMBER, "gradient collectives in flight"),
        Column("comm_overlapped_ms", NUMBER, "the part of it behind computation"),
        Column("collectives", WHOLE, "gradient collectives"),
        Column("gradient_bytes", WHOLE, "bytes handed to them"),
    ),
    "collectives": (
        _LEVEL,
        _RANK,
        _STEP,
        Column("repetition", WHOLE, "which measurement of the level"),
        Column("recorded_step", WHOLE, "the step's number in the record"),
        Column("micro_step", WHOLE, "micro-step of its hand-over"),
        Column("collective", WHOLE, "number in its step, from 0"),
        Column("bytes", WHOLE, "bytes reduced"),
        *_IN_FLIGHT,
    ),
    "buckets": (
        _LEVEL,
        _RANK,
        _STEP,
        Column("first_collective", WHOLE, "number in its step, from 0"),
        Column("last_collective", WHOLE, "another one where neighbours share a row"),
        Column("bytes", WHOLE, "bytes of all of them"),
        *_IN_FLIGHT,
    ),
    "phases": (
        _LEVEL,
        _RANK,
        _STEP,
        Column("part", TEXT, "name of the part; `exposed` where its parts are not told apart"),
        Column("begin_ms", NUMBER, "after the step's begin on the first rank shown"),
        Column("end_ms", NUMBER, "likewise"),
    ),
    "rank_heat_map": (
        _LEVEL,
        Column("first_rank", WHOLE, "global rank"),
        Column("last_rank", WHOLE, "another one where ranks share a row"),
        Column("first_step", WHOLE, "number of the step at its level, from 0"),
        Column("last_step", WHOLE, "another one where steps share a column"),
        Column("excess_ms", NUMBER, "own work less that of the lower median rank"),
    ),
    "stragglers": (
        _LEVEL,
        _RANK,
        Column("lag_ms", NUMBER, "how much later than the second-last it comes, median"),
        Column("share_of_steps_fraction", NUMBER, "steps in which it is late"),
        Column("fixed", TRUTH, "whether it is late in most steps"),
        Column("cause", TEXT, "the part in which it takes longer, or `several`"),
        Column("at", TEXT, "where the others wait for it"),
        Column("recoverable_ms", NUMBER, "lag a step, mean over all steps"),
        Column("uncertainty_ms", NUMBER, "how far clocks may make it wrong"),
        Column("evidence", TEXT, "what the machine shows about the rank, a line each"),
    ),
    "allreduce": (
        _LEVEL,
        _DP,
        Column("kind", TEXT, "`sweep` (message sizes) or `bucket` (the model's)"),
        Column("bucket", WHOLE, "number of the bucket, in the order of reduction"),
        Column("bytes", WHOLE, "bytes reduced"),
        Column("count", WHOLE, "AllReduces measured"),
        Column("time_ms", NUMBER, "median"),
        Column("p10_ms", NUMBER, "10th percentile"),
        Column("p90_ms", NUMBER, "90th percentile"),
        Column("algbw_gb_per_s", NUMBER, "bytes / time, in 10^9 bytes per s"),
        Column("busbw_gb_per_s", NUMBER, "algbw x 2(n-1)/n"),
        Column("ring_bound_ms", NUMBER, "least time that the link allows a ring"),
        Column("link", TEXT, "the link's name"),
        Column("link_gbit_per_s", NUMBER, "its rate, one way, in 10^9 bit per s"),
        Column("link_source", TEXT, "`measured` or `declared`"),
    ),
    "waterfall": (
        _LEVEL,
        _DP,
        Column("term", TEXT, "`bare`, then what is added, `residual`, `measured`"),
        Column("time_ms", NUMBER, "the step in `bare` and `measured`, else what the term adds"),
    ),
    "findings": (
        Column("id", TEXT, "what it is about, in a word"),
        Column("severity", TEXT, "`error`, `warning` or `info`"),
        Column("message", TEXT, "what was found"),
        Column("evidence", TEXT, "by which numbers"),
        Column("expected_gain_ms", NUMBER, "what mending it would save of a step"),
        Column("expected_gain_pct", NUMBER, "the same in per cent of the step"),
    ),
    "predictions": (
        _DP,
        Column("nodes", WHOLE, "nodes that the ranks are on"),
        *_BATCH,
        Column("bucket_cap_mb", NUMBER, "size limit of buckets, in MB of 2**20 bytes"),
        Column("step_ms", NUMBER, "predicted step"),
        Column("step_interval90_low_ms", NUMBER, "90 % of what it may be, lower end"),
        Column("step_interval90_high_ms", NUMBER, "upper end"),
        Column("measured_ms", NUMBER, "mean plain step where this was measured"),
        Column("samples_per_s", NUMBER, "throughput of all ranks"),
        Column("efficiency", NUMBER, "throughput over dp times that of dp = 1"),
        *_PARTS_MS,
        Column("overlap_fraction", NUMBER, "share of communication that is hidden"),
        Column("allreduce_ms", NUMBER, "all buckets at once, nothing beside them"),
        Column("no_overlap_ms", NUMBER, "step if nothing were hidden"),
        Column("perfect_overlap_ms", NUMBER, "step if all that can be were hidden"),
        Column("extrapolated", TRUTH, "whether it goes beyond what was measured"),
        Column("notes", TEXT, "why, and what is assumed, a line each"),
    ),
    "back_test": (
        Column("held_out", TEXT, "id of the level that is predicted from the others"),
        Column("predicted_ms", NUMBER, "its step"),
        Column("interval90_low_ms", NUMBER, "the prediction's interval, lower end"),
        Column("interval90_high_ms", NUMBER, "upper end"),
        Column("measured_ms", NUMBER, "its mean plain step"),
        Column("error_pct", NUMBER, "predicted over measured, less 1, in per cent"),
    ),
    "environment": (
        Column("node", TEXT, "index of the node"),
        Column("name", TEXT, "what it is"),
        Column("value", ANY, "text, number, truth, list or dict"),
    ),
    "settings": (
        Column("name", TEXT, "name of the setting"),
        Column("value", ANY, "in force in this run"),
    ),
    "failures": (
        _RANK,
        Column("hostname", TEXT, "its node"),
        Column("phase", TEXT, "what it was doing"),
        Column("message", TEXT, "what went wrong, the first failure first"),
        Column("signal", TEXT, "the signal that ended or stopped it, else empty"),
    ),
    "rank_states": (
        _RANK,
        Column("hostname", TEXT, "its node"),
        Column("phase", TEXT, "what it was doing when the run failed"),
        Column("responds", TRUTH, "whether it gave a sign of life after that"),
        Column("place", TEXT, "where in the code it was, if it did not fail by itself"),
    ),
}
"""The columns of each table, by the name of the method that returns it."""
