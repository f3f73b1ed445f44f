"""Stock's optimizer and schedule of learning rate and weight decay, from the arguments."""

import argparse
import dataclasses

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Build stock's optimizer configuration: every field of its name from `args`."""
    fields = {field.name for field in dataclasses.fields(core_optimizer.AdamOptimizerConfig)}
    values = {name: value for name, value in vars(args).items() if name in fields}
    return core_optimizer.AdamOptimizerConfig(**values, params_dtype=torch.bfloat16 if args.bf16 else torch.float32)


def build_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Build the optimizer. `get_megatron_optimizer` is looked up here, at the call: the plug-in replaces that name."""
    config = optimizer_config(args)
    return core_optimizer.get_megatron_optimizer(
        config,
        model,
        config_overrides=core_optimizer.get_standard_config_overrides(config),
        use_gloo_process_groups=args.distributed_backend == "nccl",
    )


def build_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the schedule, which counts samples."""
    batch = args.global_batch_size
    decay = args.lr_decay_iters * batch
    warmup = args.lr_warmup_iters * batch if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if args.lr_wsd_decay_iters is None else args.lr_wsd_decay_iters * batch,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
