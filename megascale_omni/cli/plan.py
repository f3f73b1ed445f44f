"""``megascale plan``: what fits, what it costs, and where paging does not pay."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_omni.planner.models import ModelCard
    from megascale_omni.planner.plan import Plan
    from megascale_omni.planner.prediction import Machine, Run

NAME = "plan"
ASSUMED_DEVICE = "h100"
HELP = "say before a run what fits where, how long a step takes, and where paging loses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the machine, the layout. Sizes are of one rank."""
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="FILE",
        help="YAML or JSON of Megatron's argument names, or flags",
    )
    parser.add_argument(
        "--device", metavar="NAME", help=f"a100, h100, h200, gh200 (assumed: {ASSUMED_DEVICE}), or here: measure"
    )
    parser.add_argument("--device-memory", metavar="SIZE", help="default: the device's")
    parser.add_argument("--host-memory", default="0", metavar="SIZE", help="for pages, of this rank (default 0)")
    parser.add_argument("--link", metavar="RATE", help="to host memory: pcie4, pcie5, nvlink-c2c, 50GB/s")
    parser.add_argument("--flops", type=float, metavar="N", help="FLOP/s that products reach, instead of the device's")
    parser.add_argument("--disk-bandwidth", metavar="RATE", help="bytes a second, or auto: measure --disk-path")
    parser.add_argument("--disk-path", default=".", metavar="DIR", help="where auto measures (default: here)")
    parser.add_argument(
        "--page-size", default="16MiB", metavar="SIZE", help="as in --megascale-page-size (default 16MiB)"
    )
    parser.add_argument("--budget", metavar="SIZE", help="plan for this device budget instead of advising one")
    parser.add_argument(
        "--expert-parallel",
        type=int,
        metavar="N",
        help="ranks that share a layer's experts (default: the model's, or 1)",
    )
    parser.add_argument(
        "--pipeline-parallel", type=int, metavar="N", help="ranks that share the layers (default: the model's, or 1)"
    )
    parser.add_argument(
        "--data-parallel", type=int, metavar="N", help="ranks that share a batch (default: those that share experts)"
    )
    parser.add_argument("--active-experts", metavar="PERCENT", help="with tokens in a micro-batch (default: evenly)")
    parser.add_argument("--trace", metavar="FILE", help="of a run of this model: what a step moves follows from it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; returns 0."""
    from megascale_omni.config import parse_bytes
    from megascale_omni.planner.models import read_model
    from megascale_omni.planner.plan import make_plan

    card, page_bytes = read_model(args.source), parse_bytes(args.page_size, key="--page-size")
    plan = _run(args, card, page_bytes)
    machine, plan = _machine(args, card, plan)
    found = make_plan(card, machine, plan)
    assumed = args.device is None
    if args.json:
        print(json.dumps({**found.as_json(), "device_assumed": assumed}, indent=1))
    else:
        print("\n".join(_lines(found, assumed=assumed, disk=machine.disk is not None)))
    return 0


def _run(args: argparse.Namespace, card: ModelCard, page_bytes: int) -> Run:
    """How the model is trained, as far as flags tell."""
    from megascale_omni.config import parse_budget
    from megascale_omni.paging.budget import parse_percent
    from megascale_omni.paging.trace import read_trace
    from megascale_omni.planner.prediction import Run, state_of

    share = None
    if args.active_experts is not None:
        share = parse_percent(args.active_experts)
        if share is None or not 0 < share <= 1:
            raise ValueError(f"--active-experts={args.active_experts} is no percentage of experts; write e.g. 30%")
    for flag in ("expert_parallel", "pipeline_parallel", "data_parallel"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be 1 or more")
    expert_parallel = args.expert_parallel or card.expert_parallel
    data_parallel = args.data_parallel or expert_parallel
    if data_parallel % expert_parallel:
        raise ValueError(
            f"--data-parallel {data_parallel} is no multiple of --expert-parallel {expert_parallel}: ranks that have "
            "other experts have other samples as well"
        )
    plan = Run(
        page_bytes=page_bytes,
        expert_parallel=expert_parallel,
        pipeline_parallel=args.pipeline_parallel or card.pipeline_parallel,
        data_parallel=data_parallel,
        active_share=share,
        trace=None if args.trace is None else read_trace(args.trace),
    )
    if args.budget is None:
        return plan
    total = state_of(card, plan).total_bytes
    return dataclasses.replace(plan, budget_bytes=parse_budget(args.budget, key="--budget").bytes_of(total))


def _machine(args: argparse.Namespace, card: ModelCard, plan: Run) -> tuple[Machine, Run]:
    """The machine, and the run with what measuring it tells of the routers."""
    from megascale_omni.config import parse_bytes
    from megascale_omni.planner.bandwidth import Disk, measure_disk
    from megascale_omni.planner.devices import bandwidth, device_named
    from megascale_omni.planner.plan import leaves_pages_out
    from megascale_omni.planner.prediction import Machine

    here = args.device == "here"
    memory = None if args.device_memory is None else parse_bytes(args.device_memory, key="--device-memory")
    host = parse_bytes(args.host_memory, key="--host-memory")
    if memory is not None and memory < 1:
        raise ValueError(f"--device-memory={args.device_memory} is not more than nothing")
    if args.flops is not None and not 0 < args.flops < math.inf:
        raise ValueError(f"--flops {args.flops:g} must be a number of operations a second, more than 0, e.g. 4e14")
    if here:
        from megascale_omni.planner.probe import measure_here, memory_here, paging_efficiency

        _tell("measuring steps of a small part of the model here: some seconds, a minute for a large one")
        memory = memory_here() if memory is None else memory
        measured = measure_here(
            card, page_bytes=plan.page_bytes, gives_back=leaves_pages_out(card, plan, device_memory=memory)
        )
        device = measured.device
        if plan.active_share is None:
            plan = dataclasses.replace(
                plan, active_share=measured.active_share(card.num_experts), routed=measured.routed
            )
    else:
        device = device_named(args.device or ASSUMED_DEVICE)
    if args.link is not None:
        device = dataclasses.replace(device, link_bytes=bandwidth(args.link, key="--link"))
    if args.flops is not None:
        device = dataclasses.replace(device, bf16_flops=args.flops, fp32_flops=args.flops, efficiency=1.0, experts=1.0)
    disk = None
    if args.disk_bandwidth == "auto":
        _tell(f"measuring the disk of {args.disk_path}: some seconds")
        disk = measure_disk(args.disk_path, request_bytes=min(plan.page_bytes, 4 * card.expert.num_parameters))
        if here:
            efficiency = paging_efficiency(card, disk, here=device, page_bytes=plan.page_bytes, folder=args.disk_path)
            disk = dataclasses.replace(disk, efficiency=efficiency)
    elif args.disk_bandwidth is not None:
        disk = Disk.of(bandwidth(args.disk_bandwidth, key="--disk-bandwidth"))
    return Machine(device, device.memory_bytes if memory is None else memory, host, disk), plan


def _tell(text: str) -> None:
    """Where somebody waits at a terminal."""
    if sys.stderr.isatty():
        print(f"megascale plan: {text}", file=sys.stderr, flush=True)


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:,.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} million"


def _lines(plan: Plan, *, assumed: bool, disk: bool) -> list[str]:
    from megascale_omni.planner.plan import gib

    lines = [
        f"{plan.model}: {_count(plan.parameters)} parameters, {_count(plan.expert_parameters)} in experts",
        f"device: {plan.device}" + (", assumed: name yours (--device NAME, or here to measure it)" if assumed else ""),
        f"one rank: dense state {gib(plan.dense_bytes)}, activations about {gib(plan.activation_bytes)}, "
        f"pages {gib(plan.total_page_bytes)}",
        "  by plane: " + ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in plan.plane_bytes.items()),
        f"  device budget: {gib(plan.smallest_budget)} at least, room for {gib(plan.room_bytes)}"
        + ("" if plan.advised_budget is None else f", planned {gib(plan.advised_budget)}"),
    ]
    if plan.prediction is not None:
        found = plan.prediction
        tiers = {("no place" if name == "disk" and not disk else name): n for name, n in plan.tier_bytes.items() if n}
        lines += [
            "  by tier: " + ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in tiers.items()),
            f"a step of {plan.tokens_per_step:,} tokens: {found.step_seconds:.3g} s "
            f"(compute {found.compute_seconds:.3g} s, io {found.io_seconds:.3g} s, of which "
            f"{found.stall_seconds:.3g} s are waited for); "
            f"{gib(found.loaded_bytes)} come, {gib(found.written_bytes)} go",
        ]
    lines.append(
        f"tokens an expert and micro-batch: {plan.tokens_per_expert:,.0f}; to hide a load: "
        + ", ".join(f"{count:,.0f} tokens from {name}" for name, count in plan.break_even_tokens.items())
    )
    return lines + list(plan.words)
