"""A checker for kernels under the interpreter: bounds, races, and the order in which programs run.

Inside :func:`checked` every launch is watched:

* an address that a program loads, stores or adds to atomically must lie inside one of the launch's tensors, or inside
  one that ``reachable`` names at that time (what is reached through a table of addresses): inside its elements, not its
  storage;
* two programs must not touch the same bytes where one of them stores plainly, and an atomic and a plain access must not
  meet; one store must not write an address twice;
* programs run in the order asked for: ``forward``, ``backward`` or shuffled by a seed. A result that depends on it is a
  race that the rules above did not see.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

Order = str | int
_STORED, _LOADED, _ADDED = "stores", "loads", "adds to"


class Violation(AssertionError):
    """A kernel touched what it must not, or two programs met."""


@dataclass
class _Launch:
    """The tensors of one launch, and what its programs have touched."""

    name: str
    low: np.ndarray
    high: np.ndarray
    stored: dict[int, tuple[int, ...]] = field(default_factory=dict)
    loaded: dict[int, tuple[int, ...] | None] = field(default_factory=dict)  # None: several programs
    added: dict[int, tuple[int, ...] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, tensors: Sequence[torch.Tensor]) -> _Launch:
        extents = sorted(_extent(tensor) for tensor in tensors if tensor.numel())
        low = np.asarray([begin for begin, _ in extents], dtype=np.uint64)
        return cls(name, low, np.asarray([end for _, end in extents], dtype=np.uint64))

    def touch(self, kind: str, program: tuple[int, ...], addresses: np.ndarray, size: int) -> None:
        if not len(addresses):
            return
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in zip(self.low, self.high, strict=True):
            inside |= (addresses >= low) & (addresses + np.uint64(size) <= high)
        if not inside.all():
            raise Violation(
                f"{self.name}: program {program} {kind} {int((~inside).sum())} of {len(addresses)} addresses outside "
                "every tensor"
            )
        touched = addresses.tolist()
        if kind == _STORED and len(set(touched)) < len(touched):
            raise Violation(f"{self.name}: program {program} stores twice to one address in one operation")
        for address in touched:
            self._meet(kind, program, address)

    def _meet(self, kind: str, me: tuple[int, ...], address: int) -> None:
        others = {_STORED: (self.stored, self.loaded, self.added), _LOADED: (self.stored, self.added)}
        others[_ADDED] = (self.stored, self.loaded)
        for seen in others[kind]:
            if address in seen and seen[address] != me:
                raise Violation(f"{self.name}: program {me} {kind} what program {seen[address]} touched, too")
        if kind == _STORED:
            self.stored[address] = me
        else:
            mine = self.loaded if kind == _LOADED else self.added
            mine[address] = me if mine.get(address, me) == me else None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def checked(
    *, reachable: Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]] = (), order: Order = "forward"
) -> Iterator[list[str]]:
    """Watches every launch inside; yields the names of the kernels launched."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    current: list[_Launch] = []
    names: list[str] = []
    originals = {name: getattr(builder, name) for name in _WATCHED}
    run = executor.__call__

    def watch(name: str, kind: str, pointer_at: int, mask_at: int | None) -> None:
        original = originals[name]

        @functools.wraps(original)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if current:
                pointer, mask = args[pointer_at], None if mask_at is None else args[mask_at]
                addresses = np.asarray(pointer.data)
                if mask is not None:
                    addresses = addresses[np.broadcast_to(np.asarray(mask.data), addresses.shape).astype(bool)]
                size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
                program = tuple(interpreter.interpreter_builder.grid_idx)
                current[-1].touch(kind, program, addresses.ravel().astype(np.uint64), size)
            return original(self, *args, **kwargs)

        setattr(builder, name, watched)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        names.append(self.fn.__name__)
        current.append(_Launch.of(self.fn.__name__, [*given, *(reachable() if callable(reachable) else reachable)]))
        try:
            return run(self, *args, **kwargs) if order == "forward" else _reordered(run, self, order, args, kwargs)
        finally:
            current.pop()

    try:
        for name, access in _WATCHED.items():
            watch(name, *access)
        executor.__call__ = launch
        yield names
    finally:
        executor.__call__ = run
        for name, original in originals.items():
            setattr(builder, name, original)


_WATCHED: dict[str, tuple[str, int, int | None]] = {
    "create_masked_load": (_LOADED, 0, 1),
    "create_masked_store": (_STORED, 0, 2),
    "create_atomic_rmw": (_ADDED, 1, 3),
}


def _reordered(run: Any, executor: Any, order: Order, args: Any, kwargs: Any) -> Any:
    """Runs the programs of a grid in another order: they are collected first, then called."""
    from triton.runtime import interpreter

    builder, function = interpreter.interpreter_builder, executor.fn
    waiting: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def collect(**program_args: Any) -> None:
        waiting.append((tuple(builder.grid_idx), program_args))
        if len(waiting) < int(np.prod(builder.grid_dim)):
            return
        programs = list(reversed(waiting))
        if isinstance(order, int):
            random.Random(order).shuffle(programs)
        for index, call in programs:
            builder.set_grid_idx(*index)
            function(**call)

    collect.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    wrapped = functools.wraps(function)(collect)
    getcallargs, patch = inspect.getcallargs, interpreter._patch_lang
    # What is asked about the stand-in is answered for the kernel; functions that it calls answer for themselves.
    interpreter._patch_lang = lambda f: patch(function if f is wrapped else f)
    inspect.getcallargs = lambda f, *a, **k: getcallargs(function if f is wrapped else f, *a, **k)  # type: ignore[assignment]
    executor.fn = wrapped
    try:
        return run(executor, *args, **kwargs)
    finally:
        interpreter._patch_lang, inspect.getcallargs, executor.fn = patch, getcallargs, function


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kernels are as they are without ``debug``: their assertions are not there."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=False))
