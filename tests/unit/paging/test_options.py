"""Paging options: what may be written, what is refused with a remedy, and what a machine makes of it."""

from dataclasses import asdict

import pytest
import torch

from megascale_omni.config import MegaScaleConfig, PagingConfig, parse_budget
from megascale_omni.paging import available
from megascale_omni.paging.available import AUTO_SHARE, available_host_bytes, paging_options
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.memory import FreeMemory
from megascale_omni.paging.upkeep import UpkeepOptions

CPU = torch.device("cpu")
GIB = 2**30
UPKEEP = UpkeepOptions(emergency_percent=5.0)
"""What a run without options of its own has."""


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("25%", Budget(fraction=0.25)),
        ("100 %", Budget(fraction=1.0)),
        ("0%", Budget(fraction=0.0)),
        ("8GiB", Budget(nbytes=8 * GIB)),
        (4096, Budget(nbytes=4096)),
        ("0", Budget(nbytes=0)),
    ],
)
def test_budgets(value, budget):
    assert parse_budget(value, key="paging.device_budget") == budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_budget": "120%"}, r"paging\.device_budget=120% is more than all pages; give at most 100%"),
        ({"device_budget": -1}, r"paging\.device_budget=-1 is negative; give a size, e\.g\. 8GiB, or a percentage"),
        ({"device_budget": "lots"}, r"paging\.device_budget='lots' is not a size; write bytes or a unit"),
        ({"host_budget": True}, r"paging\.host_budget=True is not a size"),
        (
            {"device_budget": "25%"},
            r"device_budget=25% needs a folder on a disk .* give paging\.disk_path \(--megascale-",
        ),
        ({"checksum": "md5"}, r"paging\.checksum='md5' is unknown; choose one of auto, xxh3, crc32, off"),
        ({"max_lag_steps": -1}, r"paging\.max_lag_steps=-1 must be a whole number of steps, 0 or more"),
        ({"max_lag_steps": 2.5}, r"paging\.max_lag_steps=2\.5 must be a whole number"),
        ({"max_lag_steps": True}, r"paging\.max_lag_steps=True must be a whole number"),
        ({"emergency_percent": 50}, r"paging\.emergency_percent=50 must be between 0 and 40"),
        ({"compact_percent": -1}, r"paging\.compact_percent=-1 must be a percentage between 0 and 100"),
        ({"compact_seconds": "soon"}, r"paging\.compact_seconds='soon' must be 0 or more"),
        ({"prefetch": "on"}, r"paging\.prefetch='on' is unknown; choose one of none, history, early-router"),
    ],
)
def test_what_cannot_be_is_refused_by_key_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        PagingConfig(**options)


def test_off_without_quotes_is_off_in_yaml(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("paging: {checksum: off}\n")
    assert MegaScaleConfig.from_file(file).paging.checksum == "off"


def test_without_a_device_budget_all_pages_stay():
    config = PagingConfig(disk_path="/somewhere", host_budget="1TiB")
    assert paging_options(config, CPU) == PagingOptions(upkeep=UPKEEP)


def test_options_are_passed_on(tmp_path):
    upkeep = UpkeepOptions(emergency_percent=2.5, compact_percent=30, compact_seconds=60.0)
    config = PagingConfig(
        device_budget="25%", disk_path=str(tmp_path), checksum="crc32", prefetch="none", **asdict(upkeep)
    )
    assert paging_options(config, CPU) == PagingOptions(
        device_budget=Budget(fraction=0.25),
        host_budget=Budget(nbytes=0),
        disk_path=str(tmp_path),
        checksum="crc32",
        prefetch=False,
        upkeep=upkeep,
    )


def test_auto_is_a_share_of_what_is_available_and_no_second_copy_in_host_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(available, "available_host_bytes", lambda: 10 * GIB)
    config = PagingConfig(device_budget="auto", host_budget="auto", disk_path=str(tmp_path))
    options = paging_options(config, CPU)
    assert options.device_budget == Budget(nbytes=int(10 * GIB * AUTO_SHARE))
    assert options.host_budget == Budget(nbytes=0)  # without an accelerator both would be the same memory


def test_a_host_budget_above_the_memory_there_is_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(available, "available_host_bytes", lambda: 10 * GIB)
    config = PagingConfig(device_budget="1GiB", host_budget="11GiB", disk_path=str(tmp_path))
    message = rf"paging\.host_budget=11GiB is more than the {10 * GIB} bytes of memory that are available"
    with pytest.raises(ValueError, match=message):
        paging_options(config, CPU)
    paging_options(PagingConfig(device_budget="1GiB", host_budget="10GiB", disk_path=str(tmp_path)), CPU)


def test_available_memory_is_the_least_that_is_free_shared_by_the_ranks_of_a_machine(monkeypatch):
    readings = [FreeMemory(2000, 99000), FreeMemory(1000, 1500)]
    monkeypatch.setattr(available.HostMemory, "readings", lambda self: readings)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_host_bytes() == 1000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_host_bytes() == 250


def test_available_memory_of_this_machine_is_some():
    assert 0 < available_host_bytes() < 2**60
