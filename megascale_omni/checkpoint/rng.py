"""Random number states as tensors: Python's, numpy's, torch's, the accelerator's, and those that a framework adds."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

PYTHON, PYTHON_GAUSS = "python", "python_gauss"
NUMPY, NUMPY_REST = "numpy", "numpy_rest"
TORCH, CUDA = "torch", "cuda"


def capture() -> dict[str, torch.Tensor]:
    """The states of this process by name."""
    found = as_tensors(random.getstate(), np.random.get_state(), torch.get_rng_state())
    if torch.cuda.is_available():
        found[CUDA] = torch.cuda.get_rng_state()
    return found


def as_tensors(python: Any, numpy_state: Any, torch_state: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """The states that Python, numpy and torch give, as named tensors."""
    _, numbers, gauss = python
    _, keys, position, has_gauss, cached = numpy_state
    return {
        PYTHON: torch.tensor(numbers, dtype=torch.int64),
        PYTHON_GAUSS: torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        NUMPY: torch.from_numpy(np.asarray(keys).astype(np.int64)),
        NUMPY_REST: torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        TORCH: torch_state,
    }


def as_values(states: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Python's and numpy's states, from what :func:`as_tensors` made of them. KeyError where one is missing."""
    gauss = float(states[PYTHON_GAUSS][0])
    position, has_gauss, cached = states[NUMPY_REST].tolist()
    keys = states[NUMPY].numpy().astype(np.uint32)
    return (
        (3, tuple(states[PYTHON].tolist()), None if math.isnan(gauss) else gauss),
        ("MT19937", keys, int(position), int(has_gauss), cached),
    )


def restore(states: Mapping[str, torch.Tensor]) -> None:
    """Sets the states that :meth:`capture` gave. KeyError where one is missing."""
    python, numpy_state = as_values(states)
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(states[TORCH])
    if torch.cuda.is_available() and CUDA in states:
        torch.cuda.set_rng_state(states[CUDA])
