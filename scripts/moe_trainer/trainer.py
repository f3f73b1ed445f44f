"""The trainer: one model, its optimizer, its data and its place in the run.

The steps of a training iteration can be called apart (`forward_backward`, `optimizer_step`), so that two trainers can
be compared inside a step. What a trainer made is gone after `close()`; another one may follow in the same process.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.utils import get_attr_wrapped_model

import megatron_ext
from megatron_ext import cpu

from . import checkpointing, paged_checkpoints
from .batches import Batch, BatchSource
from .distributed import Distributed
from .errors import LocalUsageError, UsageError, without_places
from .model import build_model, transformer_config
from .norms import parameter_norm
from .optimizer import build_optimizer, build_scheduler
from .parameter_sync import ParameterSync
from .results import OptimizerResult, StepResult


class Trainer:
    """Builds and trains what `args` (from `parse_args`) describe. Every method is a collective of all ranks.

    Attributes:
        args: the checked arguments.
        config: stock's `TransformerConfig`.
        model: this rank's chunks, each in its data-parallel wrapper.
        optimizer, scheduler: stock's.
        iteration: completed iterations of the run.
        consumed_samples: training samples of all ranks so far; with the seed it says which come next.

    Raises:
        UsageError: data, checkpoint or settings do not fit; the same error on every rank.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.iteration = 0
        self.consumed_samples = 0
        self._checkpoints: paged_checkpoints.TrainerCheckpoints | None = None
        if not args.cuda:
            cpu.enable()
        self.distributed = Distributed(args)
        try:
            self.distributed.agree(self._read_data)
            self.config = transformer_config(args)
            self._build()
            self._connect()
            if args.load is not None:
                self.load()
        except BaseException as error:
            self._close_after(error)
            raise

    def _read_data(self) -> None:
        self.data = BatchSource(
            self.args,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            device=self.distributed.device,
        )

    def _build(self) -> None:
        """Build model, optimizer and schedule, by the plug-in's classes where it is asked for."""
        try:
            megatron_ext.enable_from_args(self.args, announce=False)  # the start record says it
            self.model = build_model(self.args, self.config, self.distributed.device)
            self.optimizer = build_optimizer(self.args, self.model)
            self.scheduler = build_scheduler(self.args, self.optimizer)
        except UsageError:
            raise
        except ValueError as error:
            raise LocalUsageError(str(without_places(error))) from error
        except AssertionError as error:
            raise LocalUsageError(f"megatron-core refuses these settings: {error}") from error

    def _connect(self) -> None:
        """Tell the schedules how to scale, synchronise and finish gradients, as stock's training loop does."""
        args, config, model = self.args, self.config, self.model
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

        def of_chunks(name: str) -> object:
            functions = [getattr(chunk, name) for chunk in model]
            return functions[0] if len(functions) == 1 else functions

        if args.overlap_grad_reduce:
            config.no_sync_func = of_chunks("no_sync")
            config.grad_sync_func = of_chunks("start_grad_sync")
        if args.overlap_param_gather and args.virtual_pipeline_model_parallel_size is not None:
            config.param_sync_func = of_chunks("start_param_sync")
        self._parameter_sync = ParameterSync(model, config, overlaps=args.overlap_param_gather)
        for chunk in model:
            chunk.train()

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes and prints."""
        return self.distributed.rank == 0

    # --- one iteration ----------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """Make one training iteration."""
        if self._checkpoints is not None:
            self._checkpoints.poll()
        start = time.perf_counter()
        learning_rate = self.learning_rate
        loss = self.forward_backward()
        result = self.optimizer_step()
        if self.args.save is not None and paged_checkpoints.is_wanted(self.args):
            self._paged(self.args.save).record(loss, learning_rate)
        norm = self._parameter_norm() if self.args.log_params_norm else None
        if self.args.cuda:
            torch.cuda.synchronize()
        return StepResult(
            iteration=self.iteration,
            loss=loss,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
            params_norm=norm,
            learning_rate=learning_rate,
            skipped=not result.successful,
            step_seconds=time.perf_counter() - start,
            tokens=self.args.global_batch_size * self.args.seq_length,
            clip=self._clip_record(),
        )

    def _clip_record(self) -> dict[str, object] | None:
        clipping = getattr(self.optimizer, "clipping", None)
        if clipping is None:
            return None
        found = {"skipped_steps": clipping.skipped_steps}
        return found if clipping.report is None else clipping.report.as_record()

    def forward_backward(self) -> float:
        """Clear gradients, run every micro-batch of the next batch forwards and backwards, and reduce the gradients.

        Returns:
            The batch's mean loss a token, the same on every rank. Consumes no samples: called again, it takes the same.
        """
        get_rerun_state_machine().current_iteration = self.iteration + 1  # stock's checks report it
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._run(lambda: self.data.training(self.consumed_samples), forward_only=False)

    def optimizer_step(self) -> OptimizerResult:
        """Clip, step, advance schedule, iteration and data."""
        successful, grad_norm, num_zeros = self.optimizer.step()
        successful, grad_norm, num_zeros = self._agree_on_step(successful, grad_norm, num_zeros)
        self.consumed_samples += self.args.global_batch_size
        self.iteration += 1
        if successful:
            self.scheduler.step(increment=self.args.global_batch_size)
        self._parameter_sync.resume()
        return OptimizerResult(successful, grad_norm, num_zeros)

    def _parameter_norm(self) -> float:
        with self._parameter_sync.all_here():
            return parameter_norm(self.model)

    def _agree_on_step(
        self, successful: bool, grad_norm: float | None, num_zeros: float | None
    ) -> tuple[bool, float | None, float | None]:
        """As stock: a stage without trainable parameters learns what the others found."""
        missing = -1.0
        values = torch.tensor(
            [
                -float(successful),
                missing if grad_norm is None else float(grad_norm),
                missing if num_zeros is None else float(num_zeros),
            ],
            dtype=torch.float64,
            device=self.distributed.device,
        )
        torch.distributed.all_reduce(
            values, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_model_parallel_group()
        )
        failed, norm, zeros = values.tolist()
        return failed == -1.0, None if norm == missing else norm, None if zeros == missing else zeros

    @property
    def learning_rate(self) -> float:
        """The rate of the optimizer's default groups."""
        rates = [group["lr"] for group in self.optimizer.param_groups if group.get("default_config", True)]
        return float(rates[0])

    # --- validation -------------------------------------------------------------------------------

    def evaluate(self, iterations: int | None = None) -> float:
        """Return the mean loss a token over the first `iterations` (default `--eval-iters`) validation batches.

        Every call sees the same samples, so that its results can be compared. Leaves the training data's position, the
        random numbers and the experts' statistics alone.

        Raises:
            UsageError: no validation data (no `--eval-interval`).
        """
        iterations = self.args.eval_iters if iterations is None else iterations
        for chunk in self.model:
            chunk.eval()
        try:
            with torch.no_grad(), self._parameter_sync.all_here():
                losses = [
                    self._run(partial(self.data.validation, index), forward_only=True) for index in range(iterations)
                ]
        finally:
            for chunk in self.model:
                chunk.train()
        return sum(losses) / len(losses)

    # --- forwards and backwards -------------------------------------------------------------------

    def _run(self, batches: Callable[[], Iterator[Batch]], *, forward_only: bool) -> float:
        args = self.args
        reports = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            # Each virtual stage reads the same batches on its own.
            data_iterator=[batches() for _ in self.model] if len(self.model) > 1 else batches(),
            model=self.model,
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.seq_length,
            forward_only=forward_only,
        )
        return self._mean_loss(reports)

    def _forward_step(
        self, data_iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], object]]:
        batch = next(data_iterator)
        stage = get_attr_wrapped_model(model, "vp_stage")
        where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
        labels = batch.labels if parallel_state.is_pipeline_last_stage(**where) else None
        output = model(batch.tokens, batch.position_ids, self.data.attention_mask(), labels=labels)
        return output, partial(self._loss, batch.loss_mask)

    def _loss(
        self, loss_mask: torch.Tensor, losses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Sum the losses [b, L] of a micro-batch; the schedule divides by the tokens, of the micro-batch or of all."""
        mask = loss_mask.reshape(-1).float()
        loss = torch.sum(losses.view(-1).float() * mask)
        tokens = mask.sum().detach().clone().to(torch.int)
        if self.args.check_for_nan_in_loss_and_grad:
            check = get_rerun_state_machine().validate_result
            for reject, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
                check(result=loss, rejection_func=reject, message=f"found {name} in local forward loss calculation")
        report = torch.cat([loss.detach().clone().view(1), tokens.float().view(1)])
        return loss, tokens, {"lm loss": report}

    def _mean_loss(self, reports: list[dict[str, torch.Tensor]]) -> float:
        """Average over micro-batches and data-parallel ranks, and tell every pipeline stage."""
        total = torch.zeros(2, dtype=torch.float32, device=self.distributed.device)
        if reports:
            total = torch.vstack([report["lm loss"] for report in reports]).sum(dim=0)
            torch.distributed.all_reduce(
                total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            torch.distributed.broadcast(
                total,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return float(total[0] / total[1])

    # --- checkpoints, end -------------------------------------------------------------------------

    def save(self) -> str:
        """Write a checkpoint of this iteration under `--save`. Returns its folder."""
        if self.args.save is None:
            raise UsageError("there is nowhere to save: give --save FOLDER")
        with self._parameter_sync.all_here():
            if paged_checkpoints.is_wanted(self.args):
                return self._paged(self.args.save).save()
            return checkpointing.save(self, self.args.save)

    def load(self) -> None:
        """Continue from the checkpoint under `--load`, if there is one. Raises UsageError if it is of another shape."""
        if self.args.load is None:
            raise UsageError("there is nothing to load: give --load FOLDER")
        if not paged_checkpoints.is_there(self.args.load):
            checkpointing.load(self, self.args.load)
            return
        checkpoints = self._paged(self.args.load)
        checkpoints.load()
        if self.args.save != self.args.load:
            checkpoints.close()
            self._checkpoints = None

    def _paged(self, folder: str) -> paged_checkpoints.TrainerCheckpoints:
        if self._checkpoints is None:
            self._checkpoints = paged_checkpoints.TrainerCheckpoints(self, folder)
        return self._checkpoints

    def finish_saves(self) -> None:
        """Wait for a save that goes on beside training."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def close(self) -> None:
        """Take down what this trainer made: model, optimizer, plug-in, Megatron's groups. CPU patches stay in force."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        for chunk in self.__dict__.get("model", []):
            # Parts of model and optimizer keep tensors, whose graph keeps the wrapper's hooks, and the wrapper would
            # keep them: a cycle through autograd that no collector sees, with all process groups and threads in it.
            vars(chunk).clear()
        for name in ("model", "optimizer", "scheduler", "config", "data", "_parameter_sync"):
            self.__dict__.pop(name, None)
        megatron_ext.disable()
        get_moe_layer_wise_logging_tracker().clear()
        if hasattr(self, "distributed"):
            self.distributed.close()
            del self.distributed
        gc.collect()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_after(error)

    def _close_after(self, error: BaseException | None) -> None:
        """Close, unless an error struck this rank while others may be in a collective: closing would wait for it."""
        on_every_rank = error is None or (isinstance(error, UsageError) and not isinstance(error, LocalUsageError))
        if on_every_rank or self.distributed.world_size == 1:
            self.close()
