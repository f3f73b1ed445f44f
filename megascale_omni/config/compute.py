"""What products and optimizer steps run on: the options, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ProductsChoice = Literal["auto", "blas", "onednn"]
BackendChoice = Literal["auto", "torch", "triton"]
OptimizerDevice = Literal["auto", "host", "device"]


@dataclass(frozen=True)
class ComputeConfig:
    """What the products run on.

    Attributes:
        cpu_products: library of fp32 products on a CPU; ``auto`` chooses oneDNN where the processor is not Intel's.
        backend: who computes experts: ``torch``, ``triton`` (kernels that read pages through a table), or ``auto``:
            kernels on an accelerator where Triton is installed, torch elsewhere.
        optimizer_device: where pages are stepped whose moments lie in host memory: there (``host``), on the device that
            they are brought to (``device``), or where it takes less time (``auto``). Changes no bit.
    """

    cpu_products: ProductsChoice = "auto"
    backend: BackendChoice = "auto"
    optimizer_device: OptimizerDevice = "auto"

    def __post_init__(self) -> None:
        choices = {"backend": BackendChoice, "cpu_products": ProductsChoice, "optimizer_device": OptimizerDevice}
        for key, kind in choices.items():
            if getattr(self, key) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"compute.{key}={getattr(self, key)!r} is unknown; choose one of {known}")
