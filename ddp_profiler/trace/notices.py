"""What a reader of a trace's figures has to know: each code with its text and its count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TraceWarning:
    """One kind of thing that was left out, repaired or cannot be told.

    Attributes:
        code: Stable name for programs.
        message: One or two sentences for people.
        count: How many events or places it concerns.
    """

    code: str
    message: str
    count: int


_MESSAGES = {
    # Left out. The figures are those of the trace without these rows.
    "dropped_zero_time": "Events at time 0 or before it were left out.",
    "dropped_negative_duration": "Events with a negative duration were left out.",
    "dropped_absurd_duration": "Events that claim to last longer than a day were left out.",
    "dropped_absurd_time": "Events more than a day away from all others were left out.",
    "dropped_unreadable_time": "Events whose time is no number were left out.",
    "sync_rows_ignored": "Rows of waiting on the GPU (cuda_sync) were left out: they are no work.",
    # Repaired, only where the user asked for it.
    "repaired_control_byte": "Control bytes within names were replaced.",
    "repaired_encoding": "Bytes that are not UTF-8 were replaced.",
    "repaired_backslash": "Lone backslashes were doubled.",
    "repaired_quote": "Bare quotes within names were escaped.",
    "repaired_number": "NaN and Infinity, which JSON does not have, became null.",
    "dropped_unreadable": (
        "Places that could not be repaired were left out, each with one event or more."
    ),
    "joined_events": (
        "Events have keys twice: text is missing between the begin of one and the end of another, "
        "which now stand as one event with figures of both. Text that is missing without such a "
        "trace cannot be noticed."
    ),
    "repaired_cut": "The file is cut: the events before its end were used.",
    "ignored_trailing": "What follows the end of the trace in the file was left out.",
    # What the figures rest on.
    "finer_than_ns": "Times finer than a nanosecond were rounded to it.",
    "collectives_without_kernels": (
        "Collectives were handed over, but the trace holds no kernel of theirs: communication "
        "is unknown. Record GPU activities too, and look whether the backend is one that this "
        "tool knows."
    ),
    "no_collectives": (
        "The job has several ranks, but no kernel is known as a collective: communication is "
        "unknown, not 0, and what there is of it counts as computation."
    ),
    "single_process": (
        "World size 1: collectives move nothing, so communication and overlap do not apply."
    ),
    "unknown_collective": (
        "Kernels of a collective library do not say which collective they are; they count as "
        "communication of the kind Unknown."
    ),
    "launched_before_recording": (
        "GPU work was launched before the recording began; it belongs to no step and is only in "
        "the total."
    ),
    "assigned_by_time": (
        "GPU work without a launch in the trace was given to the step in whose time it ran; the "
        "CPU runs ahead, so it may belong to an earlier one."
    ),
    "outside_steps": "Work or collectives outside of all steps are only in the total.",
    "steps_interleave": (
        "GPU work of other steps, or of none, runs within steps' windows, or steps' own outside "
        "of them. Time of a window in which only others' work runs is not idle (other_steps_us)."
    ),
    "absurd_elements": (
        "Collectives claim more elements than any GPU holds: their sizes count as unknown."
    ),
    "stretched_kernel": (
        "Kernels overlap the next one on their stream, or last longer than several steps: a stall, "
        "or a time that is broken. Look at them before you trust the figures."
    ),
    "streams_overlap": (
        "Kernels begin while the one before them on their stream runs: a stream does one after "
        "the other, so the file may hold several processes or GPUs that count as one."
    ),
    "repeated_step": (
        "Numbers of ProfilerStep come more than once: each time is a step of its own (N #2), those "
        "that overlap are one. If the file holds several processes, figures are sums of theirs."
    ),
    "incomplete_step": "The first or last step is not recorded in full.",
    "steps_not_annotated": "The trace has no ProfilerStep annotations.",
    "no_steps": "Steps could not be told apart: there is only the total.",
    "rank_from_name": "The rank was taken from the file's name.",
    "not_a_trace": "Files of the folder hold no trace and were left out.",
    "single_rank": (
        "From one rank alone, waiting for others and transfer cannot be told apart: both are "
        "communication. Give the traces of all ranks."
    ),
    "missing_ranks": "Ranks of the job are missing.",
    # Between ranks.
    "group_is_several": (
        "Several process groups have the same name, and the traces do not say which ranks they "
        "have: their collectives were not compared."
    ),
    "group_not_named": (
        "Collectives do not say which process group they are of: they count as those of one group "
        "of all ranks only where their ends confirm it."
    ),
    "collectives_differ_in_kind": (
        "At the same place ranks have different collectives; these were not compared."
    ),
    "collectives_differ_in_size": (
        "At the same place ranks have collectives of different sizes; these were not compared."
    ),
    "collectives_differ_in_count": (
        "Ranks have different numbers of collectives in the same stretch; those that may be "
        "meant by others were not compared."
    ),
    "collectives_differ_in_order": (
        "Recordings begin or end at different collectives, and nothing tells which ones belong "
        "together: none were compared. Record with a schedule, so that there are ProfilerSteps."
    ),
    "collectives_not_matched": "Collectives are not in the traces of all ranks given.",
    "messages_not_paired": (
        "Messages (SendRecv) are not in the same number on all ranks: they go between some of "
        "them and were not compared."
    ),
    "across_ranks_refused": "Ranks were not compared.",
    "rank_not_aligned": (
        "The clocks of ranks could not be tied to the others': nothing is said of these ranks "
        "beside their own figures."
    ),
    "group_not_confirmed": "Collectives that name no process group were not compared.",
    "clock_drift": "Clocks of ranks drift against the others'; that was taken out.",
    "ends_apart": (
        "Matched collectives end far apart on the ranks: a time is broken, or the pairing is "
        "wrong. They were not compared."
    ),
}


class Notices:
    """Counts what is to be said about one trace."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._details: dict[str, str] = {}

    def add(self, code: str, count: int = 1, detail: str = "") -> None:
        """Counts; ``detail`` is put after the code's own text, the first one of each code."""
        if count <= 0:
            return
        self._counts[code] = self._counts.get(code, 0) + count
        if detail:
            self._details.setdefault(code, detail)

    def __contains__(self, code: str) -> bool:
        return code in self._counts

    def all(self) -> tuple[TraceWarning, ...]:
        """Returns the warnings in the order of the codes' table."""
        order = {code: place for place, code in enumerate(_MESSAGES)}
        return tuple(
            TraceWarning(
                code, " ".join(filter(None, (_MESSAGES[code], self._details.get(code, "")))), count
            )
            for code, count in sorted(self._counts.items(), key=lambda item: order[item[0]])
        )


def merged(warnings: Iterable[TraceWarning]) -> tuple[TraceWarning, ...]:
    """Returns warnings of several ranks as one of each text, counts added."""
    counts: dict[tuple[str, str], int] = {}
    for warning in warnings:
        key = (warning.code, warning.message)
        counts[key] = counts.get(key, 0) + warning.count
    return tuple(TraceWarning(code, message, count) for (code, message), count in counts.items())
