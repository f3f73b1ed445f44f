"""What Megatron-LM's code finds in place of ``torch.cuda`` on a machine without an accelerator.

Megatron-LM names the accelerator in several hundred places. Its code, and its code alone, gets words replaced
(:mod:`megatron_ext.megatron_lm.reword`): where it says ``torch.cuda`` it reaches the :class:`StandIn` below,
``.cuda()`` of a tensor or a module gives back the same object, and the string ``"cuda"`` is ``"cpu"``. torch itself
gets one more attribute in five places and is otherwise untouched: for everybody else there is no accelerator.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

NAME = "_megascale_cuda"
"""The attribute that stands where stock says ``cuda``."""


class Here(str):
    """The device of this process; formatted into ``cuda:N`` it is a number."""

    def __format__(self, spec: str) -> str:
        return "0"


class CpuEvent:
    """A moment. Work on a CPU is done when it is asked for, so there is nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.seconds = time.perf_counter()

    def record(self, stream: object = None) -> None:
        """Now."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: CpuEvent) -> float:
        """Milliseconds from this moment to ``later``."""
        return (later.seconds - self.seconds) * 1000.0

    def query(self) -> bool:
        """Whether it is over."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""


class CpuStream:
    """An order of work that is the program's own."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """A moment on this stream."""
        event = event or CpuEvent()
        event.record()
        return event

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: CpuEvent) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: CpuStream) -> None:
        """Nothing to wait for."""


class _Generators:
    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator


@contextmanager
def _nothing(*args: object, **kwargs: object) -> Iterator[None]:
    yield


def _ignored(*args: object, **kwargs: object) -> None:
    return None


def _resident_bytes(*args: object, **kwargs: object) -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes(*args: object, **kwargs: object) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(*args: object, **kwargs: object) -> dict[str, int]:
    stats: defaultdict[str, int] = defaultdict(int)
    for kind in ("allocated", "reserved", "active"):
        stats[f"{kind}_bytes.all.current"] = _resident_bytes()
        stats[f"{kind}_bytes.all.peak"] = _peak_bytes()
    return stats


def _seed(seed: int) -> torch.Generator:
    return torch.default_generator.manual_seed(seed)


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


_STREAM = CpuStream()
_PROPERTIES = SimpleNamespace(
    name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=os.cpu_count() or 1, gcnArchName=""
)


class StandIn:
    """``torch.cuda`` as Megatron-LM sees it: one device, the CPU; anything that is not here is torch's own.

    Memory figures are those of the process. The compute capability is the one that asks for the fewest special cases.
    """

    Event = CpuEvent
    Stream = CpuStream
    default_generators = _Generators()
    random = SimpleNamespace(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state)
    nvtx = SimpleNamespace(range=_nothing, range_push=_ignored, range_pop=_ignored, mark=_ignored)
    stream = staticmethod(_nothing)
    device = staticmethod(_nothing)
    synchronize = empty_cache = set_device = set_stream = reset_peak_memory_stats = staticmethod(_ignored)
    check_error = staticmethod(_ignored)
    get_rng_state = staticmethod(_get_rng_state)
    set_rng_state = staticmethod(_set_rng_state)
    manual_seed = manual_seed_all = staticmethod(_seed)
    memory_allocated = memory_reserved = device_memory_used = staticmethod(_resident_bytes)
    max_memory_allocated = max_memory_reserved = staticmethod(_peak_bytes)
    memory_stats = staticmethod(_memory_stats)

    @staticmethod
    def is_available() -> bool:
        """Stock refuses to start without an accelerator."""
        return True

    @staticmethod
    def is_initialized() -> bool:
        """Always."""
        return True

    @staticmethod
    def is_current_stream_capturing() -> bool:
        """There are no graphs."""
        return False

    @staticmethod
    def device_count() -> int:
        """One for each process here."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @staticmethod
    def current_device() -> str:
        """The CPU."""
        return Here("cpu")

    @staticmethod
    def current_stream(device: object = None) -> CpuStream:
        """The only one."""
        return _STREAM

    default_stream = current_stream

    @staticmethod
    def get_device_capability(device: object = None) -> tuple[int, int]:
        """See the class."""
        return (_PROPERTIES.major, _PROPERTIES.minor)

    @staticmethod
    def get_device_properties(device: object = None) -> SimpleNamespace:
        """See the class."""
        return _PROPERTIES

    @staticmethod
    def get_device_name(device: object = None) -> str:
        """The CPU."""
        return "cpu"

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name) if name.endswith("Tensor") else getattr(torch.cuda, name)


def _same(self: object, *args: object, **kwargs: object) -> object:
    return self


def install() -> None:
    """Gives torch the attribute that reworded code looks up. Doing it again changes nothing."""
    if NAME in vars(torch):
        return
    setattr(torch, NAME, StandIn())
    setattr(torch.Tensor, NAME, _same)
    setattr(torch.nn.Module, NAME, _same)
    setattr(torch.version, NAME, torch.version.cuda)
    setattr(torch.backends, NAME, torch.backends.cuda)


def uninstall() -> None:
    """Takes the attributes away; code that was reworded stops working."""
    for owner in (torch, torch.Tensor, torch.nn.Module, torch.version, torch.backends):
        if NAME in vars(owner):
            delattr(owner, NAME)
