"""A rank is killed; the launcher starts the ranks anew, and the run goes on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.integration.moe_trainer.ranks import MODEL

ROOT = Path(__file__).resolve().parents[3]
PAGED = "--megascale --megascale-checkpoint-format paged --megascale-checkpoint-beside on --log-interval 1"
TRAIN_ITERS = "--train-iters 9 --save-interval 2 --expert-model-parallel-size 2"


def losses_of(path: Path) -> dict[int, float]:
    """By iteration; each must be the same however often it was made."""
    found: dict[int, float] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "step":
            assert found.setdefault(record["iteration"], record["loss"]) == record["loss"]
    return found


def start(corpus: str, folder: Path, launcher: list[str]) -> subprocess.Popen[str]:
    flags = [*MODEL.replace("--train-iters 6", TRAIN_ITERS).split(), *PAGED.split(), "--data-path", corpus]
    flags += ["--save", str(folder), "--load", str(folder), "--metrics-jsonl", f"{folder}.jsonl"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, str(ROOT / "scripts/pretrain_moe.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_rank_comes_back_with_the_same_losses(corpus, tmp_path):
    folder = tmp_path / "run"
    launcher = ["--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "2", "--max-restarts", "1"]
    process = start(corpus, folder, launcher)
    output, killed = [], False
    assert process.stdout is not None
    try:
        for line in process.stdout:
            output.append(line)
            if not killed and "iteration" in line and " 6/" in line.replace("  ", " "):
                ranks = [p for p in psutil.Process(process.pid).children() if "pretrain_moe" in " ".join(p.cmdline())]
                assert len(ranks) == 2
                ranks[1].send_signal(signal.SIGKILL)
                killed = True
        assert process.wait(timeout=60) == 0, "".join(output)
    finally:
        process.kill()
        process.stdout.close()
    assert killed, "".join(output)
    interrupted = losses_of(Path(f"{folder}.jsonl"))
    assert set(interrupted) == set(range(1, 10))
    assert "is not what it was" not in "".join(output)
    journal = [json.loads(line)["step"] for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert len(journal) > 9, "steps were made again, and were what they had been"
