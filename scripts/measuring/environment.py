"""On what a measurement was made: printed beside every number."""

import os
from datetime import UTC, datetime

from megascale_omni.cli.env import environment

Environment = dict[str, object]


def measured_environment(*, threads: int | None = None) -> Environment:
    """`megascale env` with the date, the load of the machine at the start, and the threads a process computes with."""
    found: Environment = dict(environment())
    found["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    found["load_average"] = round(os.getloadavg()[0], 2)
    if threads is not None:
        found["threads"] = threads
    return found


def describe(found: Environment, *, framework: str = "megatron-core") -> str:
    """The environment in one line; ``framework``: the package that trained."""
    cpu, packages = found["cpu"], found["packages"]
    assert isinstance(cpu, dict)
    assert isinstance(packages, dict)
    gpus = found["gpus"]
    assert isinstance(gpus, list)
    parts = [
        f"{cpu['model']}, {_count(cpu['cores'], 'core')}",
        *(str(gpu["name"]) for gpu in gpus),
        *(f"{name} {packages[name]}" for name in ("torch", framework) if packages.get(name)),
        f"Python {found['python']}",
        *([_count(found["threads"], "thread")] if "threads" in found else []),
        f"load {found['load_average']}",
        str(found["date"]),
    ]
    return " | ".join(parts)


def _count(number: object, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
