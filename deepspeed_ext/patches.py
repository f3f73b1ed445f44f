"""All that is changed in stock: what ``DeepSpeedEngine(...)`` makes, ``zero_to_fp32``, and ``HfDeepSpeedConfig``.

``deepspeed.initialize`` and others refer to the class by name; what reaches everyone is the class itself. So its
``__init__`` turns a new object into a :class:`MegaScaleEngine` and initialises it as such where the configuration has
an enabled ``"megascale"`` section; without one nothing changes. Engines made while this is in force keep working after
:func:`disable`. ``zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint`` adds the experts of a checkpoint that has
them in pages, which stock would leave out. ``HfDeepSpeedConfig``: see :mod:`deepspeed_ext.hf_config`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.config import section_of
from deepspeed_ext.hf_config import heed


@dataclass
class _Registry:
    """The only module-level state: stock's constructor and function while they are replaced; what undoes the rest."""

    original: Callable[..., None] | None = None
    fp32: Callable[..., dict[str, Any]] | None = None
    unheed: Callable[[], None] | None = None


_registry = _Registry()


def enable() -> None:
    """Makes ``deepspeed.initialize`` heed the section; idempotent. Importing :mod:`deepspeed_ext` calls it.

    Raises:
        RuntimeError: stock's engine is not what this release of MegaScale knows.
    """
    if _registry.original is not None:
        return
    try:
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.utils import zero_to_fp32
    except ImportError as error:
        raise ImportError("deepspeed_ext needs DeepSpeed: pip install 'megascale[deepspeed,hf]'") from error

    from deepspeed_ext.engine import MegaScaleEngine
    from deepspeed_ext.fp32 import with_experts

    original = vars(DeepSpeedEngine)["__init__"]
    takes = tuple(inspect.signature(original).parameters)
    known = tuple(inspect.signature(MegaScaleEngine.__init__).parameters)
    if takes != known or hasattr(original, "__wrapped__"):
        raise RuntimeError(
            f"DeepSpeedEngine takes ({', '.join(takes)}), MegaScale knows it with ({', '.join(known)}): this release "
            "of DeepSpeed is not supported, or another plug-in has changed it"
        )

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - stock's own
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("config")
        if isinstance(self, MegaScaleEngine) or not isinstance(given, dict) or section_of(given) is None:
            original(self, *args, **kwargs)
            return
        if type(self) is not DeepSpeedEngine:
            raise ValueError(
                f"{type(self).__name__} is not supported with megascale; use a model that is no PipelineModule, and no "
                "hybrid engine"
            )
        object.__setattr__(self, "__class__", MegaScaleEngine)  # torch's own __setattr__ needs an initialised module
        MegaScaleEngine.__init__(self, *args, **kwargs)

    stock_fp32 = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    _registry.original, _registry.fp32, _registry.unheed = original, stock_fp32, heed()
    DeepSpeedEngine.__init__ = __init__
    zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint = functools.wraps(stock_fp32)(
        functools.partial(with_experts, stock_fp32)
    )


def disable() -> None:
    """Puts stock's constructor back; what was built stays as it is."""
    if _registry.original is None:
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import zero_to_fp32

    DeepSpeedEngine.__init__ = _registry.original
    zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint = _registry.fp32
    if _registry.unheed is not None:
        _registry.unheed()
    _registry.original = _registry.fp32 = _registry.unheed = None


def is_enabled() -> bool:
    """Whether the section is heeded."""
    return _registry.original is not None
