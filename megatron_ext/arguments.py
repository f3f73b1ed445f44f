"""The ``--megascale*`` flags, and what they ask for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megascale_omni.config import MegaScaleConfig
from megascale_omni.effects import refuse_ineffective
from megatron_ext import patches, support
from megatron_ext.flags import FLAGS, given_by_section, in_words_of_flags

if TYPE_CHECKING:
    from megatron_ext.runtime import Runtime


def add_megascale_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds MegaScale's flags to a Megatron argument parser and returns the parser."""
    group = parser.add_argument_group("megascale", "experts in pages")
    group.add_argument("--megascale", action="store_true", help="keep the experts of every MoE layer in pages")
    group.add_argument(
        "--megascale-config", metavar="FILE", help="JSON or YAML file of options; flags given here win over it"
    )
    for flag in FLAGS:
        flag.add_to(group)
    return parser


def config_from_args(args: argparse.Namespace) -> MegaScaleConfig | None:
    """The configuration that parsed flags ask for; None without ``--megascale``.

    Raises:
        ValueError: a bad value, a ``--megascale-*`` flag without ``--megascale``, an option that others leave without
            effect.
    """
    given = sorted(k for k, v in vars(args).items() if k.startswith("megascale_") and v is not None)
    if not getattr(args, "megascale", False):
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise ValueError(f"{flag}={getattr(args, given[0])} has no effect without --megascale; add --megascale")
        return None
    path = getattr(args, "megascale_config", None)
    config = MegaScaleConfig() if path is None else MegaScaleConfig.from_file(path)
    try:
        for section, options in given_by_section(args).items():
            config = config.replace(section, **options)
        refuse_ineffective(config)
    except ValueError as problem:
        raise ValueError(in_words_of_flags(str(problem), args)) from None
    return config


def enable_from_args(args: argparse.Namespace, *, announce: bool = True) -> Runtime | None:
    """Enables MegaScale if the flags ask for it; call it before the model is built. ``announce``: see :func:`enable`.

    Raises:
        ValueError: a flag that MegaScale does not support (by name), a dense model, a bad configuration.
    """
    config = config_from_args(args)
    if config is None:
        return None
    check_supported(args, config)
    try:
        runtime = patches.enable(config, announce=announce)
    except ValueError as problem:
        raise ValueError(in_words_of_flags(str(problem), args)) from problem
    runtime.export.folder = runtime.export.folder or getattr(args, "save", None)
    return runtime


def check_supported(args: argparse.Namespace, config: MegaScaleConfig) -> None:
    """Raises ValueError for flags of stock that do not go with the configuration, naming the flag."""
    needs_experts = not config.clip.skips_nonfinite
    support.check_arguments(args, needs_experts=needs_experts, paged_checkpoints=config.checkpoint.format == "paged")
    support.graphs_said(args, pages_leave=config.paging.device_budget is not None)
