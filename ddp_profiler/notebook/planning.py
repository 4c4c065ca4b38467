"""The arithmetic of a training run, as a function."""

from __future__ import annotations

from dataclasses import fields

from ddp_profiler.errors import DdpProfilerError, UsageError
from ddp_profiler.naming import options_as_arguments
from ddp_profiler.notebook.loaded_run import LoadedRun
from ddp_profiler.predict.plan import Plan, PlanRequest, knowledge_of, make_plan
from ddp_profiler.predict.predicted_times import predicted

_ARGUMENTS = {field.name.replace("_", "-"): field.name for field in fields(PlanRequest)}
_ARGUMENTS |= {"accumulate": "accumulation", "step-ms": "step_ms", "run": "run"}


def plan(
    samples: int,
    epochs: int = 1,
    *,
    step_ms: float | None = None,
    run: LoadedRun | None = None,
    **settings: int | float | str | None,
) -> Plan:
    """Plans a training run: its batch, its steps, what is rounded, and its time.

    global_batch = micro_batch x accumulation x dp, solved for what is left open.

    >>> found = plan(1000, epochs=3, global_batch=10, accumulation=2, step_ms=50.0)
    >>> found.micro_batch, found.micro_steps_per_epoch, found.total_optimizer_steps
    (5, 200, 300)
    >>> found.training_time_s
    15.0

    Args:
        samples: Samples of the data set.
        epochs: How often they are gone through.
        step_ms: Time of an optimizer step of this plan in ms, where you know it.
        run: A measured run that step times come from instead, also of other settings.
        settings: What else is known, by the names of
            :class:`ddp_profiler.predict.plan.PlanRequest`: ``global_batch``, ``micro_batch``,
            ``accumulation``, ``dp``, ``world_size``, ``tp``, ``pp``, ``drop_last``, ``shard``,
            ``window``, ``startup_s``, ``evaluation_s``, ``evaluate_every``, ``checkpoint_s``,
            ``checkpoint_every``.

    Returns:
        The plan; ``alternatives`` holds other settings of the same global batch.

    Raises:
        UsageError: No whole numbers make the batch or the world, too little is said, or a number
            is out of its range.
        TypeError: A setting is unknown.
    """
    if step_ms is not None and run is not None:
        raise UsageError("step_ms and run both tell the step time.", "Give one of them.")
    known = None
    if run is not None:
        known = knowledge_of(run.summary, str(run.folder), more=predicted(run.summary))
    try:
        return make_plan(PlanRequest(samples, epochs, **settings), known, step_ms)  # type: ignore[arg-type]
    except DdpProfilerError as error:
        raise type(error)(
            options_as_arguments(error.message, _ARGUMENTS),
            options_as_arguments(error.remedy, _ARGUMENTS),
        ) from None
