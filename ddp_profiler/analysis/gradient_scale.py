"""What can be said of the scale of a script's gradients where nothing compares it."""

from __future__ import annotations

from ddp_profiler.schema import LevelFacts, LevelSettings, RunInfo


def scale_notes(info: RunInfo, level: LevelSettings, facts: LevelFacts | None) -> tuple[str, ...]:
    """Returns what loss and backward show of a script, and that it does not tell the scale.

    No finding comes of it: the Trainer of transformers divides by the accumulation, others
    divide by tokens, or leave it to the optimizer.

    Args:
        info: The run's description.
        level: Its settings as they turned out.
        facts: What the worker found out; nothing is said without.
    """
    if "script" not in info.settings or facts is None or facts.proof is not None:
        return ()
    if info.settings.get("replay"):
        return ("The gradient's scale is compared (replay) when training has ended.",)
    notes = [
        "The gradient's scale cannot be told from the run alone; --replay "
        "package.module:function (replay= of profile()) compares it with one process."
    ]
    divisor = facts.loss_divisor
    if divisor is not None and divisor != 1:
        notes.append(
            f"The loss is divided by {divisor:g} before backward; accumulation is "
            f"{level.accumulation}."
        )
    elif level.accumulation > 1:
        notes.append(
            "Autograd shows no division of the loss just before backward; accumulation is "
            f"{level.accumulation}."
        )
    return tuple(notes)
