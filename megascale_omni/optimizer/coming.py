"""The step that comes next, and whether pages have taken it already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megascale_omni.experts.completion import OFF
from megascale_omni.optimizer.history import StepRecord


class ComingStep:
    """The records of the coming step while pages take it one by one in the backward (see [Note: last gradients]).

    It is *open* from the first such page until the optimizer's step, which must then be the one that they took.
    """

    def __init__(self) -> None:
        self.opened: tuple[StepRecord, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether pages have taken the step."""
        return bool(self.opened)

    def open(self, groups: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Pages begin to take step ``step`` with the settings that ``groups`` have now."""
        self.opened = _records(groups, step)

    def close(self, groups: Sequence[Mapping[str, Any]], *, step: int, clipped: bool) -> tuple[StepRecord, ...]:
        """The records of step ``step``, one a group; from here on no page takes it any more.

        Raises:
            RuntimeError: pages took it with other settings, or gradients are to be clipped that were used unclipped.
        """
        opened, self.opened = self.opened, ()
        records = _records(groups, step)
        if opened and opened != records:
            raise RuntimeError(f"settings changed from {opened} to {records} after experts were stepped; {OFF}")
        if opened and clipped:
            raise RuntimeError(f"gradients are to be clipped after experts were stepped by them; {OFF}")
        return records


def _records(groups: Sequence[Mapping[str, Any]], step: int) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(
            step=step,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
        )
        for group in groups
    )
