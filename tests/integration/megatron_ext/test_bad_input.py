"""Mistakes that `--megascale` can be started with: one error on every rank, before training, nothing left behind."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.megatron_ext.runs import EXPERT_PARALLEL, GATED, flags, losses, trainer

ROOT = Path(__file__).resolve().parents[3]

MISTAKES: dict[str, str] = {
    "--megascale-page-size huge": r"--megascale-page-size='huge' is not a size",
    "--megascale-page-size 1KiB": r"--megascale-page-size=1KiB is outside 65536 \(64KiB\) to 67108864 \(64MiB\)",
    "--megascale-page-size 1GiB": r"--megascale-page-size=1GiB is outside",
    "--megascale-config /no/such/file.yaml": r"/no/such/file\.yaml cannot be read",
    "--megascale-pagesize 1MiB": r"unknown flag --megascale-pagesize; did you mean --megascale-page-size\?",
    "--megascale-trace /no/such/folder/t": r"--megascale-trace=/no/such/folder/t cannot be written: there is no folder",
    "--megascale-trace /tmp": r"--megascale-trace=/tmp is a folder; name a file in it",
    "--megascale-report /dev/null/r": r"--megascale-report=/dev/null/r cannot be made: /dev/null is a file",
    "--megascale-frozen reroute --moe-router-load-balancing-type sinkhorn": (
        r"--megascale-frozen reroute does not go with --moe-router-load-balancing-type sinkhorn"
    ),
    "--check-for-large-grads": r"--check-for-large-grads \(check_for_large_grads=True\) is not supported",
    "--num-experts 5": r"--num-experts 5 cannot be divided by --expert-model-parallel-size 2",
    "--moe-layer-freq [0]*2": r"needs a mixture-of-experts model: no layer of this one has experts",
    "--use-distributed-optimizer --save SAVE": r"needs --dist-ckpt-optim-fully-reshardable under --megascale",
    # One neuron of these experts has 3 x 512 x 4 bytes, and a page has 16 of them at least.
    "--hidden-size 512 --ffn-hidden-size 32 --megascale-page-size 64KiB": (
        r"page size 65536 bytes does not hold 16 neurons of an expert with hidden size 512 .*"
        r"the smallest page size that works is 98304 bytes"
    ),
}


def start_wrongly(rank: int, world: int, *, corpus: str, folder: str) -> dict[str, str]:
    """The error of every mistake; a run without any goes on afterwards in the same processes."""
    from megatron.core import parallel_state

    import megatron_ext
    from scripts.moe_trainer.errors import LocalUsageError, UsageError

    found: dict[str, str] = {}
    for mistake in MISTAKES:
        options = mistake.replace("SAVE", folder)
        with pytest.raises(UsageError) as error:
            trainer(corpus, GATED, EXPERT_PARALLEL, options, megascale=True)
        found[mistake] = str(error.value)
        if isinstance(error.value, LocalUsageError):
            # The script would end its process here: what struck one rank may not have struck the others.
            parallel_state.destroy_model_parallel()
            megatron_ext.disable()
        assert not megatron_ext.is_enabled(), mistake
    with trainer(corpus, GATED, EXPERT_PARALLEL, megascale=True) as run:
        losses(run, 1)
    return found


def test_every_rank_raises_the_same_clear_error(pools, corpus, tmp_path):
    first, second = pools[2].run(start_wrongly, corpus=corpus, folder=str(tmp_path / "checkpoints"))
    for mistake, pattern in MISTAKES.items():
        assert re.search(pattern, first[mistake]), f"{mistake}: {first[mistake]}"
    assert first == second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", '{"paging": {"page_size": "1MiB"}}', r"c\.json: unknown .* did you mean paging\.page_size_bytes\?"),
        (
            "c.yaml",
            "pagin:\n  page_size_bytes: 1MiB\n",
            r"c\.yaml: unknown configuration key pagin; did you mean paging\?",
        ),
    ],
)
def test_a_configuration_file_with_an_unknown_key(corpus, tmp_path, name, content, message):
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.errors import UsageError

    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        parse_args(flags(corpus, f"--megascale-config {path}", megascale=True), world_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--megascale-page-size 1MiB",
            r"--megascale-page-size=1MiB has no effect without --megascale; add --megascale",
        ),
        ("--megascale-config c.yaml", r"--megascale-config=c\.yaml has no effect without --megascale"),
    ],
)
def test_options_of_megascale_without_megascale(corpus, options, message):
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.errors import UsageError

    with pytest.raises(UsageError, match=message):
        parse_args(flags(corpus, options), world_size=1)


def test_megascale_on_a_dense_model(pools, corpus):
    (message,) = pools[1].run(start_dense, corpus=corpus)
    assert "--megascale needs a mixture-of-experts model: give --num-experts, or leave --megascale out" in message


def start_dense(rank: int, world: int, *, corpus: str) -> str:
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.errors import UsageError
    from scripts.moe_trainer.trainer import Trainer

    words = " ".join(flags(corpus, megascale=True))
    for flag in ("--num-experts 4", "--moe-router-topk 2", "--moe-aux-loss-coeff 0.01"):
        words = words.replace(flag, "")
    with pytest.raises(UsageError) as error:
        Trainer(parse_args(words.split()))
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--hidden-size 512 --ffn-hidden-size 32 --megascale-page-size 64KiB",) * 2,
            "page size 65536 bytes does not hold",
        ),
        (
            tuple(f"--megascale-device-budget 50% --megascale-disk-path {folder}" for folder in (".", "/no/such")),
            "disk path /no/such is not a folder; create it, or give another --megascale-disk-path (on rank 1)",
        ),
    ],
    ids=["every-rank", "one-rank"],
)
def test_a_mistake_found_while_building_ends_all_ranks_and_is_told_once(
    corpus: str, tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    """As a launcher starts them: the ranks end with the same status, none waits for another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for number in range(2):
        environment = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": port,
        }
        ranks.append(
            subprocess.Popen(
                [
                    *(sys.executable, str(ROOT / "scripts" / "pretrain_moe.py")),
                    *flags(corpus, GATED, EXPERT_PARALLEL, options[number], megascale=True),
                ],
                cwd=tmp_path,
                env={
                    **os.environ,
                    **{name: str(value) for name, value in environment.items()},
                    "MASTER_ADDR": "127.0.0.1",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors = "".join(error for _, error in outputs)
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert errors.count("error: ") == errors.count(f"pretrain_moe.py: error: {message}") == 1, errors
    assert "Traceback" not in errors
    assert "when instantiating" not in errors
    assert list(tmp_path.iterdir()) == []
