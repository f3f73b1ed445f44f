"""An interrupted run continues as if it had not been; a checkpoint that does not fit is refused alike everywhere."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.pool import Pools
from tests.integration.moe_trainer import ranks

EXPERT_PARALLEL = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"


class TestBitForBit:
    """Dropout is on, so random numbers must continue too."""

    @pytest.mark.parametrize(
        ("world", "flags"),
        [
            (1, ""),
            (1, "--use-distributed-optimizer"),
            (2, EXPERT_PARALLEL),
            (2, f"{EXPERT_PARALLEL} --use-distributed-optimizer"),
            (2, f"{EXPERT_PARALLEL} {RESHARDABLE} {OVERLAP} --bf16"),
            (2, f"--bf16 --use-distributed-optimizer {OVERLAP}"),
            (2, VIRTUAL),
        ],
        ids=["1", "1-distopt", "ep2", "ep2-distopt", "ep2-reshardable-overlap-bf16", "dp2-distopt-bf16", "interleaved"],
    )
    def test_resume(self, pools: Pools, corpus: str, folder: str, world: int, flags: str) -> None:
        whole = pools[world].run(ranks.straight, corpus=corpus, flags=flags, count=6)
        parts = pools[world].run(ranks.interrupted, corpus=corpus, flags=flags, folder=folder, before=3, after=3)
        assert parts == whole
        assert len({tuple(rank) for rank in whole}) == 1, "ranks report different numbers"
        assert sorted(path.name for path in Path(folder).iterdir()) == [
            "iter_0000003",
            "latest_checkpointed_iteration.txt",
        ]

    def test_several_trainers_in_one_process_do_not_see_each_other(self, pools: Pools, corpus: str) -> None:
        flags = [EXPERT_PARALLEL, f"{VIRTUAL} --swiglu", EXPERT_PARALLEL]
        first, _, again = pools[2].run(ranks.several, corpus=corpus, flags=flags, count=2)[0]
        assert first == again

    def test_a_closed_trainer_leaves_no_threads(self, pools: Pools, corpus: str) -> None:
        """Each process group has threads of its own; they end when nothing refers to the group any more."""
        overlapping = f"--use-distributed-optimizer {OVERLAP}"
        flags = ["", overlapping, f"{EXPERT_PARALLEL} {overlapping}", f"{VIRTUAL} --bf16", ""]
        for counts in pools[2].run(ranks.threads_after, corpus=corpus, flags=flags):
            assert counts == [counts[0]] * len(flags)


class TestOtherLayouts:
    """Without dropout the layout does not change what is computed, so a checkpoint continues the same on any."""

    FLAGS = "--num-layers 4 --hidden-dropout 0 --attention-dropout 0 --moe-aux-loss-coeff 0"

    @pytest.fixture(scope="class")
    def checkpoint(self, pools: Pools, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
        folder = str(tmp_path_factory.mktemp("layouts"))
        pools[1].run(ranks.saved, corpus=corpus, flags=self.FLAGS, folder=folder, count=2)
        return folder

    def continued(self, pools: Pools, corpus: str, checkpoint: str, world: int, flags: str) -> list[ranks.Numbers]:
        flags = f"{self.FLAGS} --load {checkpoint} {flags}"
        taken = pools[world].run(ranks.straight, corpus=corpus, flags=flags, count=3)
        assert all(numbers == taken[0] for numbers in taken)
        return taken[0]

    @pytest.mark.parametrize(
        ("world", "flags"),
        [
            (2, ""),
            (2, "--overlap-grad-reduce --moe-token-dispatcher-type alltoall"),
            (2, "--pipeline-model-parallel-size 2"),
            (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
            (2, "--pipeline-model-parallel-size 2 --calculate-per-token-loss --micro-batch-size 4"),
            (1, "--recompute-granularity full --recompute-method uniform"),
            (1, "--recompute-granularity selective --recompute-modules moe"),
        ],
        ids=["dp2", "dp2-overlap", "pp2", "interleaved", "pp2-per-token", "recompute-full", "recompute-moe"],
    )
    def test_with_the_optimizer(self, pools: Pools, corpus: str, checkpoint: str, world: int, flags: str) -> None:
        self.assert_close(
            self.continued(pools, corpus, checkpoint, world, flags), self.continued(pools, corpus, checkpoint, 1, "")
        )

    @pytest.mark.parametrize(
        ("world", "flags"),
        [
            (2, EXPERT_PARALLEL),
            (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"),
            (2, f"--use-distributed-optimizer {OVERLAP}"),
            (4, f"{EXPERT_PARALLEL} --pipeline-model-parallel-size 2 --use-distributed-optimizer"),
            (4, f"{EXPERT_PARALLEL} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
        ],
        ids=["ep2-alltoall", "ep2-allgather", "distopt", "pp2xep2-distopt", "interleaved-xep2"],
    )
    def test_weights_alone(self, pools: Pools, corpus: str, checkpoint: str, world: int, flags: str) -> None:
        weights = "--no-load-optim"
        self.assert_close(
            self.continued(pools, corpus, checkpoint, world, f"{flags} {weights}"),
            self.continued(pools, corpus, checkpoint, 1, weights),
        )

    def assert_close(self, got: list[ranks.Numbers], expected: list[ranks.Numbers]) -> None:
        for ours, theirs in zip(got, expected, strict=True):
            loss, norm, _, parameters, rate = ours
            assert (loss, norm, parameters) == pytest.approx((theirs[0], theirs[1], theirs[3]), rel=1e-5)
            assert rate == theirs[4]


class TestRefusal:
    @pytest.fixture(scope="class")
    def checkpoint(self, pools: Pools, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
        folder = str(tmp_path_factory.mktemp("refusal"))
        pools[2].run(ranks.saved, corpus=corpus, flags=EXPERT_PARALLEL, folder=folder, count=1)
        return folder

    def said(self, pools: Pools, corpus: str, flags: str, *, world: int = 2) -> str:
        """What every rank says."""
        words = set(pools[world].run(ranks.refused, corpus=corpus, flags=flags))
        assert len(words) == 1
        return words.pop()

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--hidden-size 64", "is of another shape: hidden_size 32 (here 64)"),
            ("--num-experts 8", "num_experts 4 (here 8)"),
            ("--ffn-hidden-size 64 --num-layers 4", "num_layers 2 (here 4)"),
            ("--untie-embeddings-and-output-weights", "untie_embeddings_and_output_weights False (here True)"),
            ("--qk-layernorm", "has no tensor"),
            ("--use-distributed-optimizer", "was saved with use_distributed_optimizer=False"),
            ("--lr 1", "continues another schedule: --lr 0.003 (here 1.0)"),
            ("--train-iters 12", "--lr-decay-iters (or --train-iters) 6 iterations (here 12 iterations)"),
            ("--train-iters 12", "longer, on the stored schedule add --use-checkpoint-opt-param-scheduler"),
            ("--train-iters 12", "given here, at the checkpoint's place in it, add --override-opt-param-scheduler"),
            ("--ckpt-step 7", "iter_0000007 does not exist"),
        ],
    )
    def test_what_does_not_fit(self, pools: Pools, corpus: str, checkpoint: str, flags: str, message: str) -> None:
        assert message in self.said(pools, corpus, f"{EXPERT_PARALLEL} --load {checkpoint} {flags}")

    def test_optimizer_state_of_another_expert_parallel_size_without_megascale(
        self, pools: Pools, corpus: str, checkpoint: str
    ) -> None:
        message = self.said(pools, corpus, f"--load {checkpoint}", world=1)
        assert "expert_model_parallel_size=2, here it is 1" in message
        assert "--no-load-optim" in message

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (
                lambda path: _truncate(path / "__1_0.distcp"),
                r"__1_0\.distcp has 100 bytes of \d{3,}\. There is no other",
            ),
            (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing\. There is no other one"),
            (
                lambda path: _blank(path / "__0_0.distcp"),
                r"cannot be read: __0_0\.distcp, bytes 0\.\.\d+: .*restore it",
            ),
            (lambda path: _truncate(path / "common.pt"), r"cannot be read: common\.pt .*restore it from a copy"),
            (lambda path: _truncate(path / "common.pt", 0), r"cannot be read: common\.pt EOFError.*start anew without"),
            (lambda path: _truncate(path / ".metadata"), r"cannot be read: \.metadata .*restore it from a copy"),
            (lambda path: _truncate(path / ".metadata", 0), r"\.metadata EOFError.*restore it from a copy"),
            (lambda path: (path / "metadata.json").unlink(), "is not a distributed checkpoint"),
            (lambda path: (path.parent / "latest_checkpointed_iteration.txt").write_text("x"), "holds 'x' instead of"),
        ],
        ids=[
            "truncated tensors",
            "missing tensors",
            "blank tensors",
            "common",
            "empty common",
            "metadata",
            "empty metadata",
            "not a checkpoint",
            "tracker",
        ],
    )
    def test_damage(
        self, pools: Pools, corpus: str, checkpoint: str, folder: str, damage: Callable[[Path], object], message: str
    ) -> None:
        shutil.copytree(checkpoint, folder)
        damage(Path(folder) / "iter_0000001")
        assert re.search(message, self.said(pools, corpus, f"{EXPERT_PARALLEL} --load {folder}"))

    def test_a_damaged_one_names_those_beside_it(self, pools: Pools, corpus: str, checkpoint: str, folder: str) -> None:
        shutil.copytree(checkpoint, folder)
        shutil.copytree(Path(folder) / "iter_0000001", Path(folder) / "iter_0000002")
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("2")
        _truncate(Path(folder) / "iter_0000002" / "__0_0.distcp")
        message = self.said(pools, corpus, f"{EXPERT_PARALLEL} --load {folder}")
        assert "Load another one with --ckpt-step: there are 1" in message

    def test_a_checkpoint_in_place_of_its_folder(self, pools: Pools, corpus: str, checkpoint: str) -> None:
        message = self.said(pools, corpus, f"{EXPERT_PARALLEL} --load {checkpoint}/iter_0000001")
        assert (
            f"is a checkpoint itself, and wanted is the folder that checkpoints lie in: give --load {checkpoint} --"
            in message
        )

    def test_none_although_demanded(self, pools: Pools, corpus: str, tmp_path: Path) -> None:
        message = self.said(pools, corpus, f"--load {tmp_path} --exit-on-missing-checkpoint", world=1)
        assert "holds no checkpoint" in message

    def test_none_starts_from_the_beginning(self, pools: Pools, corpus: str, tmp_path: Path) -> None:
        fresh, loaded = pools[1].run(ranks.several, corpus=corpus, flags=["", f"--load {tmp_path}"], count=1)[0]
        assert fresh == loaded

    def test_a_failed_save_leaves_the_one_before(self, pools: Pools, corpus: str, folder: str) -> None:
        said = pools[2].run(ranks.out_of_space, corpus=corpus, folder=folder, limit_bytes=50_000)
        assert all("iter_0000002 could not be written" in words for words in said)
        assert any("File too large" in words for words in said)
        assert sorted(path.name for path in Path(folder).iterdir()) == [
            "iter_0000001",
            "latest_checkpointed_iteration.txt",
        ]
        assert (Path(folder) / "latest_checkpointed_iteration.txt").read_text() == "1"


def _truncate(path: Path, size: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _blank(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
