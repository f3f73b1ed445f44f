"""What Megatron-LM derives from other arguments, and the checks that save a long start."""

import argparse
import importlib.util
import math
import os
from pathlib import Path

from .errors import UsageError

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "train_iters",
    "lr",
    "data_path",
)


def fill_in_and_check(args: argparse.Namespace, *, world_size: int) -> None:
    """Complete `args` in place. Raises UsageError for the first thing that does not fit."""
    args.world_size = world_size
    missing = [name for name in _REQUIRED if getattr(args, name) is None]
    if missing:
        raise UsageError(f"missing {', '.join('--' + name.replace('_', '-') for name in missing)}")
    for name in (*_REQUIRED[:-2], "log_interval", "expert_model_parallel_size", "pipeline_model_parallel_size", "seed"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    _check_network(args)
    _check_experts(args)
    _check_device(args)
    _check_parallel(args)
    _check_batch(args)
    _check_optimizer(args)
    _check_recompute(args)
    _check_paths(args)


def _check_network(args: argparse.Namespace) -> None:
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int(8 * args.hidden_size / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
        if args.ffn_hidden_size < 1:
            raise UsageError(f"--hidden-size {args.hidden_size} is too small to derive --ffn-hidden-size; give it")
    if args.kv_channels is None:
        _divides("--num-attention-heads", args.num_attention_heads, "--hidden-size", args.hidden_size)
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.group_query_attention:
        _divides("--num-query-groups", args.num_query_groups, "--num-attention-heads", args.num_attention_heads)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.seq_length > args.max_position_embeddings:
        raise UsageError(
            f"--seq-length {args.seq_length} exceeds --max-position-embeddings {args.max_position_embeddings}"
        )
    chosen = [flag for flag in ("swiglu", "squared_relu", "quick_geglu") if getattr(args, flag)]
    if len(chosen) > 1:
        raise UsageError(f"--{' and --'.join(chosen)} exclude each other".replace("_", "-"))
    if args.activation_func_clamp_value is not None and not (args.swiglu or args.quick_geglu):
        raise UsageError("--activation-func-clamp-value applies to gated activations: add --swiglu or --quick-geglu")


def _check_experts(args: argparse.Namespace) -> None:
    if args.num_experts is None:
        args.moe_ffn_hidden_size = None
        if args.expert_model_parallel_size > 1:
            raise UsageError("--expert-model-parallel-size needs --num-experts")
        return
    if args.num_experts < 1:
        raise UsageError(f"--num-experts {args.num_experts} must be at least 1; leave it out for a dense model")
    _divides("--expert-model-parallel-size", args.expert_model_parallel_size, "--num-experts", args.num_experts)
    if not 1 <= args.moe_router_topk <= args.num_experts:
        raise UsageError(
            f"--moe-router-topk {args.moe_router_topk} must be between 1 and --num-experts {args.num_experts}"
        )
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    if isinstance(args.moe_layer_freq, list) and len(args.moe_layer_freq) != args.num_layers:
        raise UsageError(f"--moe-layer-freq names {len(args.moe_layer_freq)} layers, --num-layers {args.num_layers}")
    if args.moe_apply_probs_on_input and args.moe_router_topk != 1:
        raise UsageError(f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {args.moe_router_topk}")
    if args.moe_expert_capacity_factor is None and args.moe_pad_expert_input_to_capacity:
        raise UsageError("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor")
    if args.moe_shared_expert_intermediate_size is not None and args.add_bias_linear:
        raise UsageError("--moe-shared-expert-intermediate-size needs --disable-bias-linear")
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise UsageError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid")
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(args, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, name, value[0])


def _check_device(args: argparse.Namespace) -> None:
    """Choose backend and implementation by what is there, and refuse what the CPU cannot do."""
    import torch

    args.cuda = torch.cuda.is_available()
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if args.transformer_impl is None:
        args.transformer_impl = "transformer_engine" if args.cuda and has_te else "local"
    if args.transformer_impl == "transformer_engine" and not (args.cuda and has_te):
        raise UsageError("--transformer-impl transformer_engine needs a GPU and Transformer Engine; use local")
    if args.distributed_backend is None:
        args.distributed_backend = "nccl" if args.cuda else "gloo"
    if args.distributed_backend == "nccl" and not args.cuda:
        raise UsageError("--distributed-backend nccl needs a GPU; use gloo")
    grouped = args.transformer_impl == "transformer_engine" or importlib.util.find_spec("grouped_gemm") is not None
    if args.moe_grouped_gemm and not (args.cuda and grouped):
        raise UsageError(
            "--moe-grouped-gemm needs Transformer Engine (or the grouped_gemm package) and a GPU: without it stock "
            "computes one expert after the other (SequentialMLP). Leave the flag out"
        )
    if args.moe_permute_fusion and args.transformer_impl != "transformer_engine":
        raise UsageError("--moe-permute-fusion needs Transformer Engine; leave it out")
    if args.cuda:
        args.masked_softmax_fusion &= importlib.util.find_spec("scaled_upper_triang_masked_softmax_cuda") is not None
        args.apply_rope_fusion &= args.transformer_impl == "transformer_engine"
        args.gradient_accumulation_fusion &= importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        # Stock fuses the activation of an expert only where it is SwiGLU or quick GeGLU.
        args.bias_gelu_fusion &= args.add_bias_linear and args.num_experts is None
        return
    for name in ("gelu", "swiglu", "dropout"):
        setattr(args, f"bias_{name}_fusion", False)
    args.masked_softmax_fusion = args.apply_rope_fusion = args.gradient_accumulation_fusion = False
    if args.tensor_model_parallel_size > 1 and args.num_experts is not None:
        raise UsageError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with experts needs sequence parallelism, "
            "whose norms stock has only on a GPU: on CPU use --expert-model-parallel-size instead"
        )
    if args.sequence_parallel:
        raise UsageError("--sequence-parallel needs a GPU: stock's norm on CPU does not support it")
    if args.ddp_average_in_collective:
        raise UsageError("--ddp-average-in-collective needs nccl: gloo cannot average")


def _check_parallel(args: argparse.Namespace) -> None:
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % model_parallel:
        raise UsageError(
            f"{args.world_size} ranks cannot be divided by --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} x --pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    args.data_parallel_size = args.world_size // model_parallel
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    expert_parallel = expert_tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % expert_parallel:
        raise UsageError(
            f"{args.world_size} ranks cannot be divided by --expert-model-parallel-size "
            f"{args.expert_model_parallel_size} x --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: "
            f"start a multiple of {expert_parallel} ranks"
        )
    _divides("--pipeline-model-parallel-size", args.pipeline_model_parallel_size, "--num-layers", args.num_layers)
    _check_virtual_stages(args)
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise UsageError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")
    if args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = not args.grad_reduce_in_bf16


def _check_virtual_stages(args: argparse.Namespace) -> None:
    layers_a_stage = args.num_layers // args.pipeline_model_parallel_size
    stages = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        if stages is not None:
            raise UsageError("give --num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank")
        layers = args.num_layers_per_virtual_pipeline_stage
        _divides("--num-layers-per-virtual-pipeline-stage", layers, "layers a pipeline stage", layers_a_stage)
        stages = layers_a_stage // layers
    if stages is not None:
        _divides("--num-virtual-stages-per-pipeline-rank", stages, "layers a pipeline stage", layers_a_stage)
    args.virtual_pipeline_model_parallel_size = None if stages in (None, 1) else stages
    if args.virtual_pipeline_model_parallel_size is None:
        args.overlap_p2p_comm = False
        return
    least = 2 if args.overlap_p2p_comm else 3
    if args.pipeline_model_parallel_size < least:
        raise UsageError(
            f"virtual pipeline stages need --pipeline-model-parallel-size of at least {least}"
            + ("" if args.overlap_p2p_comm else " with --no-overlap-p2p-communication")
        )


def _check_batch(args: argparse.Namespace) -> None:
    one_pass = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = one_pass
    if args.global_batch_size < 1 or args.global_batch_size % one_pass:
        raise UsageError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.data_parallel_size} data-parallel ranks"
        )
    args.num_microbatches = args.global_batch_size // one_pass
    virtual = args.virtual_pipeline_model_parallel_size
    if virtual is not None and args.num_microbatches % args.pipeline_model_parallel_size:
        raise UsageError(
            f"{args.num_microbatches} micro-batches a step cannot be divided by --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}, as virtual stages need: change --global-batch-size"
        )


def _check_optimizer(args: argparse.Namespace) -> None:
    if args.weight_decay_incr_style == "constant":
        if args.start_weight_decay is not None or args.end_weight_decay is not None:
            raise UsageError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"
            )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif args.start_weight_decay is None or args.end_weight_decay is None:
        raise UsageError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay"
        )
    if not 0 <= args.start_weight_decay <= args.end_weight_decay:
        raise UsageError("weight decay must be at least 0 and must not fall from start to end")
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        raise UsageError("give --lr-warmup-fraction or --lr-warmup-iters, not both")
    warmup = args.lr_warmup_iters if args.lr_warmup_fraction is None else args.lr_warmup_fraction * args.lr_decay_iters
    if not 0 <= warmup < args.lr_decay_iters:
        raise UsageError(
            f"a warm-up of {warmup:g} iterations must be shorter than --lr-decay-iters {args.lr_decay_iters}"
        )
    if not 0 <= args.min_lr <= args.lr or not args.lr_warmup_init <= args.lr or not math.isfinite(args.lr):
        raise UsageError(
            f"--min-lr {args.min_lr:g} and --lr-warmup-init {args.lr_warmup_init:g} must not exceed --lr {args.lr:g}"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise UsageError("--lr-decay-style WSD needs --lr-wsd-decay-iters")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UsageError("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other")


def _check_recompute(args: argparse.Namespace) -> None:
    if args.recompute_granularity == "full" and args.recompute_method is None:
        raise UsageError("--recompute-granularity full needs --recompute-method uniform or block")
    if args.recompute_granularity != "full" and args.recompute_method is not None:
        raise UsageError("--recompute-method needs --recompute-granularity full")
    if args.recompute_method is not None and args.recompute_num_layers is None:
        args.recompute_num_layers = 1
    if args.recompute_modules and args.recompute_granularity != "selective":
        raise UsageError("--recompute-modules needs --recompute-granularity selective")


def _check_paths(args: argparse.Namespace) -> None:
    """Checks that need no reading; what a path holds is looked at later, by all ranks together."""
    if not Path(args.data_path).exists():
        raise UsageError(f"--data-path {args.data_path} does not exist")
    for name in ("save", "tensorboard_dir"):
        value = getattr(args, name)
        if value is not None:
            _check_writable_folder(f"--{name.replace('_', '-')}", Path(value))
    if args.metrics_jsonl is not None:
        _check_writable_folder("the folder of --metrics-jsonl", Path(args.metrics_jsonl).parent)
        if Path(args.metrics_jsonl).is_dir():
            raise UsageError(f"--metrics-jsonl {args.metrics_jsonl} is a folder; name a file")
    if args.tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard-dir needs the tensorboard package: install the extra 'dev' of this project")
    if args.save_interval is not None and args.save is None:
        raise UsageError("--save-interval needs --save FOLDER")
    # What is saved and loaded in one place begins empty; a restarted run finds what it left there.
    if args.load is not None and args.load != args.save and not Path(args.load).is_dir():
        raise UsageError(f"--load {args.load} is no folder")


def _check_writable_folder(what: str, folder: Path) -> None:
    """A folder that is there must be writable; else the nearest one above it, in which it will be made."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(f"{what}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {existing} is not writable")


def _divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    if divisor < 1 or value % divisor:
        raise UsageError(f"{name} {value} cannot be divided by {divisor_name} {divisor}")
