"""`scripts/pretrain_moe.py` as a person or a launcher starts it: in processes of its own."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.integration.moe_trainer.ranks import MODEL

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(ROOT / "scripts" / "pretrain_moe.py")
STEP_FIELDS = {
    *("event", "iteration", "loss", "grad_norm", "num_zeros", "params_norm", "lr", "skipped"),
    *("step_seconds", "tokens_per_second", "rss_bytes"),
}


def start(rank: int, world: int, flags: Sequence[str], folder: Path, *, port: int = 0) -> subprocess.Popen[str]:
    """Start one rank from another folder than the project's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    if world > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        environment.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    return subprocess.Popen(
        [sys.executable, SCRIPT, *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(rank: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit status and what it wrote to its two outputs."""
    try:
        out, err = rank.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        rank.kill()
        raise
    return rank.returncode, out, err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_of_one_process(corpus: str, tmp_path: Path) -> None:
    metrics = tmp_path / "out" / "metrics.jsonl"
    flags = [*MODEL.split(), "--data-path", corpus, "--save", "checkpoints", "--tensorboard-dir", "board"]
    flags += ["--eval-interval", "4", "--log-interval", "3", "--exit-interval", "5", "--metrics-jsonl", str(metrics)]
    status, out, err = finish(start(0, 1, flags, tmp_path))
    assert status == 0, err
    written = records(metrics)
    assert [record["event"] for record in written] == [
        *("start", "step", "step", "step", "step", "validation", "step", "validation", "checkpoint", "end")
    ]
    first, last = written[0], written[-1]
    assert (first["experts_class"], first["dispatcher"]) == ("SequentialMLP", "MoEAllGatherTokenDispatcher")
    assert (first["optimizer"], first["optimizers"]) == ("ChainedOptimizer", ["FP32Optimizer"])
    assert (first["world"], first["tokens_per_step"], first["argv"]) == (1, 128, flags)
    assert last["reason"] == "exit_interval"
    steps = [record for record in written if record["event"] == "step"]
    assert steps[0].keys() == STEP_FIELDS
    assert [record["iteration"] for record in steps] == [1, 2, 3, 4, 5]
    assert int(str(last["peak_rss_bytes"])) >= int(str(steps[-1]["rss_bytes"])) > 1 << 26
    printed = [line.split(" | ")[0] for line in out.splitlines()]
    assert [line for line in printed if line.startswith("iteration")] == ["iteration 3/6"]
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_a_loss_that_is_not_finite_ends_the_run(corpus: str, tmp_path: Path) -> None:
    flags = [*MODEL.split(), "--data-path", corpus, "--init-method-std", "1e30", "--metrics-jsonl", "metrics.jsonl"]
    status, _, err = finish(start(0, 1, flags, tmp_path))
    assert status == 1
    assert "found NaN in local forward loss calculation" in err
    reason = records(tmp_path / "metrics.jsonl")[-1]["reason"]
    assert "iteration 1: Unexpected result nan" in str(reason)


def test_a_mistake_ends_every_rank_and_is_told_once(corpus: str, tmp_path: Path) -> None:
    flags = [*MODEL.split(), "--data-path", corpus, "--expert-model-parallel-size", "2", "--seq-length", "1000000"]
    port = free_port()
    ranks = [start(rank, 2, flags, tmp_path, port=port) for rank in range(2)]
    done = [finish(rank) for rank in ranks]
    assert [status for status, _, _ in done] == [2, 2]
    assert done[0][2].startswith("pretrain_moe.py: error: the corpus is too short")
    assert "error" not in done[1][2]
    assert list(tmp_path.iterdir()) == []
