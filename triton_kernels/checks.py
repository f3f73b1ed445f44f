"""What launchers demand of their tensors: a wrong one is refused by name, before a kernel could read past it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale_omni.kernels.interpreter import is_interpreted

ALIGNMENT = 16
"""Bytes; pages begin at multiples of it, and kernels read whole 16-byte words."""


def require(
    name: str,
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
    shape: tuple[int | None, ...] | None = None,
    least: int = 0,
    rows: int = 0,
) -> None:
    """Refuses a tensor that a kernel would misread, or read or write past its end.

    ``shape`` may leave dimensions open (None); ``least`` is the least number of elements, ``rows`` that of rows. Every
    tensor must be contiguous.

    Raises:
        ValueError: names the tensor, what it is and what it must be.
    """
    require_reachable(name, device)
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}, must be on {device} like the other tensors")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)}, must be contiguous")
    if shape is not None and (
        tensor.ndim != len(shape)
        or any(want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be ({wanted})")
    if tensor.numel() < least:
        raise ValueError(f"{name}: {tensor.numel()} elements, the wave needs {least}")
    if rows and tensor.shape[0] < rows:
        raise ValueError(f"{name}: {tensor.shape[0]} rows, the wave needs {rows}")


def require_reachable(name: str, device: torch.device) -> None:
    """Refuses a device that kernels do not run on. Raises ValueError with the tensor's name."""
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        raise ValueError(f"{name}: on {device}, kernels run on an accelerator (on a CPU under TRITON_INTERPRET=1 only)")


def require_address(name: str, address: int) -> None:
    """Refuses a page address that is missing or not aligned. Raises ValueError."""
    if address == 0:
        raise ValueError(f"{name}: address 0, the page is not resident")
    if address % ALIGNMENT:
        raise ValueError(f"{name}: address {address:#x}, must be a multiple of {ALIGNMENT} bytes")


def require_offsets(name: str, *extents: int) -> None:
    """Refuses a page or a tile in which an element's number does not fit 32 bits. Raises ValueError.

    Kernels count within a page and a tile in 32 bits, and everything that grows with tokens or pages in 64.
    """
    elements = max(extents)
    if elements >= 1 << 31:
        raise ValueError(f"{name}: {elements} elements, kernels count less than {1 << 31} in a page or a tile")
