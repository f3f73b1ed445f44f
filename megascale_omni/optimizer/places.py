"""Where pages are stepped whose state lies in host memory: there, or on the device they are brought to. Pure functions.

[Note: where the state lies]
A page's moments decide. Where they lie on the device, or on disk, the page is stepped on the device. Where they lie in
host memory there is a choice: the gradient comes down, the step is made there, and the new weight goes up (few bytes
over the link, many from host memory); or parameter, moments and all go up and come down again (many over the link).
Copies and steps run side by side, so that the slowest of them is what it takes. Either way the same arithmetic makes
the same bits [Note: one arithmetic on two processors]; so this decides about time alone, and ranks need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megascale_omni.config import OptimizerDevice

Place = Literal["host", "device"]


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of the link each way, and of a step (all that it reads and writes) in either memory."""

    to_device: float
    to_host: float
    host_step: float
    device_step: float


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one parameter: its gradient, its weight as the forward reads it, and its state (parameter, moments).

    ``on_device``: whether the parameter is the weight itself, and so on the device when the state is not.
    """

    gradient: int
    weight: int
    state: int = 12
    on_device: bool = False

    @classmethod
    def of(cls, *, weight: torch.dtype, gradient: torch.dtype) -> StepBytes:
        """Those of a module: parameters in fp32 beside the weights, unless these are fp32 themselves."""
        return cls(gradient.itemsize, weight.itemsize, on_device=weight is torch.float32)

    @property
    def touched(self) -> int:
        """What a step reads and writes: parameter and moments both, the gradient, the weight where it is apart."""
        return 2 * self.state + self.gradient + (0 if self.on_device else self.weight)

    @property
    def down(self) -> int:
        """What comes down for a step in host memory."""
        return self.gradient + (self.weight if self.on_device else 0)

    @property
    def moved(self) -> int:
        """What goes up, and down again, for a step on the device."""
        return self.state - (self.weight if self.on_device else 0)


def seconds_on_host(rates: Rates, numbers: StepBytes) -> float:
    """Of one parameter stepped in host memory, copies beside it."""
    return max(numbers.down / rates.to_host, numbers.weight / rates.to_device, numbers.touched / rates.host_step)


def seconds_on_device(rates: Rates, numbers: StepBytes) -> float:
    """Of one parameter stepped on the device, copies beside it."""
    moved = numbers.moved
    return max(moved / rates.to_device, moved / rates.to_host, numbers.touched / rates.device_step)


def faster(rates: Rates, numbers: StepBytes) -> Place:
    """Where a step takes less time; in host memory where it is the same, because that leaves the device alone."""
    return "host" if seconds_on_host(rates, numbers) <= seconds_on_device(rates, numbers) else "device"


@dataclass(frozen=True)
class Settled:
    """Where the pages in host memory of a run are stepped, and why."""

    place: Place
    why: str

    @property
    def in_host(self) -> bool:
        """Whether it is there."""
        return self.place == "host"


def settle(
    choice: OptimizerDevice, *, unlike: str | None, rates: Rates | None, numbers: StepBytes, host_slots: bool = True
) -> Settled:
    """What a choice comes to.

    Args:
        choice: as configured.
        unlike: why the arithmetic has other bits in host memory than on the device; None where it has the same.
        rates: as measured; None where device and host are one memory.
        numbers: of the module with most to move.
        host_slots: whether there is any host memory for pages.

    Raises:
        ValueError: ``host`` where it would change bits; ``host`` or ``device`` where no page is in host memory.
    """
    if not host_slots:
        if choice != "auto":
            raise ValueError(
                f"compute.optimizer_device={choice} has no effect: no page is ever in host memory here; give "
                "paging.host_budget (--megascale-host-budget) as a size or a percentage, or leave it out"
            )
        return Settled("device", "no page is in host memory")
    if unlike is not None:
        if choice == "host":
            raise ValueError(f"compute.optimizer_device=host would change bits: {unlike}; use device or auto")
        return Settled("device", unlike)
    if choice != "auto":
        return Settled(choice, "as asked for")
    if rates is None:
        return Settled("host", "device and host are one memory")
    place = faster(rates, numbers)
    host, device = seconds_on_host(rates, numbers), seconds_on_device(rates, numbers)
    why = (
        f"link {rates.to_device / 1e9:.3g} GB/s up and {rates.to_host / 1e9:.3g} down, "
        f"steps {rates.host_step / 1e9:.3g} GB/s there and {rates.device_step / 1e9:.3g} on the device: "
        f"{1e9 * host:.3g} ns a parameter against {1e9 * device:.3g}"
    )
    return Settled(place, why)
