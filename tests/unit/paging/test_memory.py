"""How much memory is free: what limits a process, as the system tells it."""

import mmap
import resource
from pathlib import Path

import pytest

from megascale_omni.paging import memory
from megascale_omni.paging.layout import MIB
from megascale_omni.paging.memory import FreeMemory, HostMemory

MEMINFO = "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:    200 kB\n"


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Writes files that stand for those of a system; without limits of its own."""

    def write(files: dict[str, str]) -> HostMemory:
        for name, text in {"/proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return HostMemory()

    read = memory.lines
    monkeypatch.setattr(memory, "lines", lambda path: read(tmp_path / str(path).lstrip("/")))
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return write


def test_without_limits_the_system_tells(system):
    assert system({})() == FreeMemory(200 * 1024, 1000 * 1024)


def test_local_ranks_share_what_the_machine_has_and_not_a_limit_of_their_own(system, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert system({})() == FreeMemory(200 * 1024, 1000 * 1024, sharers=4)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (4096, 4096))
    status = {"/proc/self/status": "VmData:  1 kB\nVmSize: 2 kB\n"}
    assert [found.sharers for found in system(status).readings()] == [4, 1, 1]


def test_every_control_group_above_the_process_counts(system):
    """The one that leaves the smallest share; page cache that can be given up is free."""
    group = "/sys/fs/cgroup/jobs/mine"
    files = {
        "/proc/self/cgroup": "0::/jobs/mine\n",
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": "900\n",
        "/sys/fs/cgroup/jobs/memory.max": "4000\n",
        "/sys/fs/cgroup/jobs/memory.current": "3900\n",
        "/sys/fs/cgroup/jobs/memory.stat": "anon 3000\ninactive_file 300\ninactive_file_other 7\n",
    }
    assert system(files)() == FreeMemory(400, 4000)
    assert FreeMemory(200 * 1024, 1000 * 1024) in HostMemory().readings()


def test_control_groups_of_the_first_version(system):
    group = "/sys/fs/cgroup/memory/mine"
    files = {
        "/proc/self/cgroup": "4:cpu,memory:/mine\n3:cpuset:/\n",
        f"{group}/memory.limit_in_bytes": "5000\n",
        f"{group}/memory.usage_in_bytes": "4800\n",
        f"{group}/memory.stat": "total_inactive_file 100\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "4800\n",
    }
    assert system(files)() == FreeMemory(300, 5000)


def test_a_limit_of_the_process_is_its_memory():
    """Of this very process: what it takes is what its limit does not leave any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = memory._table("/proc/self/status", ("VmData",))["VmData"]
    resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * MIB, hard))
    try:
        (before,) = memory._of_limits()
        held = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        (after,) = memory._of_limits()
        held.close()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert before.total_bytes == used + 64 * MIB
    assert 0 < before.free_bytes <= 64 * MIB
    assert before.free_bytes - after.free_bytes >= 32 * MIB - 64 * 1024


def test_this_machine_has_some():
    found = HostMemory()()
    assert 0 < found.free_bytes <= found.total_bytes
    assert 0 < found.share <= 1
    assert Path("/proc/meminfo").exists() == bool(list(memory._of_system()))
