"""Killed ranks start anew, and the run goes on as if nothing had happened, on fewer of them if need be."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.integration.moe_trainer.ranks import MODEL

ROOT = Path(__file__).resolve().parents[3]
PAGED = "--megascale --megascale-checkpoint-format paged --megascale-checkpoint-beside on --log-interval 1"
TRAIN_ITERS = "--train-iters 12 --save-interval 2 --attention-dropout 0 --hidden-dropout 0"
TIMEOUT_SECONDS = 150


def flags(corpus: str, folder: Path) -> list[str]:
    words = [*MODEL.replace("--train-iters 6", TRAIN_ITERS).split(), *PAGED.split(), "--data-path", corpus]
    return [*words, "--save", str(folder), "--load", str(folder), "--metrics-jsonl", f"{folder}.jsonl"]


def launcher(port: int, *, is_host: bool) -> list[str]:
    """One of two nodes, of which one is enough."""
    conf = f"is_host={str(is_host).lower()},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run", "--rdzv-conf", conf]
    many = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "2", "--monitor-interval", "0.1"]
    return ["-m", "torch.distributed.run", *many, *where, "--local-addr", "127.0.0.1"]


@contextmanager
def nodes(corpus: str, folder: Path) -> Iterator[tuple[list[subprocess.Popen[str]], Iterator[str]]]:
    """Two nodes on this machine, and the lines that they and their ranks print."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    read, write = os.pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [str(ROOT / "scripts/pretrain_moe.py"), *flags(corpus, folder)]
    started = [
        subprocess.Popen(
            [sys.executable, *launcher(port, is_host=is_host), *script],
            stdout=write,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        for is_host in (True, False)
    ]
    os.close(write)
    # A line may never come: the test then fails by what it has read, not by a limit that shows nothing of it.
    watchdog = threading.Timer(TIMEOUT_SECONDS, kill, [started])
    watchdog.start()
    try:
        with open(read) as lines:
            yield started, iter(lines)
    finally:
        watchdog.cancel()
        kill(started)


def kill(nodes: list[subprocess.Popen[str]]) -> None:
    for node in nodes:
        for process in [*ranks_of(node), psutil.Process(node.pid)] if node.poll() is None else []:
            process.kill()
        node.wait(TIMEOUT_SECONDS)


def ranks_of(node: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(node.pid).children() if "pretrain_moe" in " ".join(p.cmdline())]


def losses_of(path: Path) -> dict[int, list[float]]:
    """By iteration, every loss that it had, in the order of the runs."""
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "step":
            found.setdefault(record["iteration"], []).append(record["loss"])
    return found


def test_killed_ranks_come_back_and_a_lost_node_is_done_without(corpus, tmp_path):
    folder = tmp_path / "run"
    output: list[str] = []
    killed: list[int] = []
    with nodes(corpus, folder) as ((first, second), lines):
        for line in lines:
            output.append(line)
            if not line.startswith("iteration "):
                continue
            iteration = int(line.split()[1].split("/")[0])
            if not killed and iteration >= 5:
                (rank,) = ranks_of(second)
                rank.send_signal(signal.SIGKILL)
                killed.append(iteration)
            elif len(killed) == 1 and iteration >= 9:
                ranks = ranks_of(second)
                second.send_signal(signal.SIGKILL)  # first, or it would start the rank again
                for rank in ranks:
                    rank.send_signal(signal.SIGKILL)
                killed.append(iteration)
        assert first.wait(TIMEOUT_SECONDS) == 0, "".join(output)
    text = "".join(output)
    assert len(killed) == 2, text
    assert "is not what it was" not in text
    found = losses_of(Path(f"{folder}.jsonl"))
    assert set(found) == set(range(1, 13))
    replayed = {iteration: losses for iteration, losses in found.items() if len(losses) > 1}
    assert replayed, "steps were made again"
    for iteration, losses in replayed.items():
        if iteration <= killed[0] + 1:
            assert losses[0] == losses[1], "on as many ranks, to the bit"
        assert all(math.isclose(loss, losses[0], rel_tol=1e-5) for loss in losses)
    layouts = [json.loads(line)["layout"]["data"] for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert layouts[0] == 2
    assert layouts[-1] == 1, "the last steps were made by one rank"
