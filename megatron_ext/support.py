"""What ``--megascale`` supports of stock Megatron-Core. Everything else is refused by name at start, never ignored.

``docs/SUPPORT.md`` shows this table; a test compares the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Refusal:
    """An option that is refused: where it is set, its stock name, when, and what to do instead."""

    where: str  # "model" (TransformerConfig), "ddp", "optimizer" or "arguments"
    option: str
    refused: Callable[[Any], bool]
    remedy: str


def _set(value: object) -> bool:
    return bool(value)


def _more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


REFUSALS: tuple[Refusal, ...] = (
    Refusal("model", "fp8", _set, "train in bf16 or fp32"),
    Refusal("model", "fp4", _set, "train in bf16 or fp32"),
    Refusal("model", "fp16", _set, "use --bf16: paged optimizer state needs no loss scaling"),
    Refusal("model", "delay_wgrad_compute", _set, "leave it out: weight gradients go to pages in the backward"),
    Refusal("model", "overlap_moe_expert_parallel_comm", _set, "leave it out"),
    Refusal("model", "enable_cuda_graph", _set, "use --cuda-graph-impl local --cuda-graph-scope attn"),
    Refusal("model", "external_cuda_graph", _set, "use --cuda-graph-impl transformer_engine --cuda-graph-scope attn"),
    Refusal("model", "moe_latent_size", _set, "leave it out: latent experts are not paged"),
    Refusal("model", "use_te_activation_func", _set, "leave it out"),
    Refusal("model", "use_kitchen", _set, "leave it out"),
    Refusal("model", "fine_grained_activation_offloading", _set, "leave it out"),
    Refusal("model", "cpu_offloading", _set, "leave it out"),
    Refusal("model", "activation_func_fp8_input_store", _set, "leave it out: pre-activations are kept as they are"),
    Refusal("model", "enable_autocast", _set, "train in bf16 or fp32 without autocast"),
    Refusal("model", "init_model_with_meta_device", _set, "leave it out: experts are built one at a time"),
    Refusal("model", "gradient_accumulation_fusion", _set, "add --no-gradient-accumulation-fusion"),
    Refusal("model", "overlap_dispatch_backward_with_experts_wgrad", _set, "leave it out"),
    Refusal("model", "mtp_detach_heads", _set, "leave it out: its own gradient norm would not see experts"),
    Refusal("ddp", "use_megatron_fsdp", _set, "use the distributed optimizer (--use-distributed-optimizer)"),
    Refusal("ddp", "num_distributed_optimizer_instances", _more_than_one, "use one instance"),
    Refusal("ddp", "fp8_param_gather", _set, "leave it out"),
    Refusal("ddp", "reduce_scatter_with_fp32_accumulation", _set, "leave it out"),
    Refusal("ddp", "check_for_large_grads", _set, "leave it out: it would not see experts' gradients"),
    Refusal("optimizer", "optimizer", lambda v: v != "adam", "use --optimizer adam (Adam or AdamW)"),
    Refusal("optimizer", "use_precision_aware_optimizer", _set, "leave it out"),
    Refusal("optimizer", "optimizer_cpu_offload", _set, "leave it out: pages are how experts leave the device"),
    Refusal("optimizer", "overlap_param_gather_with_optimizer_step", _set, "leave it out"),
    Refusal("optimizer", "loss_scale", _set, "leave it out: bf16 and fp32 need none"),
    Refusal("arguments", "moe_use_upcycling", _set, "upcycle with stock, then load the checkpoint"),
    Refusal("arguments", "use_torch_fsdp2", _set, "use the distributed optimizer"),
    Refusal("arguments", "freeze_all_layers", _set, "leave it out: it does not reach experts"),
    Refusal("arguments", "freeze_LM", _set, "leave it out: it does not reach experts"),
    Refusal("arguments", "check_weight_hash_across_dp_replicas_interval", _set, "leave it out: it sees no experts"),
    Refusal("arguments", "gtp_weight_remat_size", _more_than_one, "leave it out"),
    Refusal("arguments", "expert_gtp_weight_remat_size", _more_than_one, "leave it out"),
    Refusal("arguments", "ckpt_convert_format", _set, "convert with stock, then load the checkpoint"),
    Refusal("arguments", "inprocess_restart", _set, "leave it out: a restarted process loads a checkpoint"),
)


def check(where: str, options: object) -> None:
    """Refuses the first unsupported option of a stock configuration object.

    Raises:
        ValueError: names the option, its value and the remedy.
    """
    for refusal in REFUSALS:
        value = getattr(options, refusal.option, None)
        if refusal.where == where and refusal.refused(value) and (value is not None):
            flag = "--" + refusal.option.replace("_", "-")
            raise ValueError(f"{flag} ({refusal.option}={value!r}) is not supported with --megascale; {refusal.remedy}")


WITHOUT_EXPERTS = ("attn", "mamba", "mlp")
"""Scopes of CUDA graphs that hold no part of a layer with experts: those that stock allows with any routing."""


def graphs_said(options: object, *, pages_leave: bool) -> str | None:
    """What is said of CUDA graphs at the start; None where there are none. See docs/SUPPORT.md.

    Raises:
        ValueError: graphs that would hold experts or what leads to them; graphs beside pages that come and go.
    """
    impl = getattr(options, "cuda_graph_impl", None)
    if impl in (None, "none"):
        return None
    given = getattr(options, "cuda_graph_scope", None) or []
    scopes = [getattr(s, "name", s) for s in (given.split(",") if isinstance(given, str) else given)]
    if not scopes or not set(scopes) <= set(WITHOUT_EXPERTS):
        raise ValueError(
            f"--cuda-graph-impl {impl} with --cuda-graph-scope {','.join(scopes) or 'full'} is not supported with "
            "--megascale: a graph would hold the way to the experts, whose pages depend on the routing; use "
            "--cuda-graph-scope attn, or --cuda-graph-impl none"
        )
    if pages_leave:
        raise ValueError(
            f"--cuda-graph-impl {impl} is not supported with --megascale-device-budget: pages would be copied while "
            "stock captures its graphs, which CUDA refuses; leave one of them out"
        )
    return f"CUDA graphs hold {', '.join(scopes)}; experts are computed outside of them"


def check_arguments(args: argparse.Namespace, *, needs_experts: bool = True, paged_checkpoints: bool = False) -> None:
    """Refuses unsupported flags, before anything is built.

    Raises:
        ValueError: as :func:`check`; also ``--megascale`` on a dense model, experts that expert parallelism cannot
            divide, what :func:`check_spread` refuses, and layouts of checkpoints that pages do not have.
        ``needs_experts``: whether nothing that was asked for has a use in a dense model. ``paged_checkpoints``:
            whether what is saved is of the project's own format.
    """
    experts = getattr(args, "num_experts", None)
    if experts is None and needs_experts:
        raise ValueError("--megascale needs a mixture-of-experts model: give --num-experts, or leave --megascale out")
    for where in ("model", "ddp", "optimizer", "arguments"):
        check(where, args)
    check_shared_out(args)
    cut = getattr(args, "tensor_model_parallel_size", None) or 1
    if experts is not None:
        check_spread(args)
    if experts is not None and cut > 1 and getattr(args, "add_bias_linear", False):
        raise ValueError(
            f"--tensor-model-parallel-size {cut} and experts with biases are not supported together with --megascale, "
            "because stock leaves some of these biases out of the gradient norm; add --disable-bias-linear"
        )
    if getattr(args, "save", None) or getattr(args, "load", None):
        _check_checkpoints(args, paged=paged_checkpoints)


def check_shared_out(args: argparse.Namespace) -> None:
    """Raises ValueError where expert parallelism cannot divide the experts."""
    experts, ranks = getattr(args, "num_experts", None), getattr(args, "expert_model_parallel_size", None) or 1
    if experts is not None and experts % ranks:
        raise ValueError(
            f"--num-experts {experts} cannot be divided by --expert-model-parallel-size {ranks}; change one of them"
        )


def check_spread(options: object) -> None:
    """Refuses what stock computes wrongly where each expert's pages are spread over ranks (expert tensor parallelism).

    Raises:
        ValueError: with biases, which stock adds once a rank; without expert parallelism on as many ranks as tensor
            parallelism does not have, where stock averages parts of experts that are not the same.
    """
    tensor = getattr(options, "tensor_model_parallel_size", None) or 1
    spread = getattr(options, "expert_tensor_parallel_size", None) or tensor
    if spread == 1:
        return
    if getattr(options, "add_bias_linear", False):
        raise ValueError(
            f"--expert-tensor-parallel-size {spread} and experts with biases are not supported together with "
            "--megascale, because stock adds the bias of the down projection once for each of these ranks; add "
            "--disable-bias-linear"
        )
    if spread != tensor and (getattr(options, "expert_model_parallel_size", None) or 1) == 1:
        raise ValueError(
            f"--expert-tensor-parallel-size {spread} with --tensor-model-parallel-size {tensor} needs "
            "--expert-model-parallel-size above 1: without it stock averages gradients of different parts of experts"
        )


def check_groups(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Refuses a model whose configuration and process groups disagree about how experts are shared out.

    Stock shares experts out by the groups, and by the configuration decides who has the same ones: where these differ
    it averages gradients of different experts, and says nothing.

    Raises:
        ValueError: names the option and both sizes.
    """
    sizes = {"expert_model_parallel_size": groups.ep.size(), "expert_tensor_parallel_size": groups.expt_tp.size()}
    for option, size in sizes.items():
        given = getattr(config, option) or 1
        if given != size:
            raise ValueError(
                f"{option}={given} in the model's configuration (TransformerConfig), and its process groups have "
                f"{size} rank{'s' * (size != 1)}: stock would reduce gradients among the wrong ranks; give "
                "TransformerConfig and initialize_model_parallel() the same size"
            )


def _check_checkpoints(args: argparse.Namespace, *, paged: bool) -> None:
    layout = getattr(args, "ckpt_format", None) or "torch_dist"
    if layout != "torch_dist":
        raise ValueError(f"--ckpt-format {layout} is not supported with --megascale; use --ckpt-format torch_dist")
    if paged:
        if getattr(args, "non_persistent_save_interval", None):
            raise ValueError(
                "--non-persistent-save-interval is not supported with --megascale-checkpoint-format paged; leave it "
                "out, and save more often: --save-interval"
            )
        return
    reshardable = getattr(args, "dist_ckpt_optim_fully_reshardable", False)
    if getattr(args, "use_distributed_optimizer", False) and not reshardable:
        raise ValueError(
            "--use-distributed-optimizer with --save or --load needs --dist-ckpt-optim-fully-reshardable under "
            "--megascale: stock's default layout (dp_reshardable) is cut by its own buffers, which paged experts do "
            "not have"
        )
