"""The files and messages behind ``--replay``: from a rank's kept step to the comparison."""

from __future__ import annotations

from pathlib import Path

from ddp_profiler.config import ScriptConfig
from ddp_profiler.measure.scripts.board import ScriptBoard
from ddp_profiler.measure.scripts.kept_step import KeptStep
from ddp_profiler.measure.scripts.replay import Replay, load_oracle, not_compared
from ddp_profiler.record import paths
from ddp_profiler.schema import BatchProof


class OracleCheck:
    """Has one step of a script compared with a user's loss, when the script has ended.

    Args:
        config: The settings, with a function.
        rank: Global rank.

    Attributes:
        kept: Keeps the step while the script trains.
    """

    def __init__(self, config: ScriptConfig, rank: int) -> None:
        # The last step but one of the warm-up: what keeping it costs falls into the last one.
        self.kept = KeptStep(config.warmup - 2, leads=rank == 0, batch_dim=config.batch_dim)
        self._config = config
        self._rank = rank
        self._replay: Replay | None = None

    def load(self) -> None:
        """Finds the user's function.

        Raises:
            UsageError: There is none as the settings name it.
        """
        config = self._config
        here = None
        if config.script is not None and not config.module:
            here = Path(config.script).resolve().parent
        assert config.replay is not None
        self._replay = Replay(config.replay, load_oracle(config.replay, here), self.kept)

    def share(self, folder: Path, board: ScriptBoard) -> None:
        """Has this rank's micro-batches wait for rank 0 in the run folder, once they are kept."""
        assert self._replay is not None
        if not paths.run_file(folder).is_file():
            # Nobody would ever fetch them there, nor remove them.
            self.kept.give_up("its node does not see the run folder")
        problem = self._replay.share(paths.replay_file(folder, self._rank))
        if problem is not None:
            board.publish(f"replay/{self._rank}", problem)

    def withdraw(self, folder: Path) -> None:
        """Removes what waits there of this rank."""
        paths.replay_file(folder, self._rank).unlink(missing_ok=True)

    def prove(
        self, folder: Path, board: ScriptBoard, *, ranks: int, accumulation: int, failed: bool
    ) -> BatchProof:
        """Computes the kept step again on rank 0, when the script has ended.

        Args:
            folder: The run folder.
            board: Where ranks have said why they have nothing to share.
            ranks: Number of ranks.
            accumulation: Micro-steps of a step.
            failed: Whether the script has ended before its end.
        """
        assert self._replay is not None
        files = [paths.replay_file(folder, rank) for rank in range(ranks)]
        try:
            if failed:
                return not_compared("the script has failed")
            return self._replay.prove(
                accumulation,
                files.__getitem__,
                lambda rank: board.find(f"replay/{rank}", str),
            )
        finally:
            for file in files:
                file.unlink(missing_ok=True)
