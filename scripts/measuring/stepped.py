"""What stock's optimizers keep for a parameter: the tensor that they step, and Adam's state of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stepped:
    """This rank's part of a parameter in an optimizer."""

    main: torch.Tensor
    """What torch's optimizer steps: fp32, of the parameter's shape, or flat where the optimizer is distributed."""
    start: int | None
    """Where a flat `main` begins in the flattened parameter; None: it is the whole parameter."""
    state: Mapping[str, object]
    """`exp_avg`, `exp_avg_sq`, ... of `main`; empty before the first step."""


def optimizer_members(optimizer: object) -> list[object]:
    """The optimizers of a chain, or the one that there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


class SteppedParameters:
    """Finds `Stepped` by model parameter, in any of stock's optimizers (fp32, mixed precision, distributed)."""

    def __init__(self, optimizer: object) -> None:
        self._members = [m for m in optimizer_members(optimizer) if isinstance(_inner(m), torch.optim.Optimizer)]

    def find(self, parameter: torch.nn.Parameter) -> Stepped | None:
        """This rank's part; None where another rank steps all of the parameter, or none does."""
        for member in self._members:
            shards = getattr(member, "model_param_group_index_map", None)
            if shards is not None:
                if parameter in shards:
                    group, order = shards[parameter]
                    main = _inner(member).param_groups[group]["params"][order]
                    start = member._get_model_param_range_map(parameter)["param"].start  # type: ignore[attr-defined]
                    return Stepped(main, start, _inner(member).state.get(main, {}))
                continue
            main = getattr(parameter, "main_param", parameter)
            if main in _inner(member).state or any(_contains(group, main) for group in _inner(member).param_groups):
                return Stepped(main, None, _inner(member).state.get(main, {}))
        return None


def _inner(member: object) -> torch.optim.Optimizer:
    return getattr(member, "optimizer", None)  # type: ignore[return-value]


def _contains(group: Mapping[str, object], tensor: torch.Tensor) -> bool:
    params = group["params"]
    assert isinstance(params, list)
    return any(param is tensor for param in params)
