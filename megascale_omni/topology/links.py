"""What it costs to send between the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LinkCosts:
    """``[P, P]``: seconds a byte from rank to rank, and seconds before the first byte; zeros on the diagonal."""

    seconds_per_byte_PP: np.ndarray
    latency_PP: np.ndarray

    @classmethod
    def uniform(cls, ranks: int, *, seconds_per_byte: float = 1.0, latency: float = 0.0) -> LinkCosts:
        """All links alike. With the defaults the cost of a message is its bytes."""
        links = 1.0 - np.eye(ranks)
        return cls(seconds_per_byte * links, latency * links)
