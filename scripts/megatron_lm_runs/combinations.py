"""A small MoE in flags of `pretrain_gpt.py`, and the ways of running it in parallel that are compared with stock."""

from __future__ import annotations

from dataclasses import dataclass

ITERATIONS = 20
BASE = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--position-embedding-type", "rope"),
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "96", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-token-dispatcher-type", "alltoall", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "3e-4", "--min-lr", "3e-5"),
    *("--lr-warmup-iters", "2", "--lr-decay-iters", str(ITERATIONS), "--train-iters", str(ITERATIONS)),
    *("--num-workers", "0", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"),
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
    *("--no-rope-fusion", "--no-persist-layer-norm", "--log-interval", "1", "--tensorboard-log-interval", "1"),
    *("--eval-iters", "0", "--eval-interval", "1000000", "--distributed-timeout-minutes", "2"),
)
"""Flags of every run. The last of two equal flags counts, so that a combination may change any of them."""


@dataclass(frozen=True)
class Combination:
    """Flags of both runs, and of MegaScale's only."""

    name: str
    ranks: int
    flags: tuple[str, ...] = ()
    megascale: tuple[str, ...] = ()

    @property
    def clips_in_bf16(self) -> bool:
        """Whether the last bit of the gradient norm reaches weights that are rounded to 8 bits."""
        return "--bf16" in self.flags and "--clip-grad" not in self.flags


EP2 = ("--expert-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAP = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SHARED = ("--moe-shared-expert-intermediate-size", "64", "--moe-shared-expert-overlap")
UNCLIPPED = ("--clip-grad", "0")
GROUPS = ("--megascale-dispatcher", "groups")
BUDGET = ("--megascale-device-budget", "50%", "--megascale-disk-path", "{scratch}", "--megascale-page-size", "64KiB")

COMBINATIONS = (
    Combination("single", 1),
    Combination("budget", 1, megascale=BUDGET),
    Combination("bf16", 1, ("--bf16",)),
    Combination("recompute-full", 1, RECOMPUTE),
    Combination("recompute-moe", 1, ("--recompute-granularity", "selective", "--recompute-modules", "moe")),
    Combination("shared-experts", 2, (*EP2, *SHARED)),
    Combination("mtp", 1, ("--mtp-num-layers", "1")),
    Combination("dp2", 2),
    Combination("ep2", 2, EP2),
    Combination("ep2-groups", 2, EP2, GROUPS),
    Combination("ep2-allgather", 2, (*EP2, "--moe-token-dispatcher-type", "allgather")),
    Combination("ep2-distributed", 2, (*EP2, *DISTRIBUTED)),
    Combination("dp2-overlap", 2, OVERLAP),
    Combination("pp2", 2, PP2),
    Combination("pp2-interleaved", 2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
    Combination("ep2xdp2", 4, EP2),
    Combination("ep2xdp2-overlap", 4, (*EP2, *OVERLAP)),
    Combination("pp2xep2", 4, (*PP2, *EP2)),
    Combination("pp2xep2-groups", 4, (*PP2, *EP2), GROUPS),
    Combination("pp2xep2-bf16", 4, (*PP2, *EP2, "--bf16", *DISTRIBUTED)),
    Combination("pp2xep2-bf16-unclipped", 4, (*PP2, *EP2, "--bf16", *DISTRIBUTED, *UNCLIPPED)),
)


def named(name: str) -> Combination:
    """Raises ValueError where none has this name."""
    for combination in COMBINATIONS:
        if combination.name == name:
            return combination
    raise ValueError(f"no combination {name!r}; there are {', '.join(c.name for c in COMBINATIONS)}")
