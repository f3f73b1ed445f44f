"""The ``--megascale*`` flags, and what they ask for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megascale_omni.config import MegaScaleConfig
from megascale_omni.effects import refuse_ineffective
from megatron_ext import patches, support

if TYPE_CHECKING:
    from megatron_ext.runtime import Runtime


_PAGING = {
    "megascale_page_size": "page_size_bytes",
    "megascale_device_budget": "device_budget",
    "megascale_host_budget": "host_budget",
    "megascale_disk_path": "disk_path",
    "megascale_page_checksum": "checksum",
    "megascale_prefetch": "prefetch",
    "megascale_step_in_backward": "step_in_backward",
    "megascale_max_lag": "max_lag_steps",
}
"""Flags and the paging options that they set."""
_CHECKPOINT = {
    "megascale_checkpoint_format": "format",
    "megascale_checkpoint_beside": "beside",
    "megascale_checkpoint_full_every": "full_every",
    "megascale_checkpoint_keep": "keep",
    "megascale_checkpoint_staging": "staging_bytes",
    "megascale_checkpoint_cpus": "cpus",
}
"""Flags and the checkpoint options that they set."""

_DISTRIBUTED = {
    "megascale_dispatcher": "dispatcher",
    "megascale_move": "move",
    "megascale_discovery": "discovery",
    "megascale_topology": "topology",
    "megascale_placement": "placement",
    "megascale_grad_wire": "grad_wire",
    "megascale_fetch": "fetch",
}
"""Flags and the options of the distributed section that they set."""

_COMPUTE = {
    "megascale_cpu_products": "cpu_products",
    "megascale_backend": "backend",
    "megascale_optimizer_device": "optimizer_device",
}
"""Flags and the options of the compute section that they set."""

_OBSERVE = {"megascale_trace": "trace", "megascale_report": "report", "megascale_routing": "routing"}
"""Flags and what they have written down."""

_CLIP = {"megascale_clip": "mode", "megascale_cmsa_alpha": "alpha", "megascale_nonfinite": "nonfinite"}
"""Flags and the clipping options that they set."""


_SECTIONS = {
    "paging": _PAGING,
    "distributed": _DISTRIBUTED,
    "compute": _COMPUTE,
    "heat": {"megascale_frozen": "frozen"},
    "observe": _OBSERVE,
    "clip": _CLIP,
    "checkpoint": _CHECKPOINT,
}
"""Sections of the configuration, and the flags that set options of them."""

_SWITCHES = {"step_in_backward", "beside"}
"""Options whose flags say on or off."""


def add_megascale_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds MegaScale's flags to a Megatron argument parser and returns the parser."""
    group = parser.add_argument_group("megascale", "experts in pages")
    group.add_argument("--megascale", action="store_true", help="keep the experts of every MoE layer in pages")
    group.add_argument(
        "--megascale-config", metavar="FILE", help="JSON or YAML file of options; flags given here win over it"
    )
    group.add_argument(
        "--megascale-page-size", metavar="SIZE", help="weight bytes of a page, 64KiB to 64MiB (default 16MiB)"
    )
    group.add_argument(
        "--megascale-device-budget",
        metavar="SIZE",
        help="device memory for pages: 8GiB, 25%% (of all pages), auto; default: all pages stay there",
    )
    group.add_argument("--megascale-host-budget", metavar="SIZE", help="host memory behind it (default 0)")
    group.add_argument("--megascale-disk-path", metavar="DIR", help="folder for the pages that fit in neither")
    group.add_argument("--megascale-page-checksum", choices=["auto", "xxh3", "crc32", "off"], help="of pages on disk")
    group.add_argument(
        "--megascale-prefetch",
        choices=["none", "history", "early-router"],
        help="pages fetched ahead: by schedule and past (default history), and by the next layer's router",
    )
    group.add_argument(
        "--megascale-frozen",
        choices=["wake", "reroute"],
        help="tokens of a frozen expert wake it (default), or go to the next-best one (changes the mathematics)",
    )
    group.add_argument(
        "--megascale-step-in-backward",
        choices=["on", "off"],
        help="complete gradients, and without clipping step experts, in the last backward (default on)",
    )
    group.add_argument(
        "--megascale-max-lag", type=int, metavar="STEPS", help="most steps an unused page may wait (default 100)"
    )
    group.add_argument(
        "--megascale-cpu-products",
        choices=["auto", "blas", "onednn"],
        help="library of fp32 products on a CPU (default auto: oneDNN where the processor is not Intel's)",
    )
    group.add_argument(
        "--megascale-dispatcher",
        choices=["stock", "groups"],
        help="how tokens reach experts: stock's dispatcher (default), or each token once to each rank",
    )
    group.add_argument(
        "--megascale-move",
        choices=["auto", "tokens", "pages"],
        help="what travels with --megascale-dispatcher groups (default auto: what costs less)",
    )
    group.add_argument(
        "--megascale-discovery", choices=["allgather", "gossip"], help="how ranks exchange counts (default allgather)"
    )
    group.add_argument(
        "--megascale-topology", metavar="FILE", help="where ranks are, and what links between them carry"
    )
    group.add_argument("--megascale-placement", metavar="FILE", help="which rank keeps which expert")
    group.add_argument(
        "--megascale-grad-wire",
        choices=["fp32", "bf16"],
        help="what expert gradients travel in between copies of an expert (default fp32; bf16 changes the mathematics)",
    )
    group.add_argument(
        "--megascale-fetch",
        choices=["step", "demand"],
        help="updated pages go to other copies of an expert at each step (default), or when tokens need them",
    )
    group.add_argument(
        "--megascale-routing", metavar="DIR", help="write down what routers choose, for `megascale topology`"
    )
    group.add_argument(
        "--megascale-trace", metavar="FILE", help="write down every use of a page, for `megascale trace replay`"
    )
    group.add_argument(
        "--megascale-backend",
        choices=["auto", "torch", "triton"],
        help="who computes experts (default auto: Triton kernels on an accelerator, torch elsewhere)",
    )
    group.add_argument(
        "--megascale-optimizer-device",
        choices=["auto", "host", "device"],
        help="where pages whose optimizer state lies in host memory are stepped (default auto: what takes less time)",
    )
    group.add_argument(
        "--megascale-report", metavar="DIR", help="what happened to pages over time, with pictures at the end"
    )
    group.add_argument(
        "--megascale-clip",
        choices=["stock", "cmsa"],
        help="gradient clipping: stock's (default), or each module to a threshold of its own (changes the mathematics)",
    )
    group.add_argument(
        "--megascale-cmsa-alpha", metavar="ALPHA", help="auto (default: fitted in the first 11 steps), or 0 to 1"
    )
    group.add_argument(
        "--megascale-nonfinite",
        choices=["stock", "skip"],
        help="steps with non-finite gradients: as stock (default), or left out on all ranks; cmsa leaves them out",
    )
    group.add_argument(
        "--megascale-checkpoint-format", choices=["stock", "paged"], help="of what is saved (default stock)"
    )
    group.add_argument(
        "--megascale-checkpoint-beside", choices=["on", "off"], help="write beside training (default off)"
    )
    group.add_argument(
        "--megascale-checkpoint-full-every",
        type=int,
        metavar="SAVES",
        help="store all pages at every n-th save, changed ones between (default 1)",
    )
    group.add_argument("--megascale-checkpoint-keep", type=int, metavar="N", help="newest that stay (default all)")
    group.add_argument(
        "--megascale-checkpoint-staging", metavar="SIZE", help="memory for copies beside training (default 64MiB)"
    )
    group.add_argument("--megascale-checkpoint-cpus", metavar="CORES", help="cores of the writer, e.g. 0,2-4")
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
    for section, flags in _SECTIONS.items():
        found = {option: getattr(args, flag) for flag, option in flags.items() if getattr(args, flag, None) is not None}
        for switch in _SWITCHES & found.keys():
            found[switch] = found[switch] == "on"
        if found:
            config = config.replace(section, **found)
    refuse_ineffective(config)
    return config


def enable_from_args(args: argparse.Namespace, *, announce: bool = True) -> Runtime | None:
    """Enables MegaScale if the flags ask for it; call it before the model is built. ``announce``: see :func:`enable`.

    Raises:
        ValueError: a flag that MegaScale does not support (by name), a dense model, a bad configuration.
    """
    config = config_from_args(args)
    if config is None:
        return None
    support.check_arguments(args, needs_experts=not config.clip.skips_nonfinite)
    support.graphs_said(args, pages_leave=config.paging.device_budget is not None)
    runtime = patches.enable(config, announce=announce)
    runtime.export.folder = runtime.export.folder or getattr(args, "save", None)
    return runtime
