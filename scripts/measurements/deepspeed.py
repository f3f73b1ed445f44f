"""DeepSpeed: Hugging Face experts in pages. Exact against stock, small, cheaper in io than ZeRO-3 on NVMe."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from scripts.comparison.result import STOCK, Comparison, paged_name
from scripts.comparison.runner import compare
from scripts.deepspeed_runs.comparing import DeepSpeedPlan
from scripts.deepspeed_runs.finetuning import Job, read_config
from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case, Deviations
from scripts.measurements.rows import Context, Row
from scripts.measuring.processes import ROOT, Workers
from scripts.measuring.progress import say

TARGET = "scripts.deepspeed_runs.benches:Bench"
FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
BOUNDS = {"loss": 1e-6, "norm": 1e-6, "gradient": 1e-5, "second moment": 1e-5, "update": 1e-5}
STEPS = 30
_TIMEOUT_SECONDS = 900.0
_BUDGET = "25%"
_IO_SIZE = Size(vocabulary=256, hidden=512, ffn=1024, layers=3, heads=4, experts=16, top_k=2, positions=256)
_BIG = Size(vocabulary=256, hidden=1024, ffn=1024, layers=36, heads=4, experts=8, top_k=2, positions=256)
"""3.6 GB of experts in fp32, 100 MB a layer."""


def _workers(name: str, *, ranks: int, threads: int = 1, **arguments: object) -> Workers:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return Workers(TARGET, ranks=ranks, threads=threads, name=name, arguments=arguments)


# -- S1 ----------------------------------------------------------------------------------------------------------------


def _share(found: Deviations) -> float:
    """The worst deviation as a share of its bound; above 1 where routing differs."""
    shares = [found.worst[kind] / bound for kind, bound in BOUNDS.items() if kind in found.worst]
    return max([*shares, 2.0 * found.worst["routing"]])


def _exactness(context: Context, *, stage: int, ranks: int) -> float:
    shares = []
    with _workers(f"ZeRO {stage}, {ranks} rank(s)", ranks=ranks) as workers:
        for family in FAMILIES:
            case = Case(family=family, stage=stage, steps=STEPS)
            by_rank = workers.call("prove", case=case, timeout_seconds=_TIMEOUT_SECONDS)
            shares += [_share(found) for found in by_rank]
            worst = max(by_rank, key=_share)
            say(f"    {family}: {shares[-1]:.3f} of the bound; {worst.where}")
    return max(shares)


# -- S2 ----------------------------------------------------------------------------------------------------------------


def _comparison(context: Context) -> Comparison:
    def measure() -> Comparison:
        job = Job(config=read_config(ROOT / "configs/deepspeed/zero1.json"), data_path=str(context.data_path))
        with tempfile.TemporaryDirectory(prefix="megascale-pages-", dir=ROOT) as folder:
            plan = DeepSpeedPlan(
                preset="zero1 mixtral",
                flags=(),
                megascale_flags=(),
                ranks=1,
                threads=1,
                warmup=2,
                steps=8,
                repeats=4,
                validate=False,
                budgets=(_BUDGET,),
                disk_path=Path(folder),
                job=job,
            )
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            return compare(plan)

    return context.once("comparison", measure)


def _resident_share(context: Context) -> float:
    return _comparison(context).total_ratio("expert_state_peak_bytes", paged_name(_BUDGET))


def _losses_differ(context: Context) -> float:
    found = _comparison(context)
    paged, stock = found.run(paged_name(_BUDGET)), found.run(STOCK)
    return max(abs(a.loss - b.loss) / b.loss for a, b in zip(paged.steps, stock.steps, strict=True))


# -- S3 ----------------------------------------------------------------------------------------------------------------


def _io_config(folder: str, *, nvme: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "torch_adam": True}},
    }
    if nvme:
        there = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
        config["zero_optimization"] = {
            "stage": 3,
            "offload_param": {**there, "buffer_count": 8, "buffer_size": 70_000_000},
            "offload_optimizer": {**there, "buffer_count": 4},
            "sub_group_size": 60_000_000,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 8}
        return config
    config["zero_optimization"] = {"stage": 1}
    config["megascale"] = {"enabled": True, "device_budget": _BUDGET, "disk_path": folder, "page_size_bytes": "8MiB"}
    return config


def _io(context: Context, *, narrow: int | None) -> dict[bool, tuple[float, float]]:
    """By side (True: NVMe): seconds and bytes of the median step."""

    def measure() -> dict[bool, tuple[float, float]]:
        found: dict[bool, tuple[float, float]] = {}
        for nvme in (True, False):
            with tempfile.TemporaryDirectory(prefix="megascale-io-", dir=ROOT) as folder:
                with _workers("ZeRO-3 NVMe" if nvme else "megascale", ranks=1) as workers:
                    config = _io_config(folder, nvme=nvme)
                    ((seconds, moved),) = workers.call(
                        "time_steps",
                        config=config,
                        size=_IO_SIZE,
                        narrow=narrow,
                        warmup=2,
                        steps=5,
                        length=128,
                        timeout_seconds=_TIMEOUT_SECONDS,
                    )
            found[nvme] = (median(seconds), median(moved))
            say(f"    {'ZeRO-3 NVMe' if nvme else 'megascale'}: {found[nvme][0]:.3f} s, {found[nvme][1] / 1e6:.0f} MB")
        return found

    return context.once(("io", narrow), measure)


def _io_ratio(context: Context, *, narrow: int | None, which: int) -> float:
    found = _io(context, narrow=narrow)
    return found[False][which] / found[True][which]


# -- S4, S5 ------------------------------------------------------------------------------------------------------------


def _different_after_loading(context: Context, *, ranks: int) -> float:
    """Tensors of weights and moments that are not bit-equal."""
    case = Case(family="mixtral", size=Size(experts=8), section={"expert_parallel_size": 2})
    with tempfile.TemporaryDirectory(prefix="megascale-checkpoint-") as folder:
        with _workers("save", ranks=2) as workers:
            before = workers.call("save", case=case, folder=folder, timeout_seconds=_TIMEOUT_SECONDS)[0]
        other = Case(family="mixtral", size=Size(experts=8), section={"expert_parallel_size": ranks})
        with _workers("load", ranks=ranks) as workers:
            states = workers.call("load", case=other, folder=folder, timeout_seconds=_TIMEOUT_SECONDS)
    pairs = [(kinds[kind], state[name][kind]) for state in states for name, kinds in before.items() for kind in kinds]
    assert len(pairs) > 3 * ranks
    return float(sum(not one.equal(other) for one, other in pairs))


def _times_the_limit(context: Context) -> float:
    """Bytes of a model that loads, over the private memory that the process may ask for."""
    with tempfile.TemporaryDirectory(prefix="megascale-big-", dir=ROOT) as folder:
        pages = Path(folder) / "pages"
        pages.mkdir()
        paging = {"device_budget": "64MiB", "disk_path": str(pages), "page_size_bytes": "8MiB"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "megascale": {"enabled": True, **paging},
        }
        with _workers("baseline", ranks=1) as workers:
            (baseline,) = workers.call("private_bytes", timeout_seconds=_TIMEOUT_SECONDS)
        published = str(Path(folder) / "model")
        with _workers("publish", ranks=1) as workers:
            (size,) = workers.call(
                "publish", config=config, size=_BIG, folder=published, timeout_seconds=_TIMEOUT_SECONDS
            )
        limit = size // 3
        with _workers("read", ranks=1, memory_limit_bytes=limit) as workers:
            (loss,) = workers.call("read", config=config, folder=published, timeout_seconds=_TIMEOUT_SECONDS)
        with _workers("read without a limit", ranks=1) as workers:
            (expected,) = workers.call("read", config=config, folder=published, timeout_seconds=_TIMEOUT_SECONDS)
    if loss != expected:
        raise RuntimeError(f"the loss under the limit is {loss}, without it {expected}")
    say(f"    {size / 1e6:.0f} MB of weights, limit {limit / 1e6:.0f} MB, an empty process {baseline / 1e6:.0f} MB")
    return float(size / limit)


def _rows() -> tuple[Row, ...]:
    exact = [
        Row(
            id=f"S1-zero{stage}-{ranks}",
            what=f"{STEPS} steps compared one by one with stock, ZeRO {stage}, {ranks} rank(s): the worst deviation",
            unit="of its bound",
            kind="at_most",
            bound=1.0,
            measure=partial(_exactness, stage=stage, ranks=ranks),
        )
        for ranks in (1, 2)
        for stage in range(4)
    ]
    io = [
        Row(
            id=f"S3-{name}-{what}",
            what=f"{words}, {what} of a step: megascale at {_BUDGET} / ZeRO-3 with parameters and optimizer on NVMe",
            unit="x",
            kind="at_most",
            bound=bound,
            aim=0.3,
            measure=partial(_io_ratio, narrow=narrow, which=which),
        )
        for name, words, narrow in (("narrow", "4 of 16 experts hit", 4), ("natural", "natural routing", None))
        for what, bound, which in (("bytes", 0.35, 1), ("time", 0.5, 0))
    ]
    elastic = [
        Row(
            id=f"S4-ep{ranks}",
            what=f"8 experts saved at expert parallel 2, loaded at {ranks}: tensors that are not bit-equal",
            unit="tensors",
            kind="at_most",
            bound=0,
            measure=partial(_different_after_loading, ranks=ranks),
        )
        for ranks in (1, 4)
    ]
    return (
        *exact,
        Row(
            id="S2-resident",
            what=f"peak expert state in memory at a budget of {_BUDGET}: megascale / stock",
            unit="x",
            kind="at_most",
            bound=0.30,
            measure=_resident_share,
        ),
        Row(
            id="S2-losses",
            what=f"losses at a budget of {_BUDGET}: the largest relative difference to stock's",
            unit="",
            kind="at_most",
            bound=1e-5,
            measure=_losses_differ,
        ),
        *io,
        *elastic,
        Row(
            id="S5-load",
            what="a model that loads in pages: its bytes / the private memory that the process may have",
            unit="x",
            kind="at_least",
            bound=3.0,
            measure=_times_the_limit,
        ),
    )


ROWS: tuple[Row, ...] = _rows()
