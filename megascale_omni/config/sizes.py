"""Sizes, budgets and numbers as people write them; every error names the key, the value and what would work."""

from __future__ import annotations

import os
import re

from megascale_omni.paging.budget import Budget, parse_percent

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(value: object, *, key: str) -> int:
    """``16MiB``, ``1.5 GiB``, ``65536`` or an int, as bytes.

    Raises:
        ValueError: not a size; says what is.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        also = ", or a part of all pages, e.g. 25%" if "budget" in key else ""
        raise ValueError(f"{key}={value!r} is not a size; write bytes or a unit, e.g. 16MiB, 8GiB, 1048576{also}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_budget(value: object, *, key: str) -> Budget:
    """``25%`` or a size as a budget.

    Raises:
        ValueError: neither, negative, or more than 100%.
    """
    fraction = parse_percent(value) if isinstance(value, str) else None
    if fraction is not None:
        if fraction > 1:
            raise ValueError(f"{key}={value} is more than all pages; give at most 100%")
        return Budget(fraction=fraction)
    nbytes = parse_bytes(value, key=key)
    if nbytes < 0:
        raise ValueError(f"{key}={value} is negative; give a size, e.g. 8GiB, or a percentage of all pages, e.g. 25%")
    return Budget(nbytes=nbytes)


def path_or_none(value: object, *, key: str, what: str) -> str | None:
    """A path as text, or None. ValueError for what is no path, e.g. the number that YAML makes of ``report: 5``."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"{key}={value!r} must be the path of a {what}")
    return str(os.fspath(value))


def check_number(section: str, config: object, key: str, *, most: float, what: str) -> None:
    """Raises ValueError where an option is no number between 0 and ``most``; ``what`` says what it must be."""
    value = getattr(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{section}.{key}={value!r} must be {what}")
