"""Six ways to clip, behind one call: gradients are clipped in place; false means that the step is left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megascale_omni.clipping import ClipConfig, CMSAClipper
from scripts.cmsa_demo.model import MODULES

Clip = Callable[[torch.Tensor], bool]
BASE = 1.0
ADAGC_WARMUP, ADAGC_RELATIVE, ADAGC_DECAY = 20, 1.05, 0.98


def no_clip(model: nn.Module) -> Clip:
    """Nothing."""
    return lambda loss: True


def global_clip(model: nn.Module) -> Clip:
    """All gradients by one norm."""

    def clip(loss: torch.Tensor) -> bool:
        nn.utils.clip_grad_norm_(model.parameters(), BASE)
        return True

    return clip


def constant_by_module(model: nn.Module) -> Clip:
    """Each module by the same threshold."""
    parts = [[p for n, p in model.named_parameters() if n.startswith(start)] for start in MODULES]

    def clip(loss: torch.Tensor) -> bool:
        for part in parts:
            nn.utils.clip_grad_norm_(part, BASE)
        return True

    return clip


def adaptive_by_tensor(model: nn.Module) -> Clip:
    """As AdaGC (arXiv 2502.11034): each tensor to 1.05 x the moving average of its clipped norm; global at first."""
    averages: dict[str, float] = {}
    steps = 0

    def clip(loss: torch.Tensor) -> bool:
        nonlocal steps
        steps += 1
        if steps <= ADAGC_WARMUP:
            nn.utils.clip_grad_norm_(model.parameters(), BASE)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            norm = float(parameter.grad.norm())
            if steps <= ADAGC_WARMUP:
                averages[name] = min(averages.get(name, norm), norm)
                continue
            limit = ADAGC_RELATIVE * averages[name]
            if norm > limit:
                parameter.grad.mul_(limit / norm)
            averages[name] = ADAGC_DECAY * averages[name] + (1 - ADAGC_DECAY) * min(norm, limit)
        return True

    return clip


def cmsa(model: nn.Module, alpha: float | str = "auto") -> Clip:
    """Each module by a threshold that follows its spread; by default alpha is fitted in the first 11 steps."""
    clipper = CMSAClipper.for_model(model, base=BASE, config=ClipConfig(mode="cmsa", alpha=alpha))
    assert set(clipper.mpus.names) == set(MODULES.values())

    def clip(loss: torch.Tensor) -> bool:
        return not clipper.clip(model.named_parameters(), loss=loss).skip

    return clip


METHODS: dict[str, Callable[[nn.Module], Clip]] = {
    "no clipping": no_clip,
    "global": global_clip,
    "constant by module": constant_by_module,
    "AdaGC-like by tensor": adaptive_by_tensor,
    "CMSA, alpha 0.35": partial(cmsa, alpha=0.35),
    "CMSA, alpha auto": cmsa,
}
