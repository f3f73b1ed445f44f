"""``megascale checkpoint convert``: what comes out is what a run would have saved in that format, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale_omni import cli
from megascale_omni.checkpoint.boxes import whole
from megascale_omni.checkpoint.torch_dist import TorchDist, load_plain
from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    losses,
    trainer,
    write_corpus,
)
from tests.integration.megatron_ext.snapshots import same_bits

PAGED = "--megascale-checkpoint-format paged"
SPARSE = "--moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 0"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def save_both(rank: int, world: int, *, corpus: str, options: str, paged: str, stock: str) -> list[float]:
    """The same state in both formats; then two more losses."""
    from scripts.moe_trainer import checkpointing

    with trainer(corpus, options, PAGED, f"--save {paged}", megascale=True) as run:
        losses(run, 3)
        run.save()
        checkpointing.save(run, stock)
        return losses(run, 2)


def go_on(rank: int, world: int, *, corpus: str, options: str, folder: str, megascale: bool) -> list[float]:
    with trainer(corpus, options, f"--load {folder}", megascale=megascale) as run:
        return losses(run, 2)


def same(first: Any, second: Any) -> bool:
    """Whether two objects of a checkpoint are equal."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and same_bits(first.reshape(-1), second.reshape(-1))
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(same(first[key], second[key]) for key in first)
        )
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return bool(np.array_equal(first, second))


def differences(first: Path, second: Path) -> list[str]:
    """What two checkpoints in Megatron's format do not have in common."""
    one, other = TorchDist(first), TorchDist(second)
    assert one.tensors
    found = sorted(one.tensors.keys() ^ other.tensors.keys()) + sorted(set(one.objects) ^ set(other.objects))
    for name in sorted(one.tensors.keys() & other.tensors.keys()):
        parts = (checkpoint.read(name, whole(checkpoint.shape(name))) for checkpoint in (one, other))
        found += [] if same_bits(*parts) else [name]
    for name in sorted(set(one.objects) & set(other.objects)):
        found += [] if same(one.object(name), other.object(name)) else [name]
    mine, theirs = common_of(first), common_of(second)
    found += sorted(mine.keys() ^ theirs.keys(), key=str)
    return found + [f"{key}: {mine[key]} {theirs[key]}" for key in mine if not same(mine[key], theirs.get(key))]


def common_of(path: Path) -> dict[str, Any]:
    """What is neither a tensor of the model nor an object of a rank; of the arguments only the position."""
    common: dict[str, Any] = load_plain((path / "common.pt").read_bytes(), "common.pt")
    return {**common, "args": common["args"].consumed_train_samples}


def convert(source: str, target: str, to: str) -> None:
    assert cli.main(["checkpoint", "convert", source, target, "--to", to, "--page-size", "64KiB"]) == 0


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, f"{GATED} {SPARSE}"),
        (2, f"{EXPERT_PARALLEL} --bf16"),
        (2, f"{GATED} --bf16 {DISTRIBUTED_OPTIMIZER}"),
        (2, f"{GATED} --pipeline-model-parallel-size 2 --moe-layer-freq [0,1]"),
    ],
    ids=["fp32", "ep2-bf16-biases", "dp2-bf16-distributed", "pp2-one-dense-layer"],
)
def test_what_a_run_would_have_saved(pools, corpus, tmp_path, world, options):
    paged, stock, to_stock, to_paged, back = (
        str(tmp_path / n) for n in ("paged", "stock", "to_stock", "to_paged", "back")
    )
    straight = pools[world].run(save_both, corpus=corpus, options=options, paged=paged, stock=stock)
    convert(paged, to_stock, "torch_dist")
    convert(stock, to_paged, "paged")
    convert(to_paged, back, "torch_dist")
    name = "iter_0000003"
    assert differences(Path(to_stock) / name, Path(stock) / name) == []
    assert differences(Path(back) / name, Path(stock) / name) == []
    for folder in (to_paged, to_stock):
        again = pools[world].run(go_on, corpus=corpus, options=options, folder=folder, megascale=True)
        assert again == straight, folder
    by_stock = pools[world].run(go_on, corpus=corpus, options=options, folder=to_stock, megascale=False)
    assert by_stock[0] == pytest.approx(straight[0], rel=1e-4 if "--bf16" in options else 1e-6)


def test_what_does_not_convert_is_named(pools, corpus, tmp_path, capsys):
    paged, stock = str(tmp_path / "paged"), str(tmp_path / "stock")
    pools[1].run(save_both, corpus=corpus, options=GATED, paged=paged, stock=stock)
    folder = tmp_path / "stock" / "iter_0000003"

    def refusal(*words: str) -> str:
        assert cli.main(["checkpoint", "convert", *words]) == 1
        text: str = capsys.readouterr().err
        return text

    assert "iter_0000003 exists; give another folder" in refusal(paged, stock, "--to", "torch_dist")
    assert "which a Hugging Face model has no place for" in refusal(paged, str(tmp_path / "hf"), "--to", "hf")
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:1000])
    assert "__0_0.distcp has 1000 bytes of" in refusal(stock, str(tmp_path / "x"), "--to", "paged")
    data.unlink()
    assert "__0_0.distcp is missing" in refusal(stock, str(tmp_path / "x"), "--to", "paged")
    data.write_bytes(bytes(len(content)))
    assert "__0_0.distcp, bytes" in refusal(stock, str(tmp_path / "x"), "--to", "paged")
    (folder / "common.pt").write_bytes(b"")
    assert "common.pt cannot be read: ValueError: Expected input to be a checkpoint returned by torch.save" in refusal(
        stock, str(tmp_path / "x"), "--to", "paged"
    )
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_metadata_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("code ran",)

    import pickle

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: UnpicklingError: builtins.print does not belong"):
        TorchDist(tmp_path)
