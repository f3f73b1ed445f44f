"""Bytes that a rank sends to other ranks, counted at the calls of `torch.distributed`.

[Note: what is counted]
Payload of tensors that leaves the rank for others in the schedule that moves the least: what the mathematics of the
operation demands, not what a transport adds. `n` ranks in the group, `b` bytes of the rank's own tensor:

    all_reduce               2 b (n - 1) / n         reduce_scatter (input b)     b (n - 1) / n
    all_gather (input b)     b (n - 1)               all_to_all (input b)         b less what the rank sends to itself
    broadcast, scatter       (n - 1) x a tensor, on the source only
    reduce, gather           b, on all but the destination
    send, isend              b

Collectives of Python objects are counted by the tensors that they become. A barrier has no payload.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

Arguments = dict[str, Any]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _ranks(arguments: Arguments) -> int:
    return max(1, distributed.get_world_size(arguments.get("group")))  # -1 on a rank outside the group


def _is_root(arguments: Arguments, name: str) -> bool:
    root, group = arguments.get(name), arguments.get("group")
    if root is None and arguments.get(f"group_{name}") is not None:
        return distributed.get_rank(group) == arguments[f"group_{name}"]
    return distributed.get_rank() == (root or 0)


def _all_reduce(a: Arguments) -> float:
    return 2 * _bytes(a["tensor"]) * (_ranks(a) - 1) / _ranks(a)


def _all_gather(a: Arguments) -> float:
    own = a["tensor"] if "tensor" in a else a["input_tensor"]
    return _bytes(own) * (_ranks(a) - 1)


def _reduce_scatter_tensor(a: Arguments) -> float:
    return _bytes(a["input"]) * (_ranks(a) - 1) / _ranks(a)


def _reduce_scatter(a: Arguments) -> float:
    return sum(map(_bytes, a["input_list"])) * (_ranks(a) - 1) / _ranks(a)


def _all_to_all_single(a: Arguments) -> float:
    given: Sequence[int] | torch.Tensor | None = a.get("input_split_sizes")
    total, rank = _bytes(a["input"]), distributed.get_rank(a.get("group"))
    if given is None or len(given) == 0:
        return total * (_ranks(a) - 1) / _ranks(a)
    splits = [int(rows) for rows in given]
    rows = sum(splits)
    return total * (rows - splits[rank]) / rows if rows else 0.0


def _all_to_all(a: Arguments) -> float:
    rank = distributed.get_rank(a.get("group"))
    return sum(_bytes(tensor) for index, tensor in enumerate(a["input_tensor_list"]) if index != rank)


def _from_source(a: Arguments) -> float:
    return _bytes(a["tensor"]) * (_ranks(a) - 1) if _is_root(a, "src") else 0


def _to_destination(a: Arguments) -> float:
    return 0 if _is_root(a, "dst") else _bytes(a["tensor"])


def _send(a: Arguments) -> float:
    return _bytes(a["tensor"])


COUNTED: dict[str, Callable[[Arguments], float]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "broadcast": _from_source,
    "scatter": _from_source,
    "reduce": _to_destination,
    "gather": _to_destination,
    "send": _send,
    "isend": _send,
}


class CollectiveCounter:
    """Counts while installed. Install it before a framework is imported: frameworks keep the functions they find."""

    def __init__(self) -> None:
        self._sent = 0.0
        self._depth = 0
        self._everywhere = False
        self._originals: dict[str, Callable[..., object]] = {}

    @property
    def sent_bytes(self) -> int:
        """Bytes sent since the counter was made."""
        return round(self._sent)

    def install(self, *, everywhere: bool = False) -> None:
        """Wrap the functions. Raises RuntimeError when megatron-core is loaded already or a counter is installed.

        ``everywhere``: also where loaded modules keep what they found, so that it may be late.
        """
        self._everywhere = everywhere
        if "megatron.core" in sys.modules and not everywhere:
            raise RuntimeError("install the counter before megatron-core is imported: it keeps the functions it found")
        if self._originals:
            raise RuntimeError("the counter is installed already")
        for name, sent in COUNTED.items():
            original = getattr(distributed_c10d, name)
            self._originals[name] = original
            self._place(name, self._wrapped(original, sent), self._keepers(original))

    def remove(self) -> None:
        """Put the functions back; idempotent."""
        for name, original in self._originals.items():
            self._place(name, original, self._keepers(getattr(distributed, name)))
        self._originals = {}

    def _keepers(self, function: Callable[..., object]) -> list[tuple[ModuleType, str]]:
        """Modules that keep a function under a name of theirs."""
        loaded = list(sys.modules.values()) if self._everywhere else []
        return [(m, n) for m in loaded for n, value in list(getattr(m, "__dict__", {}).items()) if value is function]

    @staticmethod
    def _place(name: str, function: Callable[..., object], keepers: Sequence[tuple[ModuleType, str]]) -> None:
        # In both modules: functions call each other by the names of distributed_c10d; P2POp knows isend by identity.
        setattr(distributed_c10d, name, function)
        setattr(distributed, name, function)
        for module, attribute in keepers:
            setattr(module, attribute, function)

    def _wrapped(self, original: Callable[..., object], sent: Callable[[Arguments], float]) -> Callable[..., object]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def counted(*args: object, **kwargs: object) -> object:
            if self._depth == 0:
                self._sent += sent(dict(signature.bind(*args, **kwargs).arguments))
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return counted
