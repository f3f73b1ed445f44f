"""The layouts that are proved. Each is a small model on real text; together they cover what a layout can be made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEQUENCE_LENGTH = 64

_MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --moe-ffn-hidden-size 256 "
    "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    f"--seq-length {SEQUENCE_LENGTH} --micro-batch-size 2 --untie-embeddings-and-output-weights "
    # Slow rotary frequencies would leave the bias of keys almost no gradient: Adam would make updates out of rounding.
    "--position-embedding-type rope --rotary-base 50 --normalization RMSNorm"
)
# Adam divides by sqrt(v) + eps. With the usual eps of 1e-8 a gradient element of that size, of which embeddings have
# some at first, becomes an update that is mostly rounding, on either side.
_TRAINING = (
    "--lr 3e-4 --lr-decay-style constant --lr-warmup-iters 50 --weight-decay 0.1 --adam-eps 1e-6 "
    "--seed 1234 --split 100"
)
_GATED, _UNGATED = "--swiglu --disable-bias-linear", ""
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"

MEGASCALE_FLAGS = ("--megascale-page-size", "64KiB")
"""The smallest pages, so that each of these small experts has several."""


@dataclass(frozen=True)
class Layout:
    """What is proved under a name."""

    name: str
    what: str
    ranks: int
    options: str
    """Flags of `pretrain_moe.py` besides those of the common model."""

    @property
    def is_bf16(self) -> bool:
        """Whether it is held against the control instead of the fp32 bounds."""
        return "--bf16" in self.options.split()

    def flags(self, *, data_path: Path, steps: int) -> list[str]:
        """The trainer's flags for a run of at most `steps` steps."""
        text = f"{_MODEL} {_TRAINING} {self.options} --train-iters {max(steps, 51)}"
        return [*text.split(), "--data-path", str(data_path)]


def _layout(name: str, ranks: int, what: str, *options: str) -> Layout:
    return Layout(name, what, ranks, " ".join(options))


LAYOUTS: tuple[Layout, ...] = (
    _layout(
        "single",
        1,
        "1 rank, 1 micro-batch, dropout on, SwiGLU",
        _GATED,
        "--micro-batch-size 4 --global-batch-size 4",
    ),
    _layout(
        "accumulate",
        1,
        "4 micro-batches, loss per token, GELU with biases, all-gather dispatcher",
        _UNGATED,
        _NO_DROPOUT,
        "--global-batch-size 8 --calculate-per-token-loss",
    ),
    _layout(
        "ep2",
        2,
        "EP2",
        _GATED,
        _NO_DROPOUT,
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 4",
    ),
    _layout(
        "ep2dp2",
        4,
        "EP2 x DP2, GELU with biases",
        _UNGATED,
        _NO_DROPOUT,
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 8",
    ),
    _layout(
        "ep2dp2_distopt",
        4,
        "EP2 x DP2, distributed optimizer, 4 micro-batches, loss per token",
        _GATED,
        _NO_DROPOUT,
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 32",
        "--use-distributed-optimizer --calculate-per-token-loss",
    ),
    _layout(
        "dp2_distopt",
        2,
        "DP2 (EP1), distributed optimizer",
        _GATED,
        "--global-batch-size 4",
        _NO_DROPOUT,
        "--use-distributed-optimizer",
    ),
    _layout(
        "ep2etp2",
        4,
        "EP2 x ETP2: each expert spread over two ranks, all-gather dispatcher",
        _GATED,
        _NO_DROPOUT,
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --moe-token-dispatcher-type allgather",
        "--global-batch-size 8",
    ),
    _layout(
        "pp2ep2",
        4,
        "PP2 x EP2, 1F1B, 4 micro-batches",
        _GATED,
        _NO_DROPOUT,
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
        "--global-batch-size 16",
    ),
    _layout(
        "interleaved",
        2,
        "interleaved PP2, two chunks a rank, 4 micro-batches",
        _GATED,
        _NO_DROPOUT,
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "--global-batch-size 8",
    ),
    _layout(
        "recompute_full",
        1,
        "full recompute, dropout on, 2 micro-batches",
        _GATED,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --global-batch-size 4",
    ),
    _layout("bf16", 1, "1 rank, bf16, 2 micro-batches", _GATED, _NO_DROPOUT, "--bf16 --global-batch-size 4"),
    _layout(
        "bf16_ep2dp2_distopt",
        4,
        "EP2 x DP2, bf16, distributed optimizer",
        _GATED,
        _NO_DROPOUT,
        "--bf16 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 8",
        "--use-distributed-optimizer",
    ),
)


def select(names: str) -> list[Layout]:
    """The layouts of `NAME[,NAME]` or `all`, in their own order. Raises ValueError for an unknown name."""
    wanted = [name.strip() for name in names.split(",")]
    known = [layout.name for layout in LAYOUTS]
    unknown = [name for name in wanted if name not in known and name != "all"]
    if unknown:
        raise ValueError(f"layout {unknown[0]!r} is unknown; there are all, {', '.join(known)}")
    return [layout for layout in LAYOUTS if layout.name in wanted or "all" in wanted]


def describe(layouts: Sequence[Layout]) -> str:
    """The layouts, a line each."""
    width = max(len(layout.name) for layout in layouts)
    return "\n".join(f"{layout.name:<{width}}  {layout.ranks} ranks  {layout.what}" for layout in layouts)
