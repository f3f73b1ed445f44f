"""Options that another option's value leaves without effect: refused, with both named and what to do.

What the options alone say is in :data:`NEEDS`. What also takes the layout of the ranks (a configuration may serve
several) is warned of by the adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from megascale_omni.config import MegaScaleConfig, parse_budget


@dataclass(frozen=True)
class Need:
    """Options, ``section.name``, that do nothing unless ``met``.

    Attributes:
        options: the options; only values other than the default count as given.
        met: whether a configuration has what they need.
        lacking: what stands in the way, with the option's name. remedy: what to add.
    """

    options: tuple[str, ...]
    met: Callable[[MegaScaleConfig], bool]
    lacking: str
    remedy: str


def _has_host_memory(config: MegaScaleConfig) -> bool:
    """Whether pages may be in host memory behind the device's."""
    paging = config.paging
    if paging.device_budget is None:
        return False
    return paging.host_budget == "auto" or not parse_budget(paging.host_budget, key="paging.host_budget").is_nothing


_HEAT = tuple(f"heat.{item.name}" for item in fields(MegaScaleConfig().heat) if item.name != "enabled")

NEEDS = (
    Need(
        ("paging.host_budget", "paging.disk_path", "paging.checksum", "paging.prefetch"),
        lambda config: config.paging.device_budget is not None,
        "without paging.device_budget: all pages stay in device memory",
        "add paging.device_budget (--megascale-device-budget)",
    ),
    Need(
        ("paging.emergency_percent",),
        lambda config: config.paging.device_budget is not None,
        "without paging.device_budget: pages have nowhere to go",
        "add paging.device_budget (--megascale-device-budget)",
    ),
    Need(
        ("compute.optimizer_device",),
        _has_host_memory,
        "without paging.host_budget behind a device budget: no page is ever in host memory",
        "add paging.host_budget (--megascale-host-budget)",
    ),
    Need(
        ("distributed.move", "distributed.discovery", "distributed.group_cache"),
        lambda config: config.distributed.dispatcher == "groups",
        "with distributed.dispatcher=stock, the framework's own",
        "add distributed.dispatcher: groups (--megascale-dispatcher groups)",
    ),
    Need(
        ("distributed.topology",),
        lambda config: config.distributed.move == "auto",
        "with distributed.move other than auto: what moves is settled",
        "make distributed.move auto (--megascale-move auto)",
    ),
    Need(_HEAT, lambda config: config.heat.enabled, "with heat.enabled=false", "make heat.enabled true"),
    Need(
        ("heat.probe_share", "heat.probe_seconds"),
        lambda config: config.heat.freeze,
        "with heat.freeze=false: nothing is frozen",
        "make heat.freeze true",
    ),
    Need(
        ("clip.alpha", "clip.base", "clip.gvc_max", "clip.ridge", "clip.recalibrate_steps"),
        lambda config: config.clip.is_cmsa,
        "with clip.mode=stock, the framework's own",
        "add clip.mode: cmsa (--megascale-clip cmsa)",
    ),
    Need(
        ("clip.mpus",),
        lambda config: config.clip.skips_nonfinite,
        "with clip.mode=stock and clip.nonfinite=stock, the framework's own",
        "add clip.mode: cmsa (--megascale-clip cmsa) or clip.nonfinite: skip (--megascale-nonfinite skip)",
    ),
    Need(
        ("clip.ridge", "clip.recalibrate_steps"),
        lambda config: config.clip.alpha == "auto",
        "with a number as clip.alpha: nothing is fitted",
        "make clip.alpha auto (--megascale-cmsa-alpha auto)",
    ),
    Need(
        ("checkpoint.staging_bytes", "checkpoint.cpus"),
        lambda config: config.checkpoint.beside,
        "with checkpoint.beside=false: saves are written in place",
        "make checkpoint.beside true (--megascale-checkpoint-beside on)",
    ),
)


def refuse_ineffective(config: MegaScaleConfig) -> None:
    """Raises ValueError for the first option that has a value of its own and no effect beside the others."""
    default = MegaScaleConfig()
    for need in NEEDS:
        if need.met(config):
            continue
        for option in need.options:
            value = _value(config, option)
            if value != _value(default, option):
                raise ValueError(f"{option}={value} has no effect {need.lacking}; {need.remedy}, or leave it out")


def _value(config: MegaScaleConfig, option: str) -> object:
    section, name = option.split(".")
    return getattr(getattr(config, section), name)
