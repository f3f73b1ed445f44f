"""Records a trace of a manager's work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.needs import class_needs
from megascale_omni.paging.observe import Observer
from megascale_omni.paging.trace import Op, TracedModel, TracedModule, TraceWriter
from megascale_omni.schedule import Phase

PHASES = tuple(Phase)


def described(modules: Sequence[PagedModule], paths: Sequence[str] | None = None) -> TracedModel:
    """What a trace says about modules; ``paths``: their names."""
    floors = {c: need.floor for c, need in class_needs(modules).items()}

    def traced(number: int, module: PagedModule) -> TracedModule:
        classes = {plane.name.lower(): module.slot_class(plane) for plane in sorted(module.dtypes)}
        return TracedModule(
            path=str(number) if paths is None else paths[number],
            experts=module.entry.num_experts,
            slices=module.entry.num_slices,
            slot_bytes={name: c.nbytes for name, c in classes.items()},
            slot_kind={name: f"{str(c.dtype).removeprefix('torch.')} x {c.numel}" for name, c in classes.items()},
            floor_pages={name: floors[c] for name, c in classes.items()},
        )

    return TracedModel(tuple(traced(number, module) for number, module in enumerate(modules)))


def traced_model(manager: ExpertManager) -> TracedModel:
    """What a trace says about the modules of a manager."""
    return described(manager.modules, [manager.numbering.path(m.entry.module) for m in manager.modules])


class Recorder(Observer):
    """An observer that writes what it sees to a trace file.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, manager: ExpertManager, path: str | Path) -> None:
        self._manager = manager
        self._writer = TraceWriter(path)
        self._known: TracedModel | None = None
        self._shape: tuple[int, int] = (-1, -1)
        manager.observers.append(self)
        manager.schedule.on_step(self._step)

    def _event(self, op: Op, numbers: np.ndarray | list[int]) -> None:
        modules = self._manager.modules
        shape = (len(modules), sum(len(module.dtypes) for module in modules))
        if shape != self._shape:
            self._shape = shape
            self._describe()
        self._writer.event(op, numbers.tolist() if isinstance(numbers, np.ndarray) else numbers)

    def _describe(self) -> None:
        model = traced_model(self._manager)
        if model != self._known:
            self._known = model
            self._writer.model(model)

    def _step(self) -> None:
        self._describe()  # modules may have got their paths, or planes another dtype
        self._event(Op.STEP, [self._manager.schedule.moment.step])

    def visited(self, visit: Visit, pages: np.ndarray) -> None:
        """See Observer."""
        bits = sum(1 << int(plane) for plane in visit.planes)
        self._event(Op.VISIT, [PHASES.index(visit.phase), visit.module, bits, *pages.tolist()])

    def reached(self, page: int) -> None:
        """See Observer."""
        self._event(Op.REACH, [page])

    def held(self, page_ids: np.ndarray) -> None:
        """See Observer."""
        self._event(Op.HOLD, page_ids)

    def released(self, page_ids: np.ndarray) -> None:
        """See Observer."""
        self._event(Op.RELEASE, page_ids)

    def created(self, page_ids: np.ndarray) -> None:
        """See Observer."""
        self._event(Op.CREATE, page_ids)

    def dropped(self, page_ids: np.ndarray) -> None:
        """See Observer."""
        self._event(Op.DROP, page_ids)

    def written(self, page_ids: np.ndarray) -> None:
        """See Observer."""
        self._event(Op.WRITE, page_ids)

    def close(self) -> None:
        """Ends the trace."""
        if self in self._manager.observers:
            self._manager.observers.remove(self)
        self._writer.close()
