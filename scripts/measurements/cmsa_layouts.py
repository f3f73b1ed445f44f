"""Training steps with clipping by module, in processes of their own: times, and what every layout finds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from scripts.moe_trainer.arguments import parse_args
from scripts.moe_trainer.trainer import Trainer

_EXPERT = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall")
_SHARDED = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    # name: (ranks, flags)
    "single": (1, ()),
    "dp2": (2, ()),
    "ep2": (2, _EXPERT),
    "ep2dp2": (4, _EXPERT),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
    "dp2-distributed": (2, _SHARDED),
    "ep2dp2-distributed": (4, (*_EXPERT, *_SHARDED)),
}
START = ("--megascale-clip", "cmsa", "--megascale-cmsa-alpha", "0.35")
WORKER = "scripts.measurements.cmsa_layouts:Layout"
_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --num-experts 8 --moe-router-topk 2 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --moe-aux-loss-coeff 0.01 --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.1 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style cosine --train-iters 20 --split 100 --megascale"
)
_STEPS = 3


class Layout:
    """A small model in one layout."""

    def __init__(self, rank: int, world: int, *, data_path: str, options: Sequence[str]) -> None:
        self._args = [*_MODEL.split(), *options, "--data-path", data_path]
        self._world = world

    def steps(self) -> list[dict[str, Any]]:
        """By step: loss, norm and modules. Saves its weights before the first one where it has somewhere to."""
        args = parse_args(self._args, world_size=self._world)
        with Trainer(args) as run:
            if args.save is not None:
                run.save()
            found = []
            for _ in range(_STEPS):
                step = run.train_step()
                modules = (step.clip or {}).get("mpus", {})
                found.append({"loss": step.loss, "norm": step.grad_norm, "modules": modules})
        return found


class StepTimes:
    """One trainer, whose clipping changes between stock's and by module: the same weights, memory and batches."""

    def __init__(self, rank: int, world: int, *, flags: Sequence[str]) -> None:
        self._run = Trainer(parse_args([*flags, *START], world_size=world))
        self._clipping = self._run.optimizer.clipping

    def measure(self, *, warmup: int, steps: int, blocks: int) -> dict[str, list[float]]:
        """Seconds of a step, a mean a block of steps; sides take turns, every other block begins with the other one."""
        found: dict[str, list[float]] = {"stock": [], "cmsa": []}
        for block in range(blocks + 1):
            for side in ("stock", "cmsa") if block % 2 else ("cmsa", "stock"):
                self._use(by_module=side == "cmsa")
                start = time.perf_counter()
                count = steps if block else warmup
                for _ in range(count):
                    self._run.train_step()
                if block:
                    found[side].append((time.perf_counter() - start) / count)
        return found

    def _use(self, *, by_module: bool) -> None:
        self._run.optimizer.clipping = self._clipping if by_module else None
        for chunk in self._run.model:
            chunk.gradients.takes_sums, chunk.gradients.takes_norms = by_module, not by_module


def deviation(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """The largest relative difference of two lists of steps. Raises RuntimeError where modules differ."""
    worst = 0.0
    for step, wanted in zip(found, expected, strict=True):
        if step["modules"].keys() != wanted["modules"].keys() or not wanted["modules"]:
            raise RuntimeError(f"modules {list(step['modules'])} instead of {list(wanted['modules'])}")
        pairs = [(step["norm"], wanted["norm"])]
        pairs += [(step["modules"][m][key], value) for m, of in wanted["modules"].items() for key, value in of.items()]
        worst = max([worst, *(abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs)])
    return worst
