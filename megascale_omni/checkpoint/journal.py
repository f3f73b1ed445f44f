"""The journal: a line a step of what it was made of. It restores nothing; it proves that replayed steps are the same.

A run that falls back to a checkpoint makes steps again that the journal has. Each must be what it was: loss, learning
rate, data position and random numbers, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"


class Journal:
    """The journal under ``root``, written by one rank. ``layout`` tells replays that need not be equal."""

    def __init__(self, root: str | Path, *, layout: Mapping[str, int]) -> None:
        self.path = Path(root) / JOURNAL
        self.layout = dict(layout)
        self.replayed = 0
        self.differing: list[int] = []
        self._known: dict[int, dict[str, object]] = {}
        self._told = False
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._known[int(entry["step"])] = entry
            except (ValueError, KeyError, TypeError):
                continue  # the line that a crash cut off

    def record(self, step: int, *, loss: float, learning_rate: float, position: int) -> None:
        """Adds a step, or compares it with what it was the first time; a difference is an error in the log.

        So is a journal that cannot be written, once: no step depends on it.
        """
        entry: dict[str, object] = {
            "step": step,
            "loss": loss.hex(),
            "learning_rate": learning_rate.hex(),
            "position": position,
            "rng": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16],
            "layout": self.layout,
        }
        known = self._known.get(step)
        if known is not None and known.get("layout") == self.layout:
            self.replayed += 1
            wrong = [key for key, value in entry.items() if known.get(key) != value]
            if wrong:
                self.differing.append(step)
                logger.error(
                    "step %d was made again and is not what it was: %s",
                    step,
                    ", ".join(f"{key} {entry[key]} instead of {known.get(key)}" for key in wrong),
                )
        self._known[step] = entry
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(("\n" if self._torn else "") + json.dumps(entry) + "\n")
            self._torn = self._told = False
        except OSError as error:
            self._torn = True
            if not self._told:
                logger.error("the journal %s cannot be written: %s; training goes on", self.path, error)
            self._told = True
