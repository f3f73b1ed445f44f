"""`pretrain_gpt.py` as Megatron-LM ships it: equal losses, clear errors, checkpoints that go round."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.comparison.megatron_lm import compare_scripts
from scripts.megatron_lm_runs.combinations import BASE, BUDGET, EP2, named
from scripts.megatron_lm_runs.comparing import compare
from scripts.megatron_lm_runs.matrix import SHORT, Relay, compared
from scripts.megatron_lm_runs.running import run

pytestmark = [pytest.mark.megatron_lm, pytest.mark.timeout(1500)]


COVERING = ("budget", "ep2-groups", "pp2-interleaved", "ep2xdp2-overlap", "pp2xep2-bf16-unclipped")
"""Of the combinations that `measure.py megatron-lm` runs; between them they go through most of the hooks."""


@pytest.mark.parametrize("name", COVERING)
def test_losses_are_those_of_stock(megatron_lm: Path, name: str) -> None:
    combination = named(name)
    sides = compare(megatron_lm, combination)
    assert len(sides.megascale.losses) == 20
    assert sides.stock.losses[-1] < sides.stock.losses[0], "it learns"
    assert sides.loss_difference <= 1e-5
    if combination.megascale == BUDGET:
        assert sides.megascale.scalars["megascale/pages/pages_loaded"][-1] > 0, "pages were away"


def test_a_checkpoint_goes_round_without_a_changed_bit(megatron_lm: Path, tmp_path: Path) -> None:
    relay = Relay(megatron_lm, form="distributed", folder=tmp_path, stations=SHORT)
    for station in compared(SHORT):
        assert relay.changed(station) == [], station.name


def test_without_the_flag_the_launcher_changes_nothing(megatron_lm: Path) -> None:
    script = megatron_lm / "pretrain_gpt.py"
    alone, launched = (run(script, BASE, ranks=1, launcher=by) for by in ("none", "megatron_ext"))  # type: ignore[arg-type]
    assert alone.status == launched.status == 0
    assert alone.losses
    for tag in ("lm loss", "grad-norm", "load_balancing_loss"):
        assert list(alone.scalars[tag]) == list(launched.scalars[tag]), tag
    assert not [tag for tag in launched.scalars if tag.startswith("megascale")]


def test_flags_are_in_the_argument_dump_and_metrics_in_tensorboard(megatron_lm: Path) -> None:
    flags = [*BASE, *EP2, "--train-iters", "2", "--megascale", "--megascale-dispatcher", "groups"]
    done = run(megatron_lm / "pretrain_gpt.py", flags, ranks=2)
    assert done.status == 0, done.error
    assert "megascale_dispatcher ............................ groups" in done.output
    assert done.scalars["megascale/experts/modules"] == [4.0, 4.0]
    assert done.scalars["megascale/groups/group_cache_hits"][-1] > 0


def test_the_comparison_of_one_run_is_made_and_drawn(megatron_lm: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    found = compare_scripts(megatron_lm, ranks=1, flags=(), own_flags=(), steps=1, picture=picture)
    assert found["max_relative_loss_difference"] == pytest.approx(0, abs=1e-5)
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--megascale", "--megascale-device-budgt", "50%"), "did you mean --megascale-device-budget"),
        (
            ("--megascale", "--use-distributed-optimizer", "--save", "x", "--save-interval", "9"),
            "--dist-ckpt-optim-fully-reshardable",
        ),
        (("--megascale", "--fp16"), "use --bf16"),
        (("--megascale", "--moe-latent-size", "32"), "latent experts are not paged"),
    ],
    ids=["misspelt", "layout", "fp16", "latent"],
)
def test_what_is_refused_is_named(megatron_lm: Path, flags: tuple[str, ...], said: str) -> None:
    done = run(megatron_lm / "pretrain_gpt.py", [*BASE, *flags], ranks=1, tensorboard=False, timeout_seconds=240)
    assert done.status != 0
    assert said in done.output


def test_grouped_experts_are_refused_where_stock_builds_them(megatron_lm: Path) -> None:
    """Without Transformer Engine main builds SequentialMLP whatever the flag says, and there is nothing to refuse."""
    flags = [*BASE, "--train-iters", "1", "--megascale", "--moe-grouped-gemm"]
    done = run(megatron_lm / "pretrain_gpt.py", flags, ranks=1, tensorboard=False, timeout_seconds=240)
    experts = (megatron_lm / "megatron/core/transformer/moe/experts.py").read_text(encoding="utf-8")
    if "\nclass GroupedMLP(" in experts:
        assert done.status != 0
        assert "--moe-grouped-gemm" in done.output
    else:
        assert done.status == 0, done.error


def test_a_checkpoint_in_place_of_its_folder_is_refused(megatron_lm: Path, tmp_path: Path) -> None:
    path = tmp_path / "iter_0000004"
    path.mkdir()
    (path / "metadata.json").touch()
    flags = [*BASE, "--megascale", "--load", str(path)]
    done = run(megatron_lm / "pretrain_gpt.py", flags, ranks=1, tensorboard=False, timeout_seconds=240)
    assert done.status != 0
    assert f"give --load {tmp_path} --ckpt-step 4" in done.output


def test_a_dense_model_is_refused_once_and_ends_all_ranks(megatron_lm: Path) -> None:
    words = list(BASE)
    start = words.index("--num-experts")
    dense = words[:start] + words[start + 2 :]
    done = run(
        megatron_lm / "pretrain_gpt.py", [*dense, "--megascale"], ranks=2, tensorboard=False, timeout_seconds=240
    )
    assert done.status != 0
    assert done.output.count("--megascale needs a mixture-of-experts model") == 1
