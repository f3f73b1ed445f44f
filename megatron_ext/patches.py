"""All that MegaScale changes in stock Megatron-Core, in one place: what a class makes, and one function.

[Note: patching construction]
Stock names its classes in many modules, some of them by ``from ... import``. Replacing a name reaches only those who
look it up later; what reaches everyone is the class itself. So the patch is a ``__new__`` on the stock class that
makes an instance of our subclass: ``MoELayer(...)`` and ``DistributedDataParallel(...)`` then give the subclass
wherever their names came from, and ``isinstance`` still holds. Objects made while the patches are in force keep
working after they are undone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from megascale_omni.config import MegaScaleConfig
from megatron_ext.runtime import Runtime


class Patch(Protocol):
    """One named, reversible change."""

    name: str

    def apply(self) -> None:
        """Makes the change; raises RuntimeError, and changes nothing, where stock is not what it expects."""
        ...

    def undo(self) -> None:
        """Puts back what was there."""
        ...


@dataclass
class MakeSubclass:
    """``stock(...)`` makes a ``subclass`` instance."""

    name: str
    stock: type
    subclass: type

    def apply(self) -> None:
        """See :class:`Patch`."""
        if "__new__" in vars(self.stock):
            raise RuntimeError(
                f"{self.name}: {self.stock.__qualname__} has a __new__ of its own, by another plug-in or a release "
                "that this one does not know"
            )
        stock, subclass = self.stock, self.subclass

        def __new__(cls: type, *args: object, **kwargs: object) -> object:
            return object.__new__(subclass if cls is stock else cls)

        self.stock.__new__ = __new__  # type: ignore[method-assign, assignment]

    def undo(self) -> None:
        """See :class:`Patch`."""
        del self.stock.__new__


@dataclass
class WrapFunction:
    """Calls ``wrapper(original, ...)`` instead of a stock function, in every loaded stock module that holds it."""

    name: str
    module: str
    attribute: str
    wrapper: Callable[..., object]
    _original: Callable[..., object] | None = field(default=None, init=False)
    _replacement: Callable[..., object] | None = field(default=None, init=False)

    def apply(self) -> None:
        """See :class:`Patch`."""
        original = getattr(sys.modules[self.module], self.attribute, None)
        if not callable(original):
            raise RuntimeError(f"{self.name}: {self.module} has no function {self.attribute}")
        wrapper = self.wrapper

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - the stock function's own
            return wrapper(original, *args, **kwargs)

        self._original, self._replacement = original, replacement
        _swap(old=original, new=replacement)

    def undo(self) -> None:
        """See :class:`Patch`."""
        assert self._original is not None
        assert self._replacement is not None
        _swap(old=self._replacement, new=self._original)


def _swap(*, old: Callable[..., object], new: Callable[..., object]) -> None:
    holders = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("megatron", "__main__")
    ]
    for holder in holders:
        for attribute in [key for key, value in vars(holder).items() if value is old]:
            setattr(holder, attribute, new)


@dataclass
class _Registry:
    """The only module-level state: what is in force, and the runtime that new layers join."""

    applied: list[Patch] = field(default_factory=list)
    runtime: Runtime | None = None


_registry = _Registry()


def enable(config: MegaScaleConfig | None = None) -> Runtime:
    """Makes stock build paged experts from now on, and returns the runtime that they share.

    Calling it again while enabled with an equal configuration (or None) returns the runtime in force.

    Raises:
        RuntimeError: stock is not what a patch expects; nothing is changed then.
        ValueError: already enabled with another configuration.
    """
    if _registry.runtime is not None:
        if config is not None and config != _registry.runtime.config:
            raise ValueError(
                "MegaScale is enabled with another configuration already; call megatron_ext.disable() first"
            )
        return _registry.runtime
    patches = _all_patches()
    applied: list[Patch] = []
    try:
        for patch in patches:
            patch.apply()
            applied.append(patch)
        _registry.runtime = Runtime.create(config or MegaScaleConfig())
    except BaseException:
        for patch in reversed(applied):
            patch.undo()
        raise
    _registry.applied = applied
    return _registry.runtime


def disable() -> None:
    """Undoes every patch; what was built stays as it is. Safe to call when nothing is in force."""
    for patch in reversed(_registry.applied):
        patch.undo()
    _registry.applied = []
    _registry.runtime = None


def active_runtime() -> Runtime:
    """The runtime in force. Raises RuntimeError when MegaScale is not enabled."""
    if _registry.runtime is None:
        raise RuntimeError("MegaScale is not enabled: call megatron_ext.enable() before the model is built")
    return _registry.runtime


def is_enabled() -> bool:
    """Whether the patches are in force."""
    return _registry.runtime is not None


def _all_patches() -> list[Patch]:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_ext.distributed import MegaScaleDDP
    from megatron_ext.layer import MegaScaleMoELayer
    from megatron_ext.optimizer import build_optimizer

    return [
        MakeSubclass("moe_layer", MoELayer, MegaScaleMoELayer),
        MakeSubclass("ddp", DistributedDataParallel, MegaScaleDDP),
        WrapFunction("optimizer", "megatron.core.optimizer", "get_megatron_optimizer", build_optimizer),
    ]
