"""Options that others leave without effect: every one is refused, by flag, by file and by DeepSpeed's JSON."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from deepspeed_ext.config import section_of
from megascale_omni.config import MegaScaleConfig
from megascale_omni.effects import NEEDS, refuse_ineffective
from megatron_ext.arguments import add_megascale_args, config_from_args

Options = dict[str, object]
BUDGET: Options = {"device_budget": "25%", "disk_path": "/d"}
LONE: dict[str, tuple[object, dict[str, Options]]] = {
    "paging.host_budget": ("1GiB", {"paging": BUDGET}),
    "paging.disk_path": ("/d", {"paging": BUDGET}),
    "paging.checksum": ("crc32", {"paging": BUDGET}),
    "paging.prefetch": ("none", {"paging": BUDGET}),
    "compute.optimizer_device": ("host", {"paging": {**BUDGET, "host_budget": "40%"}}),
    "distributed.move": ("tokens", {"distributed": {"dispatcher": "groups"}}),
    "distributed.discovery": ("gossip", {"distributed": {"dispatcher": "groups"}}),
    "distributed.group_cache": (7, {"distributed": {"dispatcher": "groups"}}),
    "heat.probe_share": (0.5, {}),
    "clip.alpha": (0.5, {"clip": {"mode": "cmsa"}}),
    "clip.base": (2.0, {"clip": {"mode": "cmsa"}}),
    "clip.gvc_max": (2.0, {"clip": {"mode": "cmsa"}}),
    "clip.ridge": (2.0, {"clip": {"mode": "cmsa"}}),
    "clip.recalibrate_steps": (9, {"clip": {"mode": "cmsa"}}),
    "clip.mpus": ({"*": "all"}, {"clip": {"nonfinite": "skip"}}),
    "checkpoint.staging_bytes": ("1MiB", {"checkpoint": {"format": "paged", "beside": True}}),
    "checkpoint.cpus": ("0", {"checkpoint": {"format": "paged", "beside": True}}),
}
"""Options with a value, and what makes it effective."""
BESIDE: dict[str, Options] = {
    "heat.probe_share": {"enabled": False},
    "checkpoint.staging_bytes": {"format": "paged"},
    "checkpoint.cpus": {"format": "paged"},
}
"""What else is given in the section where the option has no effect."""


def with_option(option: str, value: object, rest: dict[str, Options]) -> dict[str, Options]:
    section, name = option.split(".")
    return {**rest, section: {**rest.get(section, {}), name: value}}


@pytest.mark.parametrize("option", LONE)
def test_an_option_without_effect_is_refused_and_one_with_effect_is_not(option: str) -> None:
    value, needed = LONE[option]
    lone = with_option(option, value, {option.split(".")[0]: BESIDE.get(option, {})})
    with pytest.raises(ValueError, match=rf"^{re.escape(option)}=.* has no effect .*; .*, or leave it out$"):
        refuse_ineffective(MegaScaleConfig.from_mapping(lone))
    refuse_ineffective(MegaScaleConfig.from_mapping(with_option(option, value, needed)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distributed": {"dispatcher": "groups", "move": "pages", "topology": "t"}}, "make distributed.move auto"),
        ({"clip": {"mode": "cmsa", "alpha": 0.5, "ridge": 2.0}}, "with a number as clip.alpha"),
        ({"heat": {"freeze": False, "probe_seconds": 1.0}}, "make heat.freeze true"),
        (
            {"compute": {"optimizer_device": "device"}, "paging": {**BUDGET, "host_budget": "0%"}},
            "add paging.host_budget",
        ),
    ],
)
def test_values_that_leave_another_without_effect(values: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse_ineffective(MegaScaleConfig.from_mapping(values))


def test_every_need_names_options_that_there_are_and_is_met_by_some_configuration() -> None:
    config = MegaScaleConfig()
    options = {f"{part.name}.{item.name}" for part in fields(config) for item in fields(getattr(config, part.name))}
    assert {option for need in NEEDS for option in need.options} <= options
    refuse_ineffective(MegaScaleConfig())


def test_a_file_may_leave_to_flags_what_its_options_need(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"paging": {"disk_path": "/d", "host_budget": "1GiB"}}))
    parser = add_megascale_args(argparse.ArgumentParser())
    given = ["--megascale", "--megascale-config", str(path)]
    config = config_from_args(parser.parse_args([*given, "--megascale-device-budget", "25%"]))
    assert config is not None
    assert config.paging.device_budget == "25%"
    with pytest.raises(ValueError, match=r"paging\.host_budget=1GiB has no effect without paging\.device_budget"):
        config_from_args(parser.parse_args(given))


def test_deepspeed_users_are_told_in_their_own_words() -> None:
    with pytest.raises(ValueError) as error:
        section_of({"megascale": {"enabled": True, "host_budget": "1GiB"}})
    assert "add paging.device_budget, or leave it out" in str(error.value)
    assert "--" not in str(error.value)
