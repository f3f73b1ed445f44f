"""What the trainer trains, and that looking at it does not change it."""

import math

import pytest

from tests.distributed.pool import Pools
from tests.integration.moe_trainer import ranks

OPTIONS = [
    "--squared-relu",
    "--swiglu --activation-func-clamp-value 7 --disable-bias-linear",
    "--quick-geglu --glu-linear-offset 1",
    "--normalization RMSNorm --qk-layernorm --position-embedding-type rope --untie-embeddings-and-output-weights",
    "--group-query-attention --num-query-groups 2 --add-qkv-bias --position-embedding-type none",
    "--moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 32 --disable-bias-linear --moe-shared-expert-gate",
    "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear",
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-pre-softmax",
    "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-router-topk 1 --moe-apply-probs-on-input",
    "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3 --moe-input-jitter-eps 0.01",
    "--moe-expert-capacity-factor 1 --moe-token-dispatcher-type alltoall",
    "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position "
    "--moe-token-dispatcher-type alltoall",
    "--moe-router-dtype fp32 --bf16",
    "--calculate-per-token-loss --clip-grad 0.1",
    "--lr-decay-style cosine --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2",
    "--decoupled-lr 1e-2 --decoupled-min-lr 1e-3 --no-decoupled-weight-decay",
]


class TestLearning:
    def test_every_option_trains_on_cpu(self, pools: Pools, corpus: str) -> None:
        """Three steps each: finite numbers, and the loss of a model that has begun to learn."""
        [runs] = pools[1].run(ranks.several, corpus=corpus, flags=OPTIONS, count=3)
        for flags, steps in zip(OPTIONS, runs, strict=True):
            for loss, norm, _, parameters, _ in steps:
                assert norm is not None
                assert parameters is not None
                assert all(map(math.isfinite, (loss, norm, parameters))), flags
            assert steps[-1][0] < steps[0][0] < 6, flags

    @pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
    def test_both_dispatchers_learn_alike(self, pools: Pools, corpus: str, dispatcher: str) -> None:
        flags = f"--hidden-dropout 0 --attention-dropout 0 --moe-token-dispatcher-type {dispatcher} --train-iters 30"
        # At one rank all experts come from one stream of random numbers, so the two agree only from the same weights.
        [alone] = pools[1].run(ranks.straight, corpus=corpus, flags=flags, count=30)
        spread = pools[2].run(ranks.straight, corpus=corpus, flags=f"{flags} --expert-model-parallel-size 2", count=30)
        assert spread[0] == spread[1]
        for run in (alone, spread[0]):
            assert run[0][0] - run[-1][0] > 1.5
        assert spread[0][-1][0] == pytest.approx(alone[-1][0], rel=0.2)

    def test_the_distributed_optimizer_changes_nothing(self, pools: Pools, corpus: str) -> None:
        flags = ["--expert-model-parallel-size 2", "--expert-model-parallel-size 2 --use-distributed-optimizer"]
        plain, distributed = pools[2].run(ranks.several, corpus=corpus, flags=flags, count=3)[0]
        for one, other in zip(plain, distributed, strict=True):
            assert (other[0], other[1], other[3]) == pytest.approx((one[0], one[1], one[3]), rel=1e-5)

    def test_accumulation_gives_the_gradient_of_the_whole_batch(self, pools: Pools, corpus: str) -> None:
        base = "--hidden-dropout 0 --attention-dropout 0 --moe-aux-loss-coeff 0"
        flags = [f"{base} --micro-batch-size {size}" for size in (1, 2, 8)]
        first, *others = pools[1].run(ranks.several, corpus=corpus, flags=flags, count=3)[0]
        for other in others:
            assert [step[0] for step in other] == pytest.approx([step[0] for step in first], rel=1e-5)
            assert [step[1] for step in other] == pytest.approx([step[1] for step in first], rel=1e-5)

    def test_the_schedule_warms_up_and_decays(self, pools: Pools, corpus: str) -> None:
        [steps] = pools[1].run(ranks.straight, corpus=corpus, flags="--lr-decay-style linear", count=6)
        assert [step[4] for step in steps] == pytest.approx([0, 1.5e-3, 3e-3, 2.25e-3, 1.5e-3, 0.75e-3])


class TestLooking:
    @pytest.mark.parametrize(
        ("world", "flags"),
        [
            (1, "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"),
            (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
            (2, "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
        ],
        ids=["expert-bias", "overlap", "interleaved"],
    )
    def test_validation_leaves_training_alone(self, pools: Pools, corpus: str, world: int, flags: str) -> None:
        straight = pools[world].run(ranks.straight, corpus=corpus, flags=flags, count=3)
        validated = pools[world].run(ranks.with_validation, corpus=corpus, flags=flags, count=3)
        for numbers, (steps, losses) in zip(straight, validated, strict=True):
            assert steps == numbers
            assert losses[0::2] == losses[1::2]
            assert losses == validated[0][1]
            assert losses[-1] < losses[0]

    def test_the_halves_of_a_step_can_be_called_apart(self, pools: Pools, corpus: str) -> None:
        flags = "--hidden-dropout 0 --attention-dropout 0"
        [straight] = pools[1].run(ranks.straight, corpus=corpus, flags=flags, count=3)
        [halves] = pools[1].run(ranks.halves, corpus=corpus, flags=flags, count=3)
        assert halves == [step[:2] for step in straight]
