"""Device cards: what the makers state about accelerators and the links to host memory."""

from __future__ import annotations

from dataclasses import dataclass

from megascale_omni.config import parse_bytes


@dataclass(frozen=True)
class Device:
    """Dense bf16 and fp32 (TF32 where it has it) FLOP/s, memory and its bytes/s, bytes/s to host memory (one way), and
    what of the peak large products reach. ``experts``: what an expert's products reach of what the others do.
    """

    name: str
    bf16_flops: float
    fp32_flops: float
    memory_bytes: int
    link_bytes: float
    memory_bytes_s: float
    efficiency: float = 0.5
    experts: float = 1.0

    def flops(self, *, bf16: bool) -> float:
        """FLOP/s that a plan counts on."""
        return self.efficiency * (self.bf16_flops if bf16 else self.fp32_flops)


GIB = 2**30
LINKS: dict[str, float] = {"pcie4": 32e9, "pcie5": 64e9, "nvlink-c2c": 450e9}
"""Bytes/s one way of sixteen lanes, and of the link of a Grace Hopper."""

DEVICES: dict[str, Device] = {
    "a100": Device("A100 80GB", 312e12, 156e12, 80 * GIB, LINKS["pcie4"], 2.0e12),
    "h100": Device("H100 80GB", 989e12, 494e12, 80 * GIB, LINKS["pcie5"], 3.35e12),
    "h200": Device("H200 141GB", 989e12, 494e12, 141 * GIB, LINKS["pcie5"], 4.8e12),
    "gh200": Device("GH200 96GB", 989e12, 494e12, 96 * GIB, LINKS["nvlink-c2c"], 4.0e12),
}


def device_named(name: str) -> Device:
    """A device card. Raises ValueError with the known ones."""
    if name.lower() not in DEVICES:
        known = ", ".join(DEVICES)
        raise ValueError(f"device {name!r} is unknown; choose among {known}, or here, which measures this machine")
    return DEVICES[name.lower()]


def bandwidth(text: str, *, key: str) -> float:
    """``pcie4``, ``pcie5``, ``nvlink-c2c``, or bytes a second such as ``6GB``. Raises ValueError for anything else."""
    name = text.strip().lower()
    if name in LINKS:
        return LINKS[name]
    try:
        value = parse_bytes(text.removesuffix("/s"), key=key)
    except ValueError as error:
        raise ValueError(f"{key}={text!r}: write bytes a second, e.g. 6GB/s, or one of {', '.join(LINKS)}") from error
    if value <= 0:
        raise ValueError(f"{key}={text!r} is not more than nothing")
    return float(value)
