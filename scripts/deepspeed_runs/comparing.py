"""Stock DeepSpeed and the megascale section in turn on the same model: the plan of a comparison."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from scripts.comparison.result import MEGASCALE, STOCK, paged_name
from scripts.comparison.runner import Plan
from scripts.deepspeed_runs.finetuning import Job, largest_parameter, without_section

TARGET = "scripts.deepspeed_runs.finetuning:FinetuningRun"
OFFLOADED = "stock, optimizer on the CPU"
NVME = "stock, ZeRO 3 on NVMe"


def on_nvme(config: dict[str, Any], folder: str, *, largest: int) -> dict[str, Any]:
    """The configuration with ZeRO 3, parameters and optimizer in files below ``folder``.

    ``largest``: elements of the largest parameter, which must fit into a buffer.
    """
    there = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    zero = {
        "stage": 3,
        "offload_param": {**there, "buffer_count": 8, "buffer_size": largest},
        "offload_optimizer": {**there, "buffer_count": 4},
        "sub_group_size": largest,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    return {**config, "zero_optimization": zero, "aio": {"block_size": 1 << 20, "queue_depth": 8}}


@dataclass(frozen=True)
class DeepSpeedPlan(Plan):
    """What to run: ``job`` is megascale's; stock has the same without the section, and one more run for each of
    DeepSpeed's own ways that is asked for.
    """

    job: Job | None = None
    cpu_offload: bool = False
    nvme_offload: bool = False

    @property
    def target(self) -> str:
        """The class that runs."""
        return TARGET

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs."""
        others = [name for name, wanted in ((OFFLOADED, self.cpu_offload), (NVME, self.nvme_offload)) if wanted]
        return (STOCK, MEGASCALE, *map(paged_name, self.budgets), *others)

    def arguments_of(self, name: str) -> dict[str, object]:
        """What the class is made with."""
        assert self.job is not None
        job, config = self.job, copy.deepcopy(dict(self.job.config))
        if name in (STOCK, OFFLOADED, NVME):
            config = without_section(config)
            if name == OFFLOADED:
                config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            elif name == NVME:
                config = on_nvme(config, str(self.disk_path), largest=largest_parameter(job))
            job = replace(job, streamed=False)
        for budget in self.budgets:
            if name == paged_name(budget):
                config["megascale"] |= {"device_budget": budget, "disk_path": str(self.disk_path)}
        return {"job": replace(job, config=config)}
