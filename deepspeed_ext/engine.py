"""MegaScaleEngine: stock's DeepSpeed engine for a model whose experts are in pages.

Experts move into pages before stock's constructor sees the model, so that ZeRO partitions, broadcasts and steps the
rest only. At a step the engine first reduces the pages' gradients, then lets stock step (see
:mod:`deepspeed_ext.norms`), then steps the pages with what stock used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_ext import checkpoint, fp32, support
from deepspeed_ext.clipping import ModuleClipping, monitor_events
from deepspeed_ext.config import section_of
from deepspeed_ext.experts import DeepSpeedExperts
from deepspeed_ext.norms import SharedNorm
from deepspeed_ext.planning import planned
from deepspeed_ext.stepping import ExpertsStep, drops_gradients
from megascale_omni.checkpoint.pages_file import has_pages
from megascale_omni.clipping import ClipReport
from megascale_omni.experts.overview import announce
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
        start = planned(model, section, config, optimizer=optimizer, model_parameters=model_parameters)
        start.carry_out()
        self.run = start.run
        self.modules_in_pages: list[DeepSpeedExperts] = start.modules
        self._built, self._places = start.built, start.places
        self.experts_step: ExpertsStep | None = None
        self._in_step = False
        self._unpublished: Path | None = None
        """A checkpoint (the folder of its tag) whose pages have no name yet."""
        self._forwards = 0
        """In training, since the last step: several may be in one loss."""
        try:
            super().__init__(
                args,
                model,
                optimizer=start.optimizer,
                model_parameters=start.model_parameters,
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
        except Exception as error:
            error.add_note("The model's experts are in pages by now: build it anew for another deepspeed.initialize.")
            raise
        if self.global_rank == 0:
            announce([self.module], rank=0, world=self.world_size)

    def _configure_distributed_model(self, model: torch.nn.Module) -> None:
        """As stock; what is left of DeepSpeed's own MoE layers has no experts that it would have to treat apart."""
        super()._configure_distributed_model(model)
        self.has_moe_layers = False

    # -- optimizer
    # ------------------------------------------------------------------------------------------------------

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:  # noqa: ANN401
        super()._configure_optimizer(client_optimizer, model_parameters)
        self._places.fill(self._built, self.basic_optimizer.param_groups)
        self.experts_step = ExpertsStep(
            self.run,
            self.modules_in_pages,
            optimizer=self.optimizer,
            basic=self.basic_optimizer,
            places=self._places,
            sharded=self.zero_optimization_stage() > 0,
            max_norm=float(self.gradient_clipping() or 0.0),
            average=bool(self.gradient_average),
            model=self.module,
            backwards=self._backwards_of_a_step,
        )
        self._let_zero_grad_drop_pages()

    def _backwards_of_a_step(self) -> int | None:
        """Of a module: one for each forward of the step, known in its last micro-batch.

        Before that, and where the caller says when a step comes, nobody knows.
        """
        known = self.managed_gradient_accumulation() and self.is_gradient_accumulation_boundary()
        return self._forwards if known else None

    def _let_zero_grad_drop_pages(self) -> None:
        """The optimizer's ``zero_grad`` makes gradient pages absent too."""
        stock_zero_grad = self.optimizer.zero_grad

        def zero_grad(_: object, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - stock's signature
            stock_zero_grad(*args, **kwargs)
            self._drop_pages_as_stock(of_optimizer=True)

        self.optimizer.zero_grad = MethodType(zero_grad, self.optimizer)

    def _drop_pages_as_stock(self, *, of_optimizer: bool) -> None:
        """Gradient pages become absent where the caller's ``zero_grad`` has dropped stock's gradients."""
        if self.experts_step is None or self._in_step:
            return
        boundary = bool(self.is_gradient_accumulation_boundary())
        if drops_gradients(int(self.zero_optimization_stage()), of_optimizer=of_optimizer, boundary=boundary):
            self.experts_step.gradients.drop()

    def clip_fp32_gradients(self) -> None:
        """As stock, over both parts (a plain torch optimizer, ZeRO 0)."""
        assert self.experts_step is not None
        if isinstance(self.experts_step.norm, SharedNorm):
            self.experts_step.norm.clip_plain(list(self.module.parameters()))

    @property
    def clip_report(self) -> ClipReport | None:
        """What clipping by module found and did at the last step; None without it. The same on every rank."""
        step = self.experts_step
        return None if step is None or step.clipping is None else step.clipping.report

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:  # noqa: ANN401
        """As stock; where gradients are clipped by module, alpha is fitted to the losses."""
        step = self.experts_step
        if step is not None and isinstance(step.clipping, ModuleClipping):
            step.clipping.clipper.report_loss(loss.detach())
        return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

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
                step.run.manager.schedule.end_step()
            step.gradients.drop()
        self._forwards = 0
        if self.clip_report is not None and self.monitor.enabled and self.global_rank == 0:
            self.monitor.write_events(monitor_events(self.clip_report, self.global_samples))

    def zero_grad(self) -> None:
        """As stock; gradient pages become absent where stock's gradients do."""
        super().zero_grad()
        self._drop_pages_as_stock(of_optimizer=False)

    # -- schedule
    # -------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's signature
        """Stock's forward, announced to the schedule."""
        schedule = self.run.manager.schedule
        phase = Phase.FORWARD if self.module.training and torch.is_grad_enabled() else Phase.EVAL
        if phase is Phase.FORWARD and schedule.moment.step <= self.global_steps:
            schedule.begin_step(self.global_steps + 1)
        self._forwards += phase is Phase.FORWARD
        micro_batch = self.micro_steps % self.gradient_accumulation_steps()
        with schedule.enter(phase, micro_batch=micro_batch):
            return super().forward(*inputs, **kwargs)

    # -- checkpoints
    # ----------------------------------------------------------------------------------------------------

    def _configure_checkpointing(self) -> None:
        """As stock; pages get their name when everything of a checkpoint is written, before ``latest`` tells of it."""
        super()._configure_checkpointing()
        commit = self.checkpoint_engine.commit

        def committed(info: Any) -> Any:  # noqa: ANN401 - stock's own
            result = commit(info)
            if self._unpublished is not None:
                checkpoint.publish(self._unpublished)
                self._unpublished = None
            return result

        self.checkpoint_engine.commit = committed

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
        self._unpublished = Path(save_dir) / tag
        try:
            with checkpoint.hidden(self.run):
                saved: bool = super().save_checkpoint(
                    save_dir, tag, client_state, save_latest, exclude_frozen_parameters
                )
        except BaseException:
            self._unpublished = None
            raise
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
            ValueError: a checkpoint of another model or ZeRO stage, without pages, or with damaged ones.
        """
        if self.load_universal_checkpoint():
            raise ValueError("universal checkpoints are not supported with megascale; load the checkpoint itself")
        tag = checkpoint.tag_of(Path(load_dir), tag)
        folder = None if tag is None else Path(load_dir) / tag
        if folder is not None:
            stage = int(self.zero_optimization_stage()) or int(hasattr(self.optimizer, "dp_process_group"))
            steps = self.experts_step is not None and not load_module_only and (stage > 0 or load_optimizer_states)
            checkpoint.check(folder, paged=bool(self.modules_in_pages), stage=stage, module_only=not steps)
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
        if path is not None and folder is not None and has_pages(folder):
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
            tensors = experts.gathered()
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
