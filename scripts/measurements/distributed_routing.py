"""Routing maps to measure with: uniform, and in clusters of experts that are chosen together."""

from __future__ import annotations

import numpy as np
import torch

CLUSTERS = 4
LEAK = 0.1
"""Share of a token's choices that its cluster does not decide."""
_CLUSTER_SEED = 12345


def clusters_of(experts: int) -> np.ndarray:
    """``[E]``: the cluster of each expert; members of one are scattered over the ids."""
    order = np.random.default_rng(_CLUSTER_SEED).permutation(experts)
    cluster_E = np.empty(experts, dtype=np.int64)
    cluster_E[order] = np.arange(experts) % CLUSTERS
    return cluster_E


def routing_map(kind: str, *, tokens: int, experts: int, topk: int, seed: int) -> torch.Tensor:
    """``[T, E]`` bool, ``topk`` experts a token.

    ``uniform``: any, alike. ``clusters``: a token belongs to one of four clusters at random and draws each expert from
    it with probability 1 - ``LEAK``, else from all.
    """
    random = np.random.default_rng(seed)
    scores_TE = random.random((tokens, experts))
    if kind == "clusters":
        own_T = random.integers(CLUSTERS, size=tokens)
        inside_TE = clusters_of(experts)[None, :] == own_T[:, None]
        # The number of free choices first; these come from all experts, the others from the cluster's rest.
        free_T = random.binomial(topk, LEAK, size=tokens)
        free_TE = _first(random.random((tokens, experts)), free_T)
        bound_TE = _first(np.where(inside_TE & ~free_TE, scores_TE, np.inf), topk - free_T)
        return torch.from_numpy(free_TE | bound_TE)
    return torch.from_numpy(_first(scores_TE, np.full(tokens, topk)))


def _first(scores_TE: np.ndarray, count_T: np.ndarray) -> np.ndarray:
    """The ``count_T[t]`` columns of least score in each row."""
    rank_TE = scores_TE.argsort(1).argsort(1)
    mask: np.ndarray = rank_TE < count_T[:, None]
    return mask
