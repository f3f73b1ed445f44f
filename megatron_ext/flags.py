"""The ``--megascale-*`` flags: which option of the configuration each one sets, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SWITCH = ("on", "off")
"""Choices of a flag whose option is true or false."""


@dataclass(frozen=True)
class Flag:
    """A flag that sets one option.

    Attributes:
        key: the option, ``section.name``. name: the flag. help: one line, with ``%`` doubled for argparse.
        choices: its values where they are few. metavar: what stands for its value otherwise.
        kind: what argparse makes of the text.
    """

    key: str
    name: str
    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    kind: Callable[[str], Any] = str

    @property
    def dest(self) -> str:
        """Its attribute of the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Adds it to a parser, or to a group of one."""
        parser.add_argument(self.name, type=self.kind, help=self.help, choices=self.choices, metavar=self.metavar)

    def value_in(self, args: argparse.Namespace) -> Any:  # noqa: ANN401 - of any option
        """What was given, as the option takes it; None where the flag was left out."""
        given = getattr(args, self.dest, None)
        return given == "on" if self.choices == SWITCH and given is not None else given


FLAGS = (
    Flag(
        "paging.page_size_bytes",
        "--megascale-page-size",
        "weight bytes of a page, 64KiB to 64MiB (default 16MiB)",
        metavar="SIZE",
    ),
    Flag(
        "paging.device_budget",
        "--megascale-device-budget",
        "device memory for pages: 8GiB, 25%% (of all pages), auto; default: all pages stay there",
        metavar="SIZE",
    ),
    Flag("paging.host_budget", "--megascale-host-budget", "host memory behind it (default 0)", metavar="SIZE"),
    Flag("paging.disk_path", "--megascale-disk-path", "folder for the pages that fit in neither", metavar="DIR"),
    Flag("paging.checksum", "--megascale-page-checksum", "of pages on disk", choices=("auto", "xxh3", "crc32", "off")),
    Flag(
        "paging.prefetch",
        "--megascale-prefetch",
        "pages fetched ahead: by schedule and past (default history), and by the next layer's router",
        choices=("none", "history", "early-router"),
    ),
    Flag(
        "heat.frozen",
        "--megascale-frozen",
        "tokens of a frozen expert wake it (default), or go to the next-best one (changes the mathematics)",
        choices=("wake", "reroute"),
    ),
    Flag(
        "paging.step_in_backward",
        "--megascale-step-in-backward",
        "complete gradients, and without clipping step experts, in the last backward (default on)",
        choices=SWITCH,
    ),
    Flag(
        "paging.max_lag_steps",
        "--megascale-max-lag",
        "most steps an unused page may wait (default 100)",
        metavar="STEPS",
        kind=int,
    ),
    Flag(
        "paging.emergency_percent",
        "--megascale-emergency-percent",
        "pages give memory back where less of it is free (default 5; 0 never)",
        metavar="PERCENT",
        kind=float,
    ),
    Flag(
        "paging.compact_percent",
        "--megascale-compact-percent",
        "compact at a step's end where more of the arena's memory holds no page (default 100: never)",
        metavar="PERCENT",
        kind=float,
    ),
    Flag(
        "paging.compact_seconds",
        "--megascale-compact-seconds",
        "compact at a step's end after so much time (default 0: never)",
        metavar="SECONDS",
        kind=float,
    ),
    Flag(
        "compute.cpu_products",
        "--megascale-cpu-products",
        "library of fp32 products on a CPU (default auto: oneDNN where the processor is not Intel's)",
        choices=("auto", "blas", "onednn"),
    ),
    Flag(
        "distributed.dispatcher",
        "--megascale-dispatcher",
        "how tokens reach experts: stock's dispatcher (default), or each token once to each rank",
        choices=("stock", "groups"),
    ),
    Flag(
        "distributed.move",
        "--megascale-move",
        "what travels with --megascale-dispatcher groups (default auto: what costs less)",
        choices=("auto", "tokens", "pages"),
    ),
    Flag(
        "distributed.discovery",
        "--megascale-discovery",
        "how ranks exchange counts (default allgather)",
        choices=("allgather", "gossip"),
    ),
    Flag(
        "distributed.topology",
        "--megascale-topology",
        "where ranks are, and what links between them carry",
        metavar="FILE",
    ),
    Flag("distributed.placement", "--megascale-placement", "which rank keeps which expert", metavar="FILE"),
    Flag(
        "distributed.grad_wire",
        "--megascale-grad-wire",
        "what expert gradients travel in between copies of an expert (default fp32; bf16 changes the mathematics)",
        choices=("fp32", "bf16"),
    ),
    Flag(
        "distributed.fetch",
        "--megascale-fetch",
        "updated pages go to other copies of an expert at each step (default), or when tokens need them",
        choices=("step", "demand"),
    ),
    Flag(
        "observe.routing",
        "--megascale-routing",
        "write down what routers choose, for `megascale topology`",
        metavar="DIR",
    ),
    Flag(
        "observe.trace",
        "--megascale-trace",
        "write down every use of a page, for `megascale trace replay`",
        metavar="FILE",
    ),
    Flag(
        "compute.backend",
        "--megascale-backend",
        "who computes experts (default auto: Triton kernels on an accelerator, torch elsewhere)",
        choices=("auto", "torch", "triton"),
    ),
    Flag(
        "compute.optimizer_device",
        "--megascale-optimizer-device",
        "where pages whose optimizer state lies in host memory are stepped (default auto: what takes less time)",
        choices=("auto", "host", "device"),
    ),
    Flag(
        "observe.report",
        "--megascale-report",
        "what happened to pages over time, with pictures at the end",
        metavar="DIR",
    ),
    Flag(
        "clip.mode",
        "--megascale-clip",
        "gradient clipping: stock's (default), or each module to a threshold of its own (changes the mathematics)",
        choices=("stock", "cmsa"),
    ),
    Flag(
        "clip.alpha",
        "--megascale-cmsa-alpha",
        "auto (default: fitted in the first 11 steps), or 0 to 1",
        metavar="ALPHA",
    ),
    Flag(
        "clip.nonfinite",
        "--megascale-nonfinite",
        "steps with non-finite gradients: as stock (default), or left out on all ranks; cmsa leaves them out",
        choices=("stock", "skip"),
    ),
    Flag(
        "checkpoint.format",
        "--megascale-checkpoint-format",
        "of what is saved (default stock)",
        choices=("stock", "paged"),
    ),
    Flag("checkpoint.beside", "--megascale-checkpoint-beside", "write beside training (default off)", choices=SWITCH),
    Flag(
        "checkpoint.full_every",
        "--megascale-checkpoint-full-every",
        "store all pages at every n-th save, changed ones between (default 1)",
        metavar="SAVES",
        kind=int,
    ),
    Flag("checkpoint.keep", "--megascale-checkpoint-keep", "newest that stay (default all)", metavar="N", kind=int),
    Flag(
        "checkpoint.staging_bytes",
        "--megascale-checkpoint-staging",
        "memory for copies beside training (default 64MiB)",
        metavar="SIZE",
    ),
    Flag("checkpoint.cpus", "--megascale-checkpoint-cpus", "cores of the writer, e.g. 0,2-4", metavar="CORES"),
)
"""All but ``--megascale`` and ``--megascale-config``, in the order in which the help lists them."""


def given_by_section(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Options that flags set, by section of the configuration."""
    found: dict[str, dict[str, Any]] = {}
    for flag in FLAGS:
        value = flag.value_in(args)
        if value is not None:
            section, option = flag.key.split(".")
            found.setdefault(section, {})[option] = value
    return found


def in_words_of_flags(problem: str, args: argparse.Namespace) -> str:
    """What the configuration says of its options (``section.name=value``), with the flags that were typed for them."""
    for flag in FLAGS:
        if flag.value_in(args) is not None:
            problem = problem.replace(f"{flag.key}=", f"{flag.name}=")
    return problem
