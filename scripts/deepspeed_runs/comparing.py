"""Stock DeepSpeed and the megascale section in turn on the same model: the plan of a comparison."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from scripts.comparison.result import MEGASCALE, STOCK, paged_name
from scripts.comparison.runner import Plan
from scripts.deepspeed_runs.finetuning import Job, without_section

TARGET = "scripts.deepspeed_runs.finetuning:FinetuningRun"
OFFLOADED = "stock, optimizer on the CPU"


@dataclass(frozen=True)
class DeepSpeedPlan(Plan):
    """What to run: ``job`` is megascale's; stock has the same without the section, ``--cpu-offload`` one more run."""

    job: Job | None = None
    cpu_offload: bool = False

    @property
    def target(self) -> str:
        """The class that runs."""
        return TARGET

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs."""
        return (STOCK, MEGASCALE, *map(paged_name, self.budgets), *([OFFLOADED] if self.cpu_offload else []))

    def arguments_of(self, name: str) -> dict[str, object]:
        """What the class is made with."""
        assert self.job is not None
        job, config = self.job, copy.deepcopy(dict(self.job.config))
        if name in (STOCK, OFFLOADED):
            config = without_section(config)
            if name == OFFLOADED:
                config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            job = replace(job, streamed=False)
        for budget in self.budgets:
            if name == paged_name(budget):
                config["megascale"] |= {"device_budget": budget, "disk_path": str(self.disk_path)}
        return {"job": replace(job, config=config)}
