"""Host memory that an accelerator copies from and to by itself: page-locked where it lies, segment by segment.

torch's own pinned allocations round up to powers of two and are kept by a cache when they are freed. A segment here is
a plain private mapping that is registered with the CUDA runtime, and unregistered before it returns to the system.
"""

from __future__ import annotations

import logging
from typing import Protocol

logger = logging.getLogger(__name__)

SUCCESS = 0


class PinningFailed(RuntimeError):
    """The CUDA runtime did not register, or unregister, host memory."""


class Runtime(Protocol):
    """The two calls that are needed of the CUDA runtime; each returns an error code."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> object:
        """Locks pages of memory and makes them known to the device."""
        ...

    def cudaHostUnregister(self, address: int) -> object:
        """The inverse; ``address`` is that of a registration."""
        ...


def cuda_runtime() -> Runtime:
    """The CUDA runtime that torch is bound to. RuntimeError where there is no accelerator."""
    import torch

    runtime: Runtime = torch.cuda.cudart()
    return runtime


class Registrations:
    """The segments of one arena that are registered, by address."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._nbytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(self._nbytes.values())

    def add(self, address: int, nbytes: int) -> None:
        """Registers a segment. Raises PinningFailed with the error's number and what may help."""
        code = _code(self._runtime.cudaHostRegister(address, nbytes, 0))
        if code != SUCCESS:
            raise PinningFailed(
                f"cudaHostRegister of {nbytes} bytes beside {self.nbytes} that are registered failed with CUDA error "
                f"{code}; give a smaller --megascale-host-budget (paging.host_budget), or raise the limit on locked "
                "memory (ulimit -l)"
            )
        self._nbytes[address] = nbytes

    def remove(self, address: int) -> None:
        """Unregisters a segment, whose memory must still be there. Raises PinningFailed."""
        nbytes = self._nbytes.pop(address)
        code = _code(self._runtime.cudaHostUnregister(address))
        if code != SUCCESS:
            raise PinningFailed(f"cudaHostUnregister of {nbytes} bytes at {address:#x} failed with CUDA error {code}")

    def remove_all(self) -> None:
        """Unregisters every segment; what goes wrong is logged, and the others are unregistered all the same."""
        for address in list(self._nbytes):
            try:
                self.remove(address)
            except PinningFailed as error:
                logger.error("%s", error)


def _code(result: object) -> int:
    """The number of what the runtime returned: an int, or a member of its enumeration."""
    return int(getattr(result, "value", result))  # type: ignore[call-overload, no-any-return]
