"""A model and a torch optimizer without a framework: saved, loaded, and going on as if nothing had happened."""

import random

import numpy as np
import pytest
import safetensors.torch
import torch

from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveRequest
from megascale_omni.checkpoint.plain import Training, load_checkpoint, save_checkpoint
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import TorchAdamW
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import HIDDEN, small_experts


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        self.experts = small_experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.nn.functional.dropout(self.linear(x), 0.1))
        result: torch.Tensor = self.experts(y, (3, 0, 5, 0))
        return result.square().mean()


def training(seed: int) -> Training:
    model = Model(seed)
    for plane in (Plane.MOMENT1, Plane.MOMENT2):
        model.experts.manager.set_plane_dtype(model.experts.pages, plane, torch.float32)
    group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "params": []}
    adam = PagedAdam(
        [(model.experts, GroupBinding(0, None))], groups=[group], arithmetic=TorchAdamW(), shards=PageShards()
    )
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), adam)


def steps(run: Training, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        noise = random.random() + float(np.random.rand())
        loss = run.model(torch.randn(8, HIDDEN) * (1 + noise))
        assert run.optimizer is not None
        assert run.adam is not None
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        run.adam.step()
        experts = run.model.experts
        assert isinstance(experts, PagedExperts)
        present = experts.manager.present(experts.pages, Plane.GRADIENT)
        names = [(int(e), int(s)) for e, s in np.argwhere(present)]
        experts.manager.drop(experts.page_ids(Plane.GRADIENT, names))
        losses.append(loss.item())
    return losses


def test_it_goes_on_as_if_nothing_had_happened(tmp_path):
    run = training(1)
    steps(run, 3)
    folder = save_checkpoint(tmp_path, "t3", run, step=3, values={"position": 17})
    expected = steps(run, 4)
    resumed = training(2)
    steps(resumed, 1)
    assert load_checkpoint(tmp_path, resumed) == (3, {"position": 17})
    assert steps(resumed, 4) == expected
    for name in ("dense", "experts"):
        number = 1 if name == "dense" else 2
        path = folder / f"mpu_{number:03d}_{name}_state" / "00000.safetensors"
        assert safetensors.torch.load_file(path), "the safetensors package reads our files"


def test_weights_alone(tmp_path):
    run = training(1)
    steps(run, 3)
    save_checkpoint(tmp_path, "w", run, step=3, include_optimizer=False, include_rng_state=False)
    other = training(2)
    with pytest.raises(ValueError, match="has no optimizer state: load it with include_optimizer=False"):
        load_checkpoint(tmp_path, other)
    assert load_checkpoint(tmp_path, other, include_optimizer=False) == (3, {})
    mine, theirs = run.model.state_dict(), other.model.state_dict()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def test_there_may_be_none(tmp_path):
    assert load_checkpoint(tmp_path, training(1)) is None


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path):
    Checkpointer(tmp_path).save(RankState([]), SaveRequest(tag="t", step=1, values={"run": {}, "optimizer": True}))
    with pytest.raises(ValueError, match=r"t was not saved by save_checkpoint: it has no groups .saved with mega"):
        load_checkpoint(tmp_path, training(1))


def test_a_key_that_matches_nothing_is_an_error(tmp_path):
    run = training(1)
    steps(run, 1)
    save_checkpoint(tmp_path, "t", run, step=1)
    other = training(2)
    other.model.linear = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"has model.linear.bias, which matches nothing in this run"):
        load_checkpoint(tmp_path, Training(other.model, None, other.adam))


def test_an_optimizer_key_that_matches_nothing_is_an_error(tmp_path):
    run = training(1)
    steps(run, 1)
    assert run.optimizer is not None
    save_checkpoint(tmp_path, "t", run, step=1)
    other = training(2)
    with pytest.raises(ValueError, match=r"has optimizer\.exp_avg\.linear\.\w+, which matches nothing in this run"):
        load_checkpoint(tmp_path, Training(other.model, None, other.adam))
