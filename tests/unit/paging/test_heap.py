"""Freed blocks go back to the system, in a process of its own: the allocator is the whole process's."""

import subprocess
import sys

import pytest
import torch

from megascale_omni.paging import manager as manager_module
from megascale_omni.paging import options as options_module
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane

SCRIPT = """
import sys, torch
from megascale_omni.paging.heap import give_large_blocks_back
def private():
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10
if sys.argv[1] == "held":
    assert give_large_blocks_back()
torch.ones(1 << 20)  # 4 MiB: glibc's first free of a large block
before = private()
kept, freed = [], []
for _ in range(20):  # blocks in use between blocks that are freed
    freed.append(torch.ones(1 << 20))
    kept.append(torch.ones(1 << 13))
del freed
print(private() - before)
"""


def left(how: str) -> int:
    """Private bytes that stay after 80 MiB were freed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_blocks_leave_the_process():
    assert left("usual") > 60 << 20  # without it they stay, or this proves nothing
    assert left("held") < 8 << 20


def test_the_users_choice_is_left_alone(monkeypatch):
    from megascale_omni.paging.heap import give_large_blocks_back

    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not give_large_blocks_back()


def test_memory_goes_back_only_where_pages_leave(tmp_path, monkeypatch):
    """It costs each step the time to clear blocks anew."""
    calls = []
    for module in (manager_module, options_module):
        monkeypatch.setattr(module, "give_large_blocks_back", lambda: calls.append(1))

    def manager(budget):
        return ExpertManager(
            device=torch.device("cpu"), options=PagingOptions(device_budget=budget, disk_path=tmp_path)
        )

    for budget in (Budget(fraction=0.5), Budget(nbytes=1 << 30)):
        manager(budget).close()
        assert calls
        calls.clear()
    held = manager(Budget(fraction=1.0))
    layout = PageLayout(ExpertShape(hidden=32, ffn=32, gated=False, bias=False), 16)
    held.add_module(path="experts", layout=layout, num_experts=8, dtypes={Plane.WEIGHT: torch.float32})
    held.resize(Budget(fraction=1.0))
    assert not calls
    held.resize(Budget(nbytes=16 * 4096))
    assert calls
    held.close()
