"""Numbers as people read them."""

import math


def plain_number(value: float) -> str:
    """Four significant digits; thousands separated; very small and very large ones with a power of ten."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def plain_bytes(value: float) -> str:
    """`1.23 GiB`, `456 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def plain_seconds(value: float) -> str:
    """`0.123 s`, `45.6 s`, `3 min 12 s`."""
    if value < 100:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds} s"
