"""The group cache: which groups of ranks recurred lately. Bounded, least recently used first out, old ones too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")

KEPT_STEPS = 100
"""Steps after which an entry that nobody asked for goes."""


class GroupCache(Generic[Value]):
    """Values by membership. ``capacity`` entries at most; none older than ``kept_steps`` steps.

    Attributes: hits, misses: look-ups since the start. on_evict: is called with each value that goes.
    """

    def __init__(
        self, capacity: int, *, kept_steps: int = KEPT_STEPS, on_evict: Callable[[Value], None] | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"distributed.group_cache={capacity} must be at least 1 entry")
        self.capacity = capacity
        self.kept_steps = kept_steps
        self.hits = 0
        self.misses = 0
        self._on_evict = on_evict
        self._entries: OrderedDict[Hashable, tuple[int, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def hit_rate(self) -> float:
        """Hits of all look-ups; 0 before the first."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0

    def get(self, key: Hashable, *, step: int, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made where it is not there."""
        found = self._entries.pop(key, None)
        if found is None:
            self.misses += 1
            value = make()
        else:
            self.hits += 1
            value = found[1]
        self._entries[key] = (step, value)
        self._shrink(step)
        return value

    def _shrink(self, step: int) -> None:
        while self._entries:
            oldest = next(iter(self._entries))
            last, value = self._entries[oldest]
            if len(self._entries) <= self.capacity and step - last <= self.kept_steps:
                return
            del self._entries[oldest]
            if self._on_evict is not None:
                self._on_evict(value)

    def clear(self) -> None:
        """Lets every entry go."""
        while self._entries:
            _, (_, value) = self._entries.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(value)
