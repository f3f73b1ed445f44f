"""What a run writes down about its pages, as its configuration asks for."""

from __future__ import annotations

import atexit
from pathlib import Path

from megascale_omni.config import ObserveConfig
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.recorder import Recorder


def path_of_rank(path: str | Path, *, rank: int, world: int) -> Path:
    """``run.trace`` of rank 3 of several is ``run.rank3.trace``."""
    path = Path(path)
    return path if world == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class Observation:
    """The observers of one rank's manager.

    Raises:
        ValueError: a file cannot be written.
    """

    def __init__(self, manager: ExpertManager, config: ObserveConfig, *, rank: int, world: int) -> None:
        self._recorder: Recorder | None = None
        if config.trace is not None:
            self._recorder = Recorder(manager, path_of_rank(config.trace, rank=rank, world=world))
            atexit.register(self.close)  # a script that never says that it has ended

    def close(self) -> None:
        """Ends what is being written. Idempotent."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            atexit.unregister(self.close)
