"""MegaScaleEngine: stock's DeepSpeed engine for a model whose experts are in pages.

Experts move into pages before stock's constructor sees the model, so that ZeRO partitions, broadcasts and steps the
rest only. At a step the engine first reduces the pages' gradients, then lets stock step (see
:mod:`deepspeed_ext.norms`), then steps the pages with what stock used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_ext import checkpoint, fp32, support
from deepspeed_ext.config import Section, section_of
from deepspeed_ext.convert import Dtypes, Moved, page_hf_experts
from deepspeed_ext.experts import DeepSpeedExperts, whole
from deepspeed_ext.parameters import Places, everything_in_group_0, take_out_of, watched, without_experts
from deepspeed_ext.run import Ranks, Run
from deepspeed_ext.stepping import ExpertsStep
from megascale_omni.schedule import Phase


class MegaScaleEngine(DeepSpeedEngine):  # type: ignore[misc]
    """See the module. Made instead of a ``DeepSpeedEngine`` where the configuration has an enabled section."""

    def __init__(
        self,
        args: Any,  # noqa: ANN401 - stock's signature
        model: torch.nn.Module,
        optimizer: Any = None,  # noqa: ANN401
        model_parameters: Iterable[Any] | None = None,
        training_data: Any = None,  # noqa: ANN401
        lr_scheduler: Any = None,  # noqa: ANN401
        mpu: Any = None,  # noqa: ANN401
        dist_init_required: bool | None = None,
        collate_fn: Any = None,  # noqa: ANN401
        config: Any = None,  # noqa: ANN401
        config_class: Any = None,  # noqa: ANN401
        mesh_device: Any = None,  # noqa: ANN401
        dont_change_device: bool = False,
    ) -> None:
        section = section_of(config)
        assert section is not None
        support.check(config, mpu=mpu)
        # A generator of parameters would find no experts when they have moved.
        model_parameters = None if model_parameters is None else list(model_parameters)
        run = _run(section)
        moved = _move(model, run, config_class)
        self.run = run
        self.modules_in_pages: list[DeepSpeedExperts] = moved.modules
        self.experts_step: ExpertsStep | None = None
        self._places, optimizer, model_parameters = _remapped(moved, optimizer, model_parameters)
        self._in_step = False
        moved.gone.clear()
        super().__init__(
            args,
            model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            config_class=config_class,
            mesh_device=mesh_device,
            dont_change_device=dont_change_device,
        )
        if self.experts_step is None:  # inference only
            run.check_budget()

    # -- optimizer
    # ------------------------------------------------------------------------------------------------------

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:  # noqa: ANN401
        super()._configure_optimizer(client_optimizer, model_parameters)
        self.experts_step = ExpertsStep(
            self.run,
            self.modules_in_pages,
            optimizer=self.optimizer,
            basic=self.basic_optimizer,
            places=self._places,
            sharded=self.zero_optimization_stage() > 0,
            max_norm=float(self.gradient_clipping() or 0.0),
            average=bool(self.gradient_average),
        )

    def clip_fp32_gradients(self) -> None:
        """As stock, over both parts (a plain torch optimizer, ZeRO 0)."""
        assert self.experts_step is not None
        self.experts_step.norm.clip_plain(list(self.module.parameters()))

    def _take_model_step(self, lr_kwargs: Any) -> None:  # noqa: ANN401
        step = self.experts_step
        if step is None:
            super()._take_model_step(lr_kwargs)
            return
        with self.run.manager.schedule.enter(Phase.STEP):
            step.reduce()
            step.note_hyperparameters()
            self._in_step = True
            try:
                super()._take_model_step(lr_kwargs)
            finally:
                self._in_step = False
            if step.norm.total is not None:
                self._global_grad_norm = step.norm.total
            if self._step_applied:
                step.apply()
            step.gradients.drop()

    def zero_grad(self) -> None:
        """As stock; gradient pages become absent."""
        super().zero_grad()
        if self.experts_step is not None and not self._in_step:
            self.experts_step.gradients.drop()

    # -- schedule
    # -------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's signature
        """Stock's forward, announced to the schedule."""
        schedule = self.run.manager.schedule
        phase = Phase.FORWARD if self.module.training and torch.is_grad_enabled() else Phase.EVAL
        if phase is Phase.FORWARD and schedule.moment.step <= self.global_steps:
            schedule.begin_step(self.global_steps + 1)
        micro_batch = self.micro_steps % self.gradient_accumulation_steps()
        with schedule.enter(phase, micro_batch=micro_batch):
            return super().forward(*inputs, **kwargs)

    # -- checkpoints
    # ----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] = {},  # noqa: B006 - stock's signature
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As stock; pages lie in a folder of their own below the tag."""
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        checkpoint.save(Path(save_dir) / tag, self.run, self.modules_in_pages, self.experts_step)
        with checkpoint.hidden(self.run):  # stock's `latest` is written when everything else is there
            saved: bool = super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return saved

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,  # noqa: ANN401
    ) -> tuple[str | None, Any]:
        """As stock, pages included.

        Raises:
            ValueError: a checkpoint of another model, without pages, or with damaged ones.
        """
        if self.load_universal_checkpoint():
            raise ValueError("universal checkpoints are not supported with megascale; load the checkpoint itself")
        tag = checkpoint.tag_of(Path(load_dir), tag)
        folder = None if tag is None else Path(load_dir) / tag
        if folder is not None and not checkpoint.has_pages(folder):
            raise ValueError(
                f"{folder} was saved without megascale: DeepSpeed's files have the experts in a layout that only stock "
                "reads; load it in stock, save_pretrained() the model, and start from that"
            )
        with checkpoint.hidden(self.run):
            path, client_state = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        if path is not None and folder is not None:
            states = load_optimizer_states and not load_module_only
            checkpoint.load(folder, self.modules_in_pages, self.experts_step, optimizer_states=states)
            if not load_module_only:
                self.run.manager.schedule.resume_at(self.global_steps)
        return path, client_state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:  # noqa: ANN401
        """As stock, experts included. A collective; None on other ranks than the first."""
        state = super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        for experts in self.modules_in_pages:
            if exclude_frozen_parameters and not experts.trainable:
                continue
            tensors = whole(experts)
            if state is not None:
                state.update({f"{experts.path}.{name}": tensor.cpu() for name, tensor in tensors.items()})
        return state

    def _copy_recovery_script(self, save_path: str) -> None:
        """Scripts beside the checkpoint that know pages; stock's would leave the experts out."""
        fp32.write_recovery_script(Path(save_path))

    def destroy(self) -> None:
        """As stock; io threads end and the scratch file is gone."""
        super().destroy()
        self.run.close()


def _run(section: Section) -> Run:
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    return Run.create(section, device=device, ranks=_ranks(section.expert_parallel_size))


def _ranks(size: int) -> Ranks:
    """The groups of this rank, made by DeepSpeed as it makes them for its own expert parallelism. A collective.

    Raises:
        ValueError: a number of ranks that does not divide the job's.
    """
    from deepspeed.utils import groups

    world = dist.get_world_size()
    if world % size:
        raise ValueError(
            f"megascale.expert_parallel_size={size} does not divide the {world} ranks of this job; choose a divisor"
        )
    if size == 1:
        return Ranks(data=groups._get_data_parallel_group())

    name = f"ep_size_{size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    return Ranks(parallel=groups._get_expert_parallel_group(name), data=groups._get_expert_data_parallel_group(name))


def _move(model: torch.nn.Module, run: Run, config_class: Any) -> Moved:  # noqa: ANN401
    bf16 = bool(config_class.bfloat16_config.enabled)
    accumulated = config_class.grad_accum_dtype
    names = {"fp32": torch.float32, "bf16": torch.bfloat16}
    gradients = None if accumulated is None else names[accumulated]
    moved = page_hf_experts(model, run, Dtypes(torch.bfloat16 if bf16 else None, gradients))
    if not moved.modules:
        raise ValueError(
            "the megascale section is enabled and the model has no experts that can be paged: it needs Hugging Face "
            'experts modules; set "enabled": false for a dense model'
        )
    return moved


def _remapped(
    moved: Moved,
    optimizer: Any,  # noqa: ANN401
    model_parameters: list[Any] | None,
) -> tuple[Places, Any, list[Any] | None]:
    """Places of the experts, and what the client gave without them."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return take_out_of(optimizer, moved), optimizer, model_parameters
    made = None if optimizer is None else watched(optimizer)
    if model_parameters is None:
        return everything_in_group_0(moved), made, None
    remaining, places = without_experts(model_parameters, moved)
    return places, made, remaining
