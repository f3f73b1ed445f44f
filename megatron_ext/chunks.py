"""Stock's sort of token chunks by expert, which copies all tokens even where they are sorted already."""

from __future__ import annotations

from collections.abc import Callable

import torch

Chunks = tuple[torch.Tensor, torch.Tensor | None]

_SORTED = "_megascale_sorted"


def sort_chunks(
    stock: Callable[..., Chunks],
    input: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_idxs: torch.Tensor,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> Chunks:
    """``stock(...)``, but where the order is the one that the chunks have: tokens ``[N, h]`` and ``probs`` as they are.

    So it is without expert parallelism, where stock splits and concatenates the tokens four times a layer and step.
    A dispatcher keeps its order for life, so that on an accelerator it is read once and not in every step.
    """
    is_sorted = getattr(sorted_idxs, _SORTED, None)
    if is_sorted is None:
        is_sorted = sorted_idxs.tolist() == list(range(len(sorted_idxs)))
        setattr(sorted_idxs, _SORTED, is_sorted)
    if is_sorted:
        return input, probs
    return stock(input, split_sizes, sorted_idxs, probs=probs, fused=fused)
