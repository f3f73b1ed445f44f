"""Tokens and experts across ranks: what travels, against the better of stock's two dispatchers; exactness; rounds."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megascale_omni.config import DistributedConfig
from megascale_omni.groups.cache import GroupCache
from megascale_omni.groups.gossip import simulate_gossip
from megascale_omni.groups.plan import ExpertGroup, make_groups
from megascale_omni.topology.levels import Topology
from megascale_omni.topology.routing import Choices, read_record, records_of, synthetic
from megascale_omni.topology.scaling import micro_batches_of, step_seconds
from megascale_omni.topology.simulate import LayerShape, simulate
from scripts.comparison.presets import preset_flags
from scripts.measurements.distributed_exactness import exactness_rows
from scripts.measurements.rows import Context, Row
from scripts.measuring.processes import Workers
from scripts.measuring.progress import say
from scripts.measuring.statistics import paired_ratio

if TYPE_CHECKING:
    from scripts.measurements.distributed_gradients import ReducedBytes
    from scripts.measurements.distributed_layer import Travelled

TOKENS = 1024
_START_AND_COUNT_SECONDS = 300.0
_TIMES_SECONDS = 600.0
_WARMUP, _REPETITIONS = 3, 21
_MIB = 2**20


def layer_flags(context: Context, preset: str, ranks: int) -> tuple[str, ...]:
    """Flags of a layer of the preset with its experts on ``ranks`` ranks."""
    flags = preset_flags(preset, data_path=context.data_path, train_iters=100)
    sizes = ("--expert-model-parallel-size", str(ranks), "--global-batch-size", str(8 * ranks))
    return (*flags, *sizes)


# --- bytes ------------------------------------------------------------------------------------------------------------

_LAYER = "scripts.measurements.distributed_layer:DispatchBench"


@dataclass(frozen=True)
class _Bytes:
    """Of all ranks by dispatcher. ``rows``: what rows alone take, experts by number. ``wrong``: ranks times dispatchers
    for which the simulator says something else.
    """

    total: dict[str, int]
    rows: int
    wrong: int

    @property
    def better(self) -> int:
        return min(self.total["alltoall"], self.total["allgather"])


def _bytes(context: Context, preset: str, *, routing: str = "uniform", ranks: int = 4, move: str = "auto") -> _Bytes:
    def measure() -> _Bytes:
        flags = layer_flags(context, preset, ranks)
        arguments = {"flags": flags, "tokens": TOKENS, "routing": routing, "move": move}
        name = f"bytes, {preset}, EP{ranks}, {routing}, {move}"
        with Workers(_LAYER, ranks=ranks, threads=1, name=name, arguments=arguments) as workers:
            found: list[Travelled] = workers.call("travelled", timeout_seconds=_START_AND_COUNT_SECONDS)
            said: list[dict[str, int]] = workers.call("simulated", timeout_seconds=_START_AND_COUNT_SECONDS)
        total = {name: sum(one.sent_bytes[name] for one in found) for name in found[0].sent_bytes}
        rows = sum(one.row_bytes for one in found)
        wrong = sum(
            one.sent_bytes[n] != simulated[n] for one, simulated in zip(found, said, strict=True) for n in total
        )
        mib = ", ".join(f"{name} {count / ranks / _MIB:.3f}" for name, count in total.items())
        measured = _Bytes(total, rows, wrong)
        say(f"    {name}: MiB a rank: {mib}; rows alone {rows / measured.better:.4f} of the better stock dispatcher")
        return measured

    return context.once(("bytes", preset, routing, ranks, move), measure)


def _share(context: Context, *, preset: str, routing: str, other: str) -> float:
    found = _bytes(context, preset, routing=routing)
    beside = {**found.total, "better": found.better, "rows": found.rows}
    return found.total["groups"] / beside[other]


def _byte_rows() -> list[Row]:
    """D1 to D3: against the better of the two, against each, and (uniform) over the rows that have to travel."""
    rows = []
    for row_id, preset, routing, bound, aim in (
        ("D1", "fine", "uniform", 0.85, 0.82),
        ("D2", "coarse", "uniform", 0.95, 0.92),
        ("D3-fine", "fine", "clusters", 0.60, 0.427),
        ("D3-coarse", "coarse", "clusters", 0.60, 0.427),
    ):
        what = f"bytes of a layer's forward and backward, {preset}, EP4, {routing} routing"
        what += ", experts placed by co-activation: groups / " if routing == "clusters" else ": groups / "
        for other, most in (("better", bound), ("alltoall", 1.0), ("allgather", 1.0), ("rows", 1.02)):
            if other == "rows" and routing == "clusters":
                continue
            name = {"better": "the better stock dispatcher", "rows": "the rows alone"}.get(other, f"stock's {other}")
            rows.append(
                Row(
                    id=row_id if other == "better" else f"{row_id}-{other}",
                    what=what + name,
                    unit="x",
                    kind="at_most",
                    bound=most,
                    aim=aim if other == "better" else None,
                    measure=partial(_share, preset=preset, routing=routing, other=other),
                )
            )
    return rows


# --- gradients --------------------------------------------------------------------------------------------------------


def _reduced(context: Context, *, distributed: bool) -> dict[str, dict[str, int]]:
    """Bytes of all ranks, by case and side."""

    def measure() -> dict[str, dict[str, int]]:
        flags = (*layer_flags(context, "fine", 2), "--global-batch-size", str(8 * 4))
        flags = (*flags, *(["--use-distributed-optimizer"] if distributed else []))
        target = "scripts.measurements.distributed_gradients:GradientBench"
        name = "gradients, " + ("distributed optimizer" if distributed else "every copy stepped")
        with Workers(target, ranks=4, threads=1, name=name, arguments={"flags": flags, "tokens": TOKENS}) as workers:
            found: list[ReducedBytes] = workers.call("reduced", timeout_seconds=_START_AND_COUNT_SECONDS)
        cases = {"everywhere": [one.everywhere for one in found], "apart": [one.apart for one in found]}
        total = {case: {side: sum(one[side] for one in of) for side in of[0]} for case, of in cases.items()}
        say(f"    {name}: {total}")
        return total

    return context.once(("gradients", distributed), measure)


def _gradient_share(context: Context, *, distributed: bool, case: str, side: str) -> float:
    found = _reduced(context, distributed=distributed)[case]
    return found[side] / found["stock"]


def _gradient_rows() -> list[Row]:
    rows = []
    for row_id, distributed, case, side, aim in (
        ("D4", False, "everywhere", "groups", 0.31),
        ("D4-bf16", False, "everywhere", "groups-bf16", 0.16),
        ("D4-apart", False, "apart", "groups", 0.31),
    ):
        tokens = "on every copy" if case == "everywhere" else "on one copy each"
        rows.append(
            Row(
                id=row_id,
                what=f"bytes of reducing expert gradients, EP2 x DP2, 30 % of experts with tokens {tokens}"
                + (", bf16 wire" if side.endswith("bf16") else "")
                + ": ours / stock",
                unit="x",
                kind="at_most",
                bound=0.35,
                aim=aim,
                measure=partial(_gradient_share, distributed=distributed, case=case, side=side),
            )
        )
    return rows


# --- time -------------------------------------------------------------------------------------------------------------


def _seconds(context: Context, preset: str, ranks: int) -> dict[str, list[float]]:
    """Of the slowest rank, by dispatcher and repetition."""

    def measure() -> dict[str, list[float]]:
        arguments = {"flags": layer_flags(context, preset, ranks), "tokens": TOKENS}
        with Workers(_LAYER, ranks=ranks, threads=1, name=f"time, {preset}, EP{ranks}", arguments=arguments) as workers:
            found: list[dict[str, list[float]]] = workers.call(
                "seconds", timeout_seconds=_TIMES_SECONDS, warmup=_WARMUP, repetitions=_REPETITIONS
            )
        slowest = {name: np.max([one[name] for one in found], axis=0).tolist() for name in found[0]}
        medians = ", ".join(f"{name} {1000 * float(np.median(times)):.1f} ms" for name, times in slowest.items())
        say(f"    {preset}, EP{ranks}: {medians}")
        return slowest

    return context.once(("time", preset, ranks), measure)


def _time_ratio(context: Context, *, preset: str, ranks: int) -> float:
    """Over the stock dispatcher that is faster in the median."""
    seconds = _seconds(context, preset, ranks)
    faster = min(("alltoall", "allgather"), key=lambda name: float(np.median(seconds[name])))
    return paired_ratio(seconds["groups"], seconds[faster]).median


def _time_row(row_id: str, ranks: int, *, bound: float, aim: float | None) -> Row:
    return Row(
        id=row_id,
        what=f"a layer's forward and backward, fine, EP{ranks}: groups / the faster stock dispatcher",
        unit="x",
        kind="at_most",
        bound=bound,
        aim=aim,
        measure=partial(_time_ratio, preset="fine", ranks=ranks),
    )


# --- the group cache on a trained router's trace ----------------------------------------------------------------------

_CACHE_STEPS, _WARM_STEPS, _CACHE_LAYERS = 1000, 500, 2
_CACHE_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --moe-ffn-hidden-size 64 "
    "--num-experts 64 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 8 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm "
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-warmup-iters 50 --lr-decay-style constant --split 100 "
    "--expert-model-parallel-size 4"
)


def _looked_up(cache: GroupCache[ExpertGroup], step: int, active: bytes, owner: int, ranks: int) -> ExpertGroup:
    return cache.get((active, owner), step=step, make=lambda: ExpertGroup.of(active, owner, ranks))


def _cache_hits(context: Context) -> float:
    """Percent of look-ups in the last 1000 steps that found their group, replayed from what the routers chose."""
    with tempfile.TemporaryDirectory(prefix="megascale-routing-") as folder:
        steps = _WARM_STEPS + _CACHE_STEPS
        flags = [*_CACHE_FLAGS.split(), "--train-iters", str(steps), "--data-path", str(context.data_path)]
        ours = ["--megascale", "--megascale-dispatcher", "groups", "--megascale-routing", folder]
        target = "scripts.comparison.worker:TrainingRun"
        with Workers(target, ranks=4, threads=1, name="group cache", arguments={"flags": [*flags, *ours]}) as workers:
            for _ in range(steps // 100):
                workers.call("train", timeout_seconds=_TIMES_SECONDS, steps=100)
        ranks = [list(read_record(path)) for path in records_of(folder)]
    caches: dict[int, GroupCache[ExpertGroup]] = {}
    hits, looked_up = 0, 0
    for number, together in enumerate(zip(*ranks, strict=True)):
        layer = together[0].layer
        step, cache = number // _CACHE_LAYERS, caches.setdefault(layer, GroupCache(DistributedConfig().group_cache))
        before = cache.hits
        active_PE = np.stack([one.map_TE.any(0) for one in together])
        experts = active_PE.shape[1]
        owners_E = np.repeat(np.arange(len(ranks)), experts // len(ranks))
        make_groups(active_PE, owners_E, partial(_looked_up, cache, step))
        if step >= _WARM_STEPS:
            hits, looked_up = hits + cache.hits - before, looked_up + experts
    say(f"    {looked_up} look-ups, {hits} hits")
    return 100 * hits / looked_up


_LEAK_STEPS = 10_000


def _left_behind(context: Context) -> float:
    target = "scripts.measurements.distributed_leaks:LeakBench"
    with Workers(target, ranks=2, threads=1, name="leaks", arguments={}) as workers:
        return max(workers.call("left", timeout_seconds=_TIMES_SECONDS, steps=_LEAK_STEPS))


# --- rounds, and what the simulator says ------------------------------------------------------------------------------

_JOB = 1440


def _rounds(context: Context) -> float:
    """Rounds beyond ceil(log2 N). Raises where ranks disagree in the end."""
    vectors = np.arange(2 * _JOB).reshape(_JOB, 2)
    rounds, knows = simulate_gossip(vectors)
    if not (knows == vectors).all():
        raise RuntimeError("ranks disagree")
    return rounds - math.ceil(math.log2(_JOB))


def _wrong(context: Context, *, ranks: int) -> float:
    """Ranks and dispatchers whose bytes are not what the simulator says, tokens and pages."""
    return sum(_bytes(context, "fine", ranks=ranks, move=move).wrong for move in ("auto", "pages"))


def _racks(context: Context) -> float:
    maps = [synthetic("uniform", tokens=TOKENS, experts=64, topk=8, seed=rank) for rank in range(8)]
    found = simulate("groups", [Choices.of_map(map_TE) for map_TE in maps], LayerShape(4096, 64, 1))
    apart, near = (Topology.uniform(8, per_node=1, per_rack=per_rack) for per_rack in (1, 8))
    return abs(found.seconds(apart) / found.seconds(near) / 3 - 1)


def _scaling(context: Context) -> float:
    used = {}
    for ranks in (240, _JOB):
        count = micro_batches_of(ranks=ranks, ranks_of_a_pipeline=120, batches=720)
        used[ranks] = count / step_seconds(micro_batches=count, stages=15, micro_batch_seconds=1.0)
    return abs(used[_JOB] / used[240] / (27.89 / 32.48) - 1)


_SIMULATED_ROWS = (
    Row("D7", f"discovery among {_JOB} ranks: rounds beyond ceil(log2 N)", "rounds", "at_most", 0, _rounds),
    Row("D7-bytes2", "bytes that are not as simulated, EP2", "of 12", "at_most", 0, partial(_wrong, ranks=2)),
    Row("D7-bytes4", "bytes that are not as simulated, EP4", "of 24", "at_most", 0, partial(_wrong, ranks=4)),
    Row("D7-racks", "groups across racks / inside one, simulated: how far from 3", "of it", "at_most", 0.2, _racks),
    Row(
        "D7-scaling",
        "utilisation, 1440 / 240 ranks: how far from what was published",
        "of it",
        "at_most",
        0.2,
        _scaling,
    ),
)

ROWS: tuple[Row, ...] = (
    *_byte_rows(),
    *_gradient_rows(),
    _time_row("D5", 2, bound=0.90, aim=0.60),
    _time_row("D5-ep4", 4, bound=1.0, aim=None),
    Row("D6", "group cache on a trained router's trace, 1000 steps: hits", "%", "at_least", 0.0, _cache_hits, aim=99.2),
    Row("D6-leaks", f"communicators and files left by {_LEAK_STEPS} steps", "of a rank", "at_most", 0, _left_behind),
    *_SIMULATED_ROWS,
    *exactness_rows(),
)
