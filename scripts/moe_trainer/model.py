"""Stock's GPT model from the arguments, wrapped in stock's (or the plug-in's) data-parallel wrapper."""

import argparse
import dataclasses

import torch
import torch.nn.functional as F
from megatron.core import distributed as core_distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from .corpus import VOCABULARY_SIZE
from .errors import UsageError


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Build stock's configuration: every field of its name from `args`, and those that Megatron-LM names differently.

    Raises:
        UsageError: stock refuses the combination; its own words are kept.
    """
    from megatron.core import activations

    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in vars(args).items() if name in fields}
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    values.update(
        num_moe_experts=args.num_experts,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        batch_p2p_comm=not args.overlap_p2p_comm,
        deallocate_pipeline_outputs=True,
        bias_activation_fusion=args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
    )
    if args.swiglu:
        values.update(activation_func=F.silu, gated_linear_unit=True)
    elif args.squared_relu:
        values.update(activation_func=activations.squared_relu)
    elif args.quick_geglu:
        values.update(activation_func=activations.quick_gelu, gated_linear_unit=True)
    try:
        return TransformerConfig(**values)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"megatron-core refuses these settings: {error}") from error


def build_model(
    args: argparse.Namespace, config: TransformerConfig, device: torch.device
) -> list[DistributedDataParallel]:
    """Build this rank's chunks (one, or one a virtual stage) of the model and wrap them for data parallelism.

    `gpt_layer_specs` and `DistributedDataParallel` are looked up here, at the call: the plug-in replaces those names.
    """
    stages = args.virtual_pipeline_model_parallel_size
    chunks: list[MegatronModule] = [
        _build_chunk(args, config, None if stages is None else stage) for stage in range(stages or 1)
    ]
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(device)
    if args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return [
        core_distributed.DistributedDataParallel(
            config=config,
            ddp_config=data_parallel_config(args),
            module=chunk,
            # As stock: chunks after the first reduce while others compute, in one piece.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]


def data_parallel_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """Build stock's data-parallel configuration; buckets only where reduction overlaps, of stock's size."""
    bucket_size = args.ddp_bucket_size
    if bucket_size is None:
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        bucket_size = max(40_000_000, 1_000_000 * ranks)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        align_param_gather=args.overlap_param_gather and args.virtual_pipeline_model_parallel_size is not None,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
        check_for_large_grads=args.check_for_large_grads,
        bucket_size=bucket_size if args.overlap_grad_reduce else None,
        average_in_collective=args.ddp_average_in_collective,
    )


def _build_chunk(args: argparse.Namespace, config: TransformerConfig, stage: int | None) -> GPTModel:
    where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args, config, stage),
        vocab_size=padded_vocabulary_size(args),
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=stage,
    )
    model.vp_stage = stage
    return model


def _layer_spec(args: argparse.Namespace, config: TransformerConfig, stage: int | None) -> object:
    use_te = args.transformer_impl == "transformer_engine"
    if args.num_experts is not None:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=use_te, normalization=args.normalization, vp_stage=stage
        )
    if use_te:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    return gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)


def padded_vocabulary_size(args: argparse.Namespace) -> int:
    """Bytes, padded so that each tensor-parallel rank gets a multiple of `--make-vocab-size-divisible-by`."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-VOCABULARY_SIZE // multiple) * multiple
