"""One save at a time in a folder: two runs that were given the same one would remove each other's drafts.

The system's lock on the folder itself leaves nothing behind, and is gone with the process however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from pathlib import Path

logger = logging.getLogger(__name__)


class FolderLock:
    """Held from a save's beginning to its end by the rank that makes it count; idempotent both ways."""

    def __init__(self) -> None:
        self._close: weakref.finalize | None = None

    def acquire(self, folder: Path) -> None:
        """Takes the lock. A file system without locks is trusted, with a word in the log.

        Raises:
            ValueError: another run has it. OSError: the folder is not there.
        """
        if self._close is not None:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ValueError(
                f"another run is saving to {folder} at this moment; give each run a folder of its own (--save)"
            ) from None
        except OSError as error:
            logger.info("%s cannot be locked against other runs: %s", folder, error)
        self._close = weakref.finalize(self, _release, fd)

    def release(self) -> None:
        """Gives the lock back."""
        close, self._close = self._close, None
        if close is not None:
            close()


def _release(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # also where a child has the file descriptor
    except OSError:
        logger.debug("the lock was none")
    os.close(fd)
