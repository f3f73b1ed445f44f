"""All that MegaScale changes in stock Megatron-Core, in one place: what two classes make, and two functions.

[Note: patching construction]
Stock names its classes in many modules, some of them by ``from ... import``. Replacing a name reaches only those who
look it up later; what reaches everyone is the class itself. So the patch is an ``__init__`` on the stock class that
turns the new object into one of our subclass and initialises it as such: ``MoELayer(...)`` and
``DistributedDataParallel(...)`` then give the subclass wherever their names came from, and ``isinstance`` still holds.
Subclasses that others derived from stock stay what they are. Objects made while the patches are in force keep working
after they are undone.

It is not a ``__new__``, because that cannot be undone: once a class has had one of its own, Python refuses it arguments
even after it was deleted (the type's slot is not reset). Nor would copies of stock objects, which ``__new__`` makes as
well, stay stock's.
"""

from __future__ import annotations

import functools
import inspect
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
    """``stock(...)`` makes a ``subclass`` instance (see [Note: patching construction])."""

    name: str
    stock: type
    subclass: type
    _original: Callable[..., None] | None = field(default=None, init=False)

    def apply(self) -> None:
        """See :class:`Patch`."""
        found = vars(self.stock).get("__init__")
        qualname = f"{self.stock.__qualname__}.__init__"
        original = _as_defined(found, patch=self.name, module=self.stock.__module__, qualname=qualname)
        takes, known = _parameters(original), _named_parameters(self.subclass.__init__)  # type: ignore[misc]
        if takes[: len(known)] != known:  # what a release adds behind them is passed on by name
            raise RuntimeError(_other_release(self.name, qualname, takes=takes, known=known))
        stock, subclass = self.stock, self.subclass

        @functools.wraps(original)
        def __init__(self: object, *args: object, **kwargs: object) -> None:
            if type(self) is stock:
                object.__setattr__(self, "__class__", subclass)  # torch's own __setattr__ needs an initialised module
                subclass.__init__(self, *args, **kwargs)  # type: ignore[misc]
            else:
                original(self, *args, **kwargs)

        self._original = original
        self.stock.__init__ = __init__  # type: ignore[misc]

    def undo(self) -> None:
        """See :class:`Patch`."""
        self.stock.__init__ = self._original  # type: ignore[misc]


@dataclass
class WrapFunction:
    """Calls ``wrapper(original, ...)`` instead of a stock function, in every loaded module that holds it."""

    name: str
    module: str
    attribute: str
    wrapper: Callable[..., object]
    _original: Callable[..., object] | None = field(default=None, init=False)
    _replacement: Callable[..., object] | None = field(default=None, init=False)

    def apply(self) -> None:
        """See :class:`Patch`."""
        found = getattr(sys.modules[self.module], self.attribute, None)
        original = _as_defined(found, patch=self.name, module=self.module, qualname=self.attribute)
        wrapper = self.wrapper
        takes, known = _parameters(original), _named_parameters(wrapper)[1:]
        if takes[: len(known)] != known:
            raise RuntimeError(_other_release(self.name, self.attribute, takes=takes, known=known))

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


def _as_defined(found: object, *, patch: str, module: str, qualname: str) -> Callable[..., Any]:
    """``found``, which must be the plain function that ``module`` defines as ``qualname``; RuntimeError otherwise."""
    if (
        inspect.isfunction(found)
        and (found.__module__, found.__qualname__) == (module, qualname)
        and not hasattr(found, "__wrapped__")
    ):
        return found
    raise RuntimeError(
        f"{patch}: {module}:{qualname} is not what MegaScale expects: missing, or replaced or wrapped by another "
        "plug-in or a release that this one does not know"
    )


def _other_release(patch: str, qualname: str, *, takes: tuple[str, ...], known: tuple[str, ...]) -> str:
    return (
        f"{patch}: {qualname} takes ({', '.join(takes)}), MegaScale knows it with ({', '.join(known)}): this release "
        "of Megatron-Core is not supported"
    )


def _parameters(function: Callable[..., object]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _named_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """Without what ``**more`` takes."""
    found = inspect.signature(function).parameters.values()
    return tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD)


def _swap(*, old: Callable[..., object], new: Callable[..., object]) -> None:
    for holder in list(sys.modules.values()):
        names = getattr(holder, "__dict__", {})
        for attribute in [key for key, value in list(names.items()) if value is old]:
            setattr(holder, attribute, new)


@dataclass
class _Registry:
    """The only module-level state: what is in force, and the runtime that new layers join."""

    applied: list[Patch] = field(default_factory=list)
    runtime: Runtime | None = None


_registry = _Registry()


def enable(config: MegaScaleConfig | None = None, *, announce: bool = True) -> Runtime:
    """Makes stock build paged experts from now on, and returns the runtime that they share.

    With ``announce`` the first rank prints a line about its experts when their optimizer is built.
    Calling it again while enabled with an equal configuration (or None) returns the runtime in force.

    Raises:
        RuntimeError: stock is not what a patch expects; nothing is changed then.
        ValueError: already enabled with another configuration; something else than a configuration.
    """
    if not (config is None or isinstance(config, MegaScaleConfig)):
        raise ValueError(
            f"enable() takes a MegaScaleConfig, not {config!r}; make one with MegaScaleConfig.from_mapping(...), of "
            "nested mappings, or MegaScaleConfig.from_file(...)"
        )
    if _registry.runtime is not None:
        if config is not None and config != _registry.runtime.config:
            raise ValueError(
                "MegaScale is enabled with another configuration already; call megatron_ext.disable() first"
            )
        return _registry.runtime
    config = config or MegaScaleConfig()
    patches = _all_patches(config)
    applied: list[Patch] = []
    try:
        for patch in patches:
            patch.apply()
            applied.append(patch)
        _registry.runtime = Runtime.create(config, announce=announce)
    except BaseException:
        for patch in reversed(applied):
            patch.undo()
        raise
    _registry.applied = applied
    return _registry.runtime


def disable() -> None:
    """Undoes every patch and ends traces; what was built stays as it is. Safe to call when nothing is in force."""
    for patch in reversed(_registry.applied):
        patch.undo()
    _registry.applied = []
    if _registry.runtime is not None:
        _registry.runtime.close()
    _registry.runtime = None


def active_runtime() -> Runtime:
    """The runtime in force. Raises RuntimeError when MegaScale is not enabled."""
    if _registry.runtime is None:
        raise RuntimeError("MegaScale is not enabled: call megatron_ext.enable() before the model is built")
    return _registry.runtime


def is_enabled() -> bool:
    """Whether the patches are in force."""
    return _registry.runtime is not None


def _all_patches(config: MegaScaleConfig) -> list[Patch]:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_ext.distributed import MegaScaleDDP, tell_micro_batches
    from megatron_ext.layer import MegaScaleMoELayer
    from megatron_ext.optimizer import build_optimizer

    patches: list[Patch] = [
        MakeSubclass("moe_layer", MoELayer, MegaScaleMoELayer),
        MakeSubclass("ddp", DistributedDataParallel, MegaScaleDDP),
        WrapFunction("optimizer", "megatron.core.optimizer", "get_megatron_optimizer", build_optimizer),
        WrapFunction("micro_batches", schedules.__name__, "forward_step", tell_micro_batches),
    ]
    if config.clip.is_cmsa and config.clip.alpha == "auto":
        from megatron_ext.clipping import tell_loss

        patches.append(WrapFunction("loss", schedules.__name__, "forward_step_calc_loss", tell_loss))
    return patches
