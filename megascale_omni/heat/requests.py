"""Requests to a run that is under way, by files in its report folder: another budget, compaction.

[Note: requests to a run]
Whoever asks adds a line to ``requests.jsonl``: an id, and what is wanted. Every rank looks whether the file has grown
when a step has ended, does what new lines ask for, in their order, and writes an answer with the same id into
``answers.rankN.jsonl``. Lines that are there when a run begins were meant for one before it. What is asked for decides
about time only, so that ranks need not do it at the same step. Whatever is wrong with the files or with a line is told
in the log: no run ends because somebody asked it something.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from pathlib import Path
from typing import Any

from megascale_omni.config import parse_budget
from megascale_omni.paging.manager import ExpertManager

logger = logging.getLogger(__name__)

REQUESTS = "requests.jsonl"
Answer = dict[str, Any]
"""What a rank says: ``id`` of the request, ``step``, and ``done`` or ``error``."""


def answers_of(folder: str | Path, rank: int) -> Path:
    """The file of a rank's answers."""
    return Path(folder) / f"answers.rank{rank}.jsonl"


class RequestReader:
    """Does what is asked of one rank."""

    def __init__(self, manager: ExpertManager, folder: str | Path, *, rank: int) -> None:
        self._manager, self._path = manager, Path(folder) / REQUESTS
        self._answers = answers_of(folder, rank)
        self._open, self._unreadable = True, ""
        self._read = 0
        try:
            self._answers.unlink(missing_ok=True)
            self._read = _size(self._path)
        except OSError as error:
            self._tell(error)
        manager.schedule.on_step_end(self.look)
        manager.schedule.on_step(self.look)  # where nobody says that a step has ended

    def look(self) -> None:
        """Does what was asked for since the last look. Between two steps."""
        if not self._open:
            return
        try:
            lines = self._new_lines()
        except OSError as error:
            self._tell(error)
            return
        for line in lines:
            answer = json.dumps({**self._answer(line), "step": self._manager.schedule.moment.step})
            try:
                with self._answers.open("a", encoding="utf-8") as file:
                    file.write(answer + "\n")
            except OSError as error:
                self._tell(error)

    def _new_lines(self) -> list[bytes]:
        """Whole lines since the last look."""
        size = _size(self._path)
        if size < self._read:
            self._read = 0  # it is another file: somebody has removed the one before
        if size == self._read:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]  # somebody may be writing the last one
        self._read += len(whole)
        return [line for line in whole.splitlines() if line.strip()]

    def _tell(self, error: OSError) -> None:
        """Once, as long as it is the same."""
        said = f"{error.filename or self._path}: {error.strerror or error}"
        if said != self._unreadable:
            logger.error("requests to this run cannot be read or answered: %s; make it a file that it may use", said)
        self._unreadable = said

    def _answer(self, line: bytes) -> Answer:
        try:
            wanted = json.loads(line)
            number, what = wanted["id"], wanted["what"]
        except (ValueError, KeyError, TypeError, RecursionError):
            logger.error("%s has a line that is no request: %s", self._path, line[:80])
            return {"id": None, "error": "no request"}
        try:
            done = self._do(what, wanted)
        except ValueError as error:  # a mistake of the one who asked does not end the run
            logger.error("a request to this run was refused: %s", error)
            return {"id": number, "error": str(error)}
        logger.info("a request to this run: %s", done)
        return {"id": number, "done": done}

    def _do(self, what: object, wanted: dict[str, Any]) -> str:
        if what == "compact":
            return self._compact()
        if what == "resize":
            return self._resize(wanted)
        raise ValueError(f"what={what!r} is unknown; ask for resize or compact")

    def _compact(self) -> str:
        freed = self._manager.compact()
        return (
            "compacted when pages are let go" if freed is None else f"{freed / 2**20:,.1f} MiB returned to the system"
        )

    def _resize(self, wanted: dict[str, Any]) -> str:
        device, host = wanted.get("device"), wanted.get("host")
        budget = self._manager.upkeep.device_budget
        if device is not None:
            budget = parse_budget(device, key="device budget")
        self._manager.resize(budget, host=None if host is None else parse_budget(host, key="host budget"))
        if self._manager.upkeep.is_resizing:
            return "pages have another budget when the step at hand has ended"
        arena = self._manager.arena
        limit = sum((arena.limit(c) or 0) * c.nbytes for c in arena.slot_classes())
        return f"pages have {limit / 2**20:,.1f} MiB of device memory"

    def close(self) -> None:
        """Looks no longer."""
        self._open = False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def ask(folder: str | Path, **wanted: object) -> str:
    """Asks a run; ``what`` is ``resize`` (with ``device`` and ``host`` budgets, or None) or ``compact``.

    Returns the request's id.

    Raises:
        ValueError: the folder cannot be written.
    """
    number = uuid.uuid4().hex
    # Whoever was cut off in the middle of a line has not ended it.
    text = "\n" + json.dumps({"id": number, **wanted}) + "\n"
    try:
        with (Path(folder) / REQUESTS).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{folder}: the run cannot be asked: {error.strerror}") from error
    return number


def wait_for_answers(folder: str | Path, number: str, *, ranks: int, seconds: float) -> dict[int, Answer]:
    """The answers of all ranks to a request, or of those that have answered after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        found = {rank: answer for rank in range(ranks) if (answer := _answer_of(folder, rank, number)) is not None}
        if len(found) == ranks or time.monotonic() >= end:
            return found
        time.sleep(0.1)


def _answer_of(folder: str | Path, rank: int, number: str) -> Answer | None:
    path = answers_of(folder, rank)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            answer: Answer = json.loads(line)
        except ValueError:  # it is being written
            continue
        if answer.get("id") == number:
            return answer
    return None
