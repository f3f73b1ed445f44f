"""The control of a run of Megatron-LM's scripts: stock, with another order of sums of the same quality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.megatron_lm.hooks import wrap


def compute_in_halves() -> None:
    """The routed experts of models that are built from now on sum two halves of their neurons; see `split_experts`."""
    import megatron.training.training

    wrap(megatron.training.training, "setup_model_and_optimizer", _set_up)


def _set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    from scripts.exactness.control import split_experts

    built = original(*args, **kwargs)
    split_experts(built[0])
    return built
