"""What every applied optimizer step was, so that a page which missed some can be brought up to date later.

[Note: applied steps]
A record is written for every step that changed weights, and for no other: a skipped step (non-finite gradients) leaves
none. Steps of a group are therefore consecutive numbers, the ones Adam's bias correction uses. A gap would be a lost
record and every replay over it wrong without a sign, so gaps are refused, not bridged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

Group = int | str

_VERSION = 1
_COLUMNS = ("lr", "weight_decay", "beta1", "beta2", "eps")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One applied step of one parameter group.

    Attributes:
        step: number of the applied step, from 1, as in Adam's bias correction.
        lr, weight_decay, beta1, beta2, eps: what the group held when the step was applied.
    """

    step: int
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step {self.step}: applied steps are numbered from 1")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} {getattr(self, name)} of step {self.step} must lie in [0, 1)")


@dataclass
class _Column:
    """Records of one group: those of steps ``base + 1 .. base + len(records)``."""

    base: int
    records: list[StepRecord] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.base + len(self.records)


class History:
    """Append-only records of applied steps by parameter group (see [Note: applied steps]).

    A group is named by an int or a str; one that was never appended to has applied no step.
    """

    def __init__(self) -> None:
        self._groups: dict[Group, _Column] = {}

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups with at least one step, in the order of their first one."""
        return tuple(self._groups)

    def __len__(self) -> int:
        """Records kept, over all groups."""
        return sum(len(column.records) for column in self._groups.values())

    def append(self, group: Group, record: StepRecord) -> None:
        """Adds the step that follows the group's last one; a group's first record may have any number (a resumed run).

        Raises:
            ValueError: the record's step is not the next one.
        """
        column = self._groups.get(group)
        if column is None:
            column = self._groups[group] = _Column(base=record.step - 1)
        if record.step != column.last + 1:
            raise ValueError(
                f"group {group!r}: step {record.step} cannot follow step {column.last}; number applied steps one after "
                f"the other, and record nothing for a skipped one"
            )
        column.records.append(record)

    def last_step(self, group: Group) -> int:
        """Number of the group's last applied step, 0 before the first."""
        column = self._groups.get(group)
        return 0 if column is None else column.last

    def since(self, group: Group, last_step: int) -> Sequence[StepRecord]:
        """Records of all steps after ``last_step``, in order: what state that has seen ``last_step`` has missed.

        Raises:
            RuntimeError: some of these records are gone, or ``last_step`` was never applied.
        """
        column = self._groups.get(group)
        first, last = (0, 0) if column is None else (column.base, column.last)
        if last_step > last:
            raise RuntimeError(f"group {group!r}: state claims step {last_step}, but the last applied step is {last}")
        if column is None:
            return ()
        if last_step < first:
            raise RuntimeError(
                f"group {group!r}: state of step {last_step} needs steps {last_step + 1}..{last}, "
                f"but records up to step {first} are not kept"
            )
        return tuple(column.records[last_step - first :])

    def kept(self, group: Group) -> tuple[int, tuple[StepRecord, ...]]:
        """The records that are kept: of the steps after the first number, which is 0 before the first step."""
        column = self._groups.get(group)
        return (0, ()) if column is None else (column.base, tuple(column.records))

    def restore(self, group: Group, *, base: int, records: Sequence[StepRecord]) -> None:
        """Makes ``records`` all that is kept of a group: steps ``base + 1`` and on, as :meth:`kept` gave them.

        Raises:
            ValueError: steps that do not follow each other.
        """
        if [record.step for record in records] != list(range(base + 1, base + 1 + len(records))):
            raise ValueError(f"group {group!r}: the records do not follow each other from step {base + 1} on")
        self._groups[group] = _Column(base=base, records=list(records))

    def trim(self, group: Group, keep_after_step: int) -> int:
        """Drops the records of steps up to ``keep_after_step``, which every page has seen; returns how many.

        Raises:
            ValueError: ``keep_after_step`` lies after the last applied step.
        """
        column = self._groups.get(group)
        last = 0 if column is None else column.last
        if keep_after_step > last:
            raise ValueError(
                f"group {group!r}: cannot trim up to step {keep_after_step}, the last applied one is {last}"
            )
        if column is None or keep_after_step <= column.base:
            return 0
        count = keep_after_step - column.base
        del column.records[:count]
        column.base = keep_after_step
        return count

    def state_dict(self) -> dict[str, object]:
        """Everything as ints, strings and tensors, bit-exact.

        ``{"version": 1, "groups": {key: {"base": int, "values": float64 [steps, 5]}}}``, where ``key`` is
        ``int:<n>`` or ``str:<name>``; row ``i`` is step ``base + 1 + i``; columns: lr, weight_decay, beta1, beta2, eps.
        """
        groups: dict[str, object] = {}
        for group, column in self._groups.items():
            rows = [[getattr(record, name) for name in _COLUMNS] for record in column.records]
            values = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(_COLUMNS))
            groups[f"{type(group).__name__}:{group}"] = {"base": column.base, "values": values}
        return {"version": _VERSION, "groups": groups}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Replaces all records by those of :meth:`state_dict`; on an error nothing changes.

        Raises:
            ValueError: the state is of another version or not well formed.
        """
        version, groups = state.get("version"), state.get("groups")
        if version != _VERSION or not isinstance(groups, Mapping):
            raise ValueError(f"optimizer history: version {version!r} cannot be read, this build reads {_VERSION}")
        self._groups = {_group_of(key): _column_of(key, entry) for key, entry in groups.items()}


def _group_of(key: str) -> Group:
    kind, separator, name = key.partition(":")
    if separator and kind == "str":
        return name
    if separator and kind == "int" and name.removeprefix("-").isdecimal():
        return int(name)
    raise ValueError(f"optimizer history: group key {key!r} is neither 'int:<n>' nor 'str:<name>'")


def _column_of(key: str, entry: object) -> _Column:
    base = entry.get("base") if isinstance(entry, Mapping) else None
    values = entry.get("values") if isinstance(entry, Mapping) else None
    if not isinstance(base, int) or base < 0 or not isinstance(values, torch.Tensor):
        raise ValueError(f"optimizer history: group {key!r} needs an int 'base' >= 0 and a tensor 'values'")
    if values.dtype is not torch.float64 or values.ndim != 2 or values.shape[1] != len(_COLUMNS):
        raise ValueError(
            f"optimizer history: group {key!r} has {values.dtype} values of shape {tuple(values.shape)}, "
            f"expected float64 [steps, {len(_COLUMNS)}]"
        )
    records = [StepRecord(base + 1 + i, *row) for i, row in enumerate(values.tolist())]
    return _Column(base=base, records=records)
