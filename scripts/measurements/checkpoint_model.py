"""Paged experts alone, with an optimizer, large enough that their bytes can be measured."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveRequest, writes_announced
from megascale_omni.checkpoint.pages import ExpertsPiece
from megascale_omni.experts.activation import Activation
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.products import BlasProducts
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.workspace import Workspace
from megascale_omni.optimizer.arithmetic import TorchAdamW
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane

EXPERTS = 40
SHAPE = ExpertShape(hidden=512, ffn=1024, gated=False, bias=False)


class ExpertsAlone:
    """40 experts of one million parameters: weights and two moments are 480 MiB."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        self.manager = ExpertManager(device=device)
        workspace = Workspace(device)
        dtypes = dict.fromkeys((Plane.WEIGHT, Plane.GRADIENT, Plane.MOMENT1, Plane.MOMENT2), torch.float32)
        self.experts = PagedExperts(
            manager=self.manager,
            path="experts",
            layout=PageLayout.for_page_bytes(SHAPE, page_bytes=1 << 20, dtype=torch.float32),
            num_experts=EXPERTS,
            dtypes=dtypes,
            activation=Activation("gelu", gated=False),
            style="sequential",
            products=BlasProducts(workspace),
            workspace=workspace,
        )
        torch.manual_seed(1)
        for expert in range(EXPERTS):
            names = dict.fromkeys(item.tensor for item in self.experts.names.of_expert(expert))
            self.experts.initialise(expert, {t.name: torch.randn(t.shape) * 0.02 for t in names})
        group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "params": []}
        self.adam = PagedAdam(
            [(self.experts, GroupBinding(0, None))], groups=[group], arithmetic=TorchAdamW(), shards=PageShards()
        )

    @property
    def state(self) -> RankState:
        """What a checkpoint is made of."""
        return RankState([], [ExpertsPiece("experts", self.experts, 0, EXPERTS, PageShards())], self.adam)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and moments."""
        return 3 * 4 * EXPERTS * SHAPE.num_parameters

    def step(self, experts: list[int]) -> None:
        """A step in which these experts have gradients."""
        ids = self.manager.create(self.experts.pages, Plane.GRADIENT, experts)
        for page_id in ids.tolist():
            key = self.manager.key(page_id)
            with self.experts.lease(Plane.GRADIENT, [(key.expert, key.slice)]) as lease:
                lease.mark_dirty()
                lease.page(key.expert, key.slice).normal_()
        self.adam.step()
        self.manager.drop(ids)


def increment_ratio(folder: Path) -> float:
    """R5: bytes of a checkpoint after a tenth of the pages changed, divided by those of the full one before."""
    model, checkpoints = ExpertsAlone(), Checkpointer(folder)
    model.step(list(range(EXPERTS)))
    checkpoints.save(model.state, SaveRequest(tag="full", step=1))
    model.step(list(range(EXPERTS // 10)))
    checkpoints.save(model.state, SaveRequest(tag="increment", step=2, full=False))
    full, increment = (
        sum(path.stat().st_size for path in (folder / tag).rglob("*") if path.is_file())
        for tag in ("full", "increment")
    )
    return increment / full


def memory_ratio(folder: Path) -> float:
    """R6: growth of the process's peak memory while a save goes on beside a step, divided by the bytes saved."""
    model = ExpertsAlone()
    checkpoints = Checkpointer(folder, staging_bytes=8 << 20)
    for _ in range(3):
        model.step(list(range(EXPERTS)))
    before = peak_of(lambda: model.step(list(range(EXPERTS))))
    with writes_announced(checkpoints, model.state.experts):

        def saved() -> None:
            problem = checkpoints.save_beside(model.state, SaveRequest(tag="t", step=4))
            model.step(list(range(EXPERTS)))
            problem = problem or checkpoints.finish()
            if problem is not None:
                raise RuntimeError(problem)

        during = peak_of(saved)
    checkpoints.close()
    return max(0, during - before) / model.nbytes


def peak_of(work: object) -> int:
    """Peak resident bytes of this process during ``work``."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    assert callable(work)
    work()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
