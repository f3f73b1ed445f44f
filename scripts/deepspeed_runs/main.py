"""Fine-tunes a Hugging Face MoE model with DeepSpeed, experts in pages or not.

    python scripts/finetune_hf_moe.py --deepspeed configs/deepspeed/zero2.json --data-path TEXT --steps 50
    torchrun --nproc_per_node 2 scripts/finetune_hf_moe.py --deepspeed configs/deepspeed/zero3.json --family qwen3_moe
    python scripts/finetune_hf_moe.py --deepspeed configs/deepspeed/zero1.json --compare --budget 25% --json out/ds.json

The megascale section of the configuration decides; ``--stock`` leaves it out. ``--compare`` runs stock and megascale in
turn, in processes of their own, and prints the table and the JSON of ``compare_with_stock.py``. On a machine without an
accelerator DeepSpeed's CPU back end is used, without compiled operators.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from scripts.comparison.report import print_comparison
from scripts.comparison.runner import compare, default_threads
from scripts.comparison.worker import Step
from scripts.deepspeed_runs.comparing import DeepSpeedPlan
from scripts.deepspeed_runs.finetuning import FinetuningRun, Job, read_config, without_section
from scripts.deepspeed_runs.models import FAMILIES
from scripts.measuring.corpus import standard_library_corpus
from scripts.measuring.files import write_json
from scripts.measuring.processes import ROOT, WorkersFailed
from scripts.moe_trainer.metrics import JsonLines, Metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = parser().parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if _has_cuda() else "cpu")
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megascale-corpus-")))
            data_path = args.data_path or standard_library_corpus(folder)
            job = _job(args, data_path)
            return _compare(args, job) if args.compare else _train(args, job)
    except WorkersFailed as error:
        print(f"finetune_hf_moe.py: {error.user_error or error}", file=sys.stderr)
        return 1
    except (ImportError, OSError, ValueError) as error:
        print(f"finetune_hf_moe.py: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--deepspeed", type=Path, required=True, metavar="JSON", help="DeepSpeed configuration")
    made.add_argument("--family", choices=FAMILIES, default="mixtral", help="a small model with random weights")
    made.add_argument("--model", metavar="FOLDER", help="a published model on this disk instead")
    made.add_argument("--stream", action="store_true", help="load it into pages (for a model larger than memory)")
    made.add_argument("--data-path", type=Path, help="a text file or folder (default: the standard library's sources)")
    made.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--stock", action="store_true", help="leave the megascale section out")
    made.add_argument("--metrics-jsonl", type=Path, metavar="FILE", help="a JSON line a step, clipping included")
    made.add_argument("--save", metavar="FOLDER", help="a DeepSpeed checkpoint at the end")
    made.add_argument("--load", metavar="FOLDER", help="a DeepSpeed checkpoint to go on from")
    made.add_argument("--export", metavar="FOLDER", help="a plain Hugging Face checkpoint at the end")
    made.add_argument("--compare", action="store_true", help="stock and megascale in turn")
    made.add_argument("--ranks", type=int, default=1, help="with --compare: ranks of each run")
    made.add_argument("--threads", type=int, help="with --compare: threads a rank")
    made.add_argument("--warmup", type=int, default=3, help="with --compare: steps before measuring")
    made.add_argument("--repeats", type=int, default=5, help="with --compare: blocks that steps are divided into")
    made.add_argument("--budget", action="append", default=[], help="with --compare: a run under this device budget")
    made.add_argument("--cpu-offload", action="store_true", help="with --compare: stock with its optimizer on the CPU")
    made.add_argument("--nvme-offload", action="store_true", help="with --compare: stock with ZeRO 3 on NVMe, in files")
    made.add_argument("--disk-path", type=Path, help="folder for pages that leave memory (default: out)")
    made.add_argument("--json", type=Path, metavar="FILE", help="with --compare")
    made.add_argument("--picture", type=Path, metavar="PNG", help="with --compare")
    return made


def _job(args: argparse.Namespace, data_path: Path) -> Job:
    config = read_config(args.deepspeed)
    if args.stock:
        config = without_section(config)
    model = None if args.model is None else str(Path(args.model).resolve())
    return Job(
        config=config,
        data_path=str(data_path.resolve()),
        family=args.family,
        model=model,
        length=args.length,
        streamed=args.stream,
    )


def _train(args: argparse.Namespace, job: Job) -> int:
    import torch

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory(prefix="megascale-run-") as folder:
        where = "env://" if world > 1 else f"file://{folder}/rendezvous"
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=where,
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=10),
        )
        run = FinetuningRun(rank, world, job=job)
        if args.load:
            run.engine.load_checkpoint(args.load)
        with Metrics([JsonLines(args.metrics_jsonl)] if args.metrics_jsonl and rank == 0 else []) as metrics:
            for number in range(1, args.steps + 1):
                (step,) = run.train(1)
                if rank == 0:
                    norm = "" if step.grad_norm is None else f", gradient norm {step.grad_norm:.4f}"
                    print(f"step {number}: loss {step.loss:.6f}{norm}, {step.seconds:.3f} s", flush=True)
                metrics.write(**_record(number, step, run))
        if args.save:
            run.engine.save_checkpoint(args.save)
        if args.export:
            run.export(args.export)
        run.engine.destroy()
        torch.distributed.destroy_process_group()
    return 0


def _record(number: int, step: Step, run: FinetuningRun) -> dict[str, object]:
    record: dict[str, object] = {
        "event": "step",
        "iteration": number,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "step_seconds": step.seconds,
    }
    return record if run.clip_report is None else {**record, "clip": run.clip_report.as_record()}


def _compare(args: argparse.Namespace, job: Job) -> int:
    disk_path = (args.disk_path or ROOT / "out").resolve()
    if args.disk_path is None:
        disk_path.mkdir(exist_ok=True)
    plan = DeepSpeedPlan(
        preset=f"{Path(args.deepspeed).stem} {args.model or args.family}",
        flags=(),
        megascale_flags=(),
        ranks=args.ranks,
        threads=args.threads or default_threads(args.ranks),
        warmup=args.warmup,
        steps=args.steps,
        repeats=min(args.repeats, args.steps),
        validate=False,
        budgets=tuple(args.budget),
        disk_path=disk_path,
        job=job,
        cpu_offload=args.cpu_offload,
        nvme_offload=args.nvme_offload,
    )
    comparison = compare(plan)
    print_comparison(comparison, framework="deepspeed")
    if args.json:
        write_json(args.json, comparison.as_json())
    if args.picture:
        from scripts.comparison.pictures import draw

        draw(comparison, args.picture)
    return 0


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
