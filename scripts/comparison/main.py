"""Train the same MoE with stock Megatron-Core and with --megascale, and compare speed, memory, traffic and losses.

    python scripts/compare_with_stock.py --preset coarse --json out/coarse.json
    python scripts/compare_with_stock.py --preset fine --ranks 2 -- --moe-token-dispatcher-type allgather
    python scripts/compare_with_stock.py --preset quickstart --budget 25% --limited-steps 5
    python scripts/compare_with_stock.py --megatron-lm PATH --ranks 2       # Megatron-LM's own pretrain_gpt.py

Each run has processes of its own; they take turns, block after block of steps, so that what else the machine does hits
both alike. Times are medians. What follows `--` goes to the trainer (see `pretrain_moe.py --help`) in all runs;
`--megascale-...` among it to MegaScale's only.

[Note: the JSON]
    environment                       packages, processor, memory, date, threads a rank
    preset                            name of the configuration
    runs[]                            one a side
        name                          "stock", "megascale" or "megascale BUDGET"
        step_seconds_median           over all measured steps
        tokens_per_second             tokens of a step / step_seconds_median
        peak_rss_bytes                the kernel's VmHWM of every rank's process at its end, summed over ranks
        expert_state_resident_peak_bytes   weights, gradients, fp32 main weights, moments of routed experts, all ranks
        page_faults, bytes_read, bytes_written   of paging between tiers; 0 for stock, which has none
        collective_bytes              sent to other ranks a step, all ranks (counted as comparison/collectives.py says)
        losses, grad_norms            of every step, warm-up included
        validation_loss               at the end; null without --validate
        experts, dispatcher, optimizer   the classes that ran
        parameters, measured_steps, memory_over_time   [[seconds, bytes], ...], summed over ranks
    ratios                            speed: stock's step time / megascale's, the median over blocks; above 1 is faster
                                      peak_rss, expert_state: megascale / stock; below 1 is smaller
    ratios_by_run                     the same for each run that is not stock's
    max_relative_loss_difference, max_relative_grad_norm_difference   over all steps and runs
    under_memory_limit                null without --limited-steps
        limit_bytes                   private memory of a process (RLIMIT_DATA)
        max_relative_loss_difference  to the losses without the limit, of runs that trained
        runs[]                        name, losses, error (null where it trained), out_of_memory
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.comparison.presets import PRESETS, megascale_flags, preset_flags
from scripts.comparison.report import print_comparison
from scripts.comparison.runner import Plan, compare, default_threads
from scripts.measuring.corpus import standard_library_corpus
from scripts.measuring.files import check_writable, write_json
from scripts.measuring.processes import ROOT, WorkersFailed
from scripts.megatron_lm_runs.running import RunFailed

_OF_SCRIPTS = {"megatron_lm", "ranks", "steps", "bf16", "json", "picture"}
"""Options of a comparison of Megatron-LM's own script."""
_BATCH = 8
"""Sequences a step of every preset."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, trainer = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    args = _parser().parse_args(own)
    try:
        check_writable(args.json, args.picture)
        if args.megatron_lm is not None:
            return _compare_scripts(args, trainer)
        with ExitStack() as stack:
            data_path = args.data_path or standard_library_corpus(
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megascale-corpus-")))
            )
            comparison = compare(_plan(args, data_path, trainer))
            print_comparison(comparison)
            if args.json:
                write_json(args.json, comparison.as_json())
            if args.picture:
                from scripts.comparison.pictures import draw

                draw(comparison, args.picture)
    except KeyboardInterrupt:
        print("compare_with_stock.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    except WorkersFailed as error:
        print(f"compare_with_stock.py: {error.user_error or error}", file=sys.stderr)
        return 1
    except (ImportError, OSError, ValueError, RunFailed, subprocess.TimeoutExpired) as error:
        print(f"compare_with_stock.py: {error}", file=sys.stderr)
        return 1
    return 0


def _compare_scripts(args: argparse.Namespace, given: Sequence[str]) -> int:
    from scripts.comparison.megatron_lm import compare_scripts

    defaults = _parser()
    for name in sorted(vars(args).keys() - _OF_SCRIPTS):
        if getattr(args, name) != defaults.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} has no effect with --megatron-lm; leave it out (flags of its script go behind --)"
            )
    flags, own = split_flags([*given, *(["--bf16"] if args.bf16 else [])])
    content = compare_scripts(
        args.megatron_lm, ranks=args.ranks, flags=flags, own_flags=own, steps=args.steps, picture=args.picture
    )
    if args.json:
        write_json(args.json, content)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags of the trainer, also --megascale-..., come behind --: compare_with_stock.py -- --seed 7",
    )
    parser.add_argument("--preset", choices=PRESETS, default="coarse", help="a model of configs/ (default coarse)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run, expert-parallel (default 1)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each run (default 20)")
    parser.add_argument("--repeats", type=int, default=5, help="blocks that the steps are divided into (default 5)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before measuring (default 3)")
    parser.add_argument("--threads", type=int, help="threads a rank (default: the cores, divided by ranks)")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="BUDGET",
        help="one more run with this --megascale-device-budget, e.g. 25%%; may be given several times",
    )
    parser.add_argument("--disk-path", type=Path, help="folder for pages that leave memory (default: out)")
    parser.add_argument(
        "--limited-steps",
        type=int,
        default=0,
        metavar="N",
        help="N steps of stock and of the run under the first --budget, with memory half way between what they had",
    )
    parser.add_argument(
        "--data-path", type=Path, help="a text file or folder (default: the standard library's sources)"
    )
    parser.add_argument(
        "--megatron-lm",
        type=Path,
        metavar="PATH",
        help="run pretrain_gpt.py of this checkout both ways (goes with --ranks, --steps, --bf16, --json, --picture)",
    )
    parser.add_argument("--validate", action="store_true", help="compare the validation loss at the end, too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="PNG")
    return parser


def _plan(args: argparse.Namespace, data_path: Path, given: Sequence[str]) -> Plan:
    trainer_flags, own_flags = split_flags(given)
    flags = preset_flags(
        args.preset, data_path=data_path.resolve(), train_iters=args.warmup + args.steps, bf16=args.bf16
    )
    if args.ranks > 1:  # where nothing else is said: experts over all ranks, and the same tokens a step
        defaults = {"--expert-model-parallel-size": args.ranks, "--micro-batch-size": max(1, _BATCH // args.ranks)}
        flags = (*flags, *(word for name, n in defaults.items() if name not in given for word in (name, str(n))))
    return Plan(
        preset=args.preset,
        flags=(*flags, *trainer_flags),
        megascale_flags=(*megascale_flags(args.preset, bf16=args.bf16), *own_flags),
        ranks=args.ranks,
        threads=args.threads or default_threads(args.ranks),
        warmup=args.warmup,
        steps=args.steps,
        repeats=min(args.repeats, args.steps),
        validate=args.validate,
        budgets=tuple(args.budget),
        disk_path=_disk_path(args.disk_path) if args.budget else None,
        limited_steps=args.limited_steps,
    )


def split_flags(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags of every run, and those (`--megascale-...` with their values) that only MegaScale knows."""
    every: list[str] = []
    own: list[str] = []
    current = every
    for word in given:
        if word.startswith("--"):
            current = own if word.startswith("--megascale") else every
        current.append(word)
    return every, own


def _disk_path(given: Path | None) -> Path:
    path = (given or ROOT / "out").resolve()
    if given is None:
        path.mkdir(exist_ok=True)
    return path
