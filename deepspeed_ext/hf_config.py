"""A live ``HfDeepSpeedConfig`` with an enabled section: models are loaded and built with their experts in pages.

Such an object tells transformers of DeepSpeed for as long as it lives; with ZeRO 3 models are then built partitioned.
Where its configuration has an enabled section, each ``from_pretrained`` and ``from_config`` is a ``deepspeed_ext.init``
block instead. Not so the subclass that a Trainer makes: its "auto" values are not known when a model is built, and its
optimizer sorts parameters by their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

from deepspeed_ext.config import section_of

_MAKERS = ("from_pretrained", "_from_config")


def heed() -> Callable[[], None]:
    """Makes the objects be heeded; returns what takes it back. Nothing where transformers is not installed."""
    if find_spec("transformers") is None:
        return lambda: None
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    stock = HfDeepSpeedConfig.__init__
    undo: list[Callable[[], None]] = []

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - stock's own
        stock(self, *args, **kwargs)
        if not undo and _has_section(self):
            undo.append(_patch_makers())

    def take_back() -> None:
        HfDeepSpeedConfig.__init__ = stock
        for one in undo:
            one()

    HfDeepSpeedConfig.__init__ = __init__
    return take_back


@contextmanager
def unheard() -> Iterator[None]:
    """While it lasts, transformers knows of no live object, and builds models as it does without DeepSpeed."""
    from transformers.integrations import deepspeed

    with mock.patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None):
        yield


def _has_section(config: Any) -> bool:  # noqa: ANN401 - transformers has no types
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    return type(config) is HfDeepSpeedConfig and section_of(config.config) is not None


def _live() -> Any:  # noqa: ANN401
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    return None if reference is None else reference()


def _patch_makers() -> Callable[[], None]:
    from transformers import PreTrainedModel

    stock = {name: vars(PreTrainedModel)[name] for name in _MAKERS}

    def in_pages(maker: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(maker)
        def made(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's own
            from deepspeed_ext.building import init

            live = _live()
            with init(live.config if _has_section(live) else {}):
                return maker(cls, *args, **kwargs)

        return made

    for name, method in stock.items():
        setattr(PreTrainedModel, name, classmethod(in_pages(method.__func__)))

    def take_back() -> None:
        for name, method in stock.items():
            setattr(PreTrainedModel, name, method)

    return take_back
