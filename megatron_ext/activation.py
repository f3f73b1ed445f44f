"""Stock's activation settings as a frozen description."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core import activations
from megatron.core.transformer.transformer_config import TransformerConfig

from megascale_omni.experts.activation import Activation


def activation_of(config: TransformerConfig) -> Activation:
    """The activation that stock's expert MLP applies under ``config``.

    Raises:
        ValueError: a function that paged experts do not know.
    """
    known = {
        F.silu: "silu",
        F.gelu: "gelu",
        F.relu: "relu",
        activations.quick_gelu: "quick_gelu",
        activations.squared_relu: "squared_relu",
    }
    kind = known.get(config.activation_func)
    if kind is None:
        name = getattr(config.activation_func, "__name__", repr(config.activation_func))
        raise ValueError(
            f"activation_func={name} is not supported with --megascale; use one of "
            f"{', '.join(sorted(set(known.values())))}"
        )
    gated = bool(config.gated_linear_unit)
    return Activation(
        kind=kind,  # type: ignore[arg-type]
        gated=gated,
        clamp=config.activation_func_clamp_value if gated else None,
        offset=config.glu_linear_offset if gated else 0.0,
    )
