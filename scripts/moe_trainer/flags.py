"""Flag definitions, grouped and named as Megatron-LM names them."""

import argparse
import ast
import operator


def add_all_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the trainer itself to `parser` (those of the plug-in are added by the plug-in)."""
    for add in (
        _add_network,
        _add_moe,
        _add_parallel,
        _add_mixed_precision_and_recompute,
        _add_optimizer,
        _add_schedule,
        _add_training,
        _add_checkpoint,
        _add_data,
        _add_logging,
    ):
        add(parser)


def moe_layer_freq(text: str) -> int | list[int]:
    """Parse `--moe-layer-freq`: N (every N-th layer is MoE) or a list expression such as `[0]*1+[1]*3`."""
    try:
        value = _evaluate(ast.parse(str(text), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list such as [0]*1+[1]*3") from error
    if isinstance(value, list) and not all(item in (0, 1) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} must consist of 0 (dense) and 1 (MoE)")
    return value


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        assert isinstance(value, (int, list))
        return value
    raise ValueError(ast.dump(node))


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network size")
    group.add_argument("--num-layers", type=int, help="transformer layers")
    group.add_argument("--hidden-size", type=int)
    group.add_argument("--ffn-hidden-size", type=int, help="default 4h, or 8h/3 rounded down to 64 with --swiglu")
    group.add_argument("--num-attention-heads", type=int)
    group.add_argument("--kv-channels", type=int, help="width of a head; default hidden size / heads")
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-query-groups", type=int, default=1)
    group.add_argument("--max-position-embeddings", type=int, help="default: the sequence length")
    group.add_argument(
        "--position-embedding-type", choices=("learned_absolute", "rope", "none"), default="learned_absolute"
    )
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--rotary-percent", type=float, default=1.0)
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--norm-epsilon", type=float, default=1e-5, dest="layernorm_epsilon")
    group.add_argument("--qk-layernorm", action="store_true")
    group.add_argument("--swiglu", action="store_true", help="gated linear units and SiLU instead of GELU")
    group.add_argument("--squared-relu", action="store_true")
    group.add_argument("--quick-geglu", action="store_true", help="gated linear units and quick GELU")
    group.add_argument("--activation-func-clamp-value", type=float, help="clamp the inputs of gated activations")
    group.add_argument("--glu-linear-offset", type=float, default=0.0)
    group.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    group.add_argument("--add-bias-linear", action="store_true", default=True, help="biases in linear layers (default)")
    group.add_argument("--add-qkv-bias", action="store_true")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="default: transformer_engine where it is installed and there is a GPU, else local",
    )
    for name, what in (
        ("gelu", "bias and GELU"),
        ("swiglu", "bias and SwiGLU"),
        ("dropout", "bias, dropout and residual"),
    ):
        group.add_argument(
            f"--no-bias-{name}-fusion",
            action="store_false",
            dest=f"bias_{name}_fusion",
            help=f"do not fuse {what}; never fused on CPU",
        )
    group.add_argument("--no-masked-softmax-fusion", action="store_false", dest="masked_softmax_fusion")
    group.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    group.add_argument("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")


def _add_moe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--num-experts", type=int, help="experts a layer; without it the model is dense")
    group.add_argument("--moe-layer-freq", type=moe_layer_freq, default=1)
    group.add_argument("--moe-ffn-hidden-size", type=int, help="default: --ffn-hidden-size")
    group.add_argument("--moe-router-topk", type=int, default=2)
    group.add_argument(
        "--moe-router-load-balancing-type",
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        default="aux_loss",
    )
    group.add_argument("--moe-aux-loss-coeff", type=float, nargs="+", default=0.0)
    group.add_argument("--moe-z-loss-coeff", type=float)
    group.add_argument("--moe-input-jitter-eps", type=float)
    group.add_argument("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax")
    group.add_argument("--moe-router-dtype", choices=("fp32", "fp64"))
    group.add_argument("--moe-router-pre-softmax", action="store_true")
    group.add_argument("--moe-router-topk-scaling-factor", type=float)
    group.add_argument("--moe-router-num-groups", type=int)
    group.add_argument("--moe-router-group-topk", type=int)
    group.add_argument("--moe-router-enable-expert-bias", action="store_true")
    group.add_argument("--moe-router-bias-update-rate", type=float, default=1e-3)
    group.add_argument("--moe-router-force-load-balancing", action="store_true", help="random routing, for benchmarks")
    group.add_argument("--moe-token-dispatcher-type", choices=("allgather", "alltoall"), default="allgather")
    group.add_argument("--moe-grouped-gemm", action="store_true", help="needs Transformer Engine or grouped_gemm")
    group.add_argument("--moe-use-legacy-grouped-gemm", action="store_true")
    group.add_argument("--moe-permute-fusion", action="store_true", help="needs Transformer Engine")
    group.add_argument("--moe-shared-expert-intermediate-size", type=int)
    group.add_argument("--moe-shared-expert-gate", action="store_true")
    group.add_argument("--moe-shared-expert-overlap", action="store_true")
    group.add_argument("--moe-expert-capacity-factor", type=float)
    group.add_argument("--moe-pad-expert-input-to-capacity", action="store_true")
    group.add_argument("--moe-token-drop-policy", choices=("probs", "position"), default="probs")
    group.add_argument("--moe-apply-probs-on-input", action="store_true")


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distributed")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    group.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group.add_argument("--expert-tensor-parallel-size", type=int)
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument("--overlap-param-gather", action="store_true")
    group.add_argument("--ddp-bucket-size", type=int)
    group.add_argument("--ddp-average-in-collective", action="store_true", help="not on CPU: gloo cannot average")
    group.add_argument("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    group.add_argument("--use-cpu-initialization", action="store_true")
    group.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: nccl with a GPU, else gloo")
    group.add_argument("--distributed-timeout-minutes", type=float, default=10)


def _add_mixed_precision_and_recompute(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixed precision and recompute")
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--accumulate-allreduce-grads-in-fp32", action="store_true", help="implied by --bf16")
    group.add_argument("--grad-reduce-in-bf16", action="store_true")
    group.add_argument("--attention-softmax-in-fp32", action="store_true")
    group.add_argument("--calculate-per-token-loss", action="store_true")
    group.add_argument("--recompute-granularity", choices=("full", "selective"))
    group.add_argument("--recompute-method", choices=("uniform", "block"))
    group.add_argument("--recompute-num-layers", type=int)
    group.add_argument("--recompute-modules", nargs="*", help="with selective: moe, moe_act, core_attn, mlp, ...")


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer and regularization")
    group.add_argument(
        "--optimizer", choices=("adam",), default="adam", help="AdamW, or Adam with --no-decoupled-weight-decay"
    )
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--start-weight-decay", type=float)
    group.add_argument("--end-weight-decay", type=float)
    group.add_argument("--weight-decay-incr-style", choices=("constant", "linear", "cosine"), default="constant")
    group.add_argument(
        "--no-decoupled-weight-decay",
        action="store_false",
        dest="decoupled_weight_decay",
        help="Adam with L2 regularization instead of AdamW",
    )
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning rate")
    group.add_argument("--lr", type=float)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--decoupled-lr", type=float, help="for the input and output layers")
    group.add_argument("--decoupled-min-lr", type=float)
    group.add_argument(
        "--lr-decay-style", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"), default="linear"
    )
    group.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    group.add_argument(
        "--lr-wsd-decay-style", choices=("exponential", "linear", "cosine", "minus_sqrt"), default="exponential"
    )
    group.add_argument("--lr-wsd-decay-iters", type=int)
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--lr-warmup-fraction", type=float)
    group.add_argument("--lr-warmup-init", type=float, default=0.0)
    group.add_argument("--override-opt-param-scheduler", action="store_true")
    group.add_argument("--use-checkpoint-opt-param-scheduler", action="store_true")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training and validation")
    group.add_argument("--micro-batch-size", type=int)
    group.add_argument("--global-batch-size", type=int, help="default: micro-batch size times data-parallel size")
    group.add_argument("--train-iters", type=int)
    group.add_argument("--exit-interval", type=int, help="stop at the first iteration divisible by this")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--eval-interval", type=int)
    group.add_argument("--eval-iters", type=int, default=100)
    group.add_argument(
        "--check-for-nan-in-loss-and-grad", action="store_true", default=True, help="end at the first one (default)"
    )
    group.add_argument(
        "--no-check-for-nan-in-loss-and-grad", action="store_false", dest="check_for_nan_in_loss_and_grad"
    )
    group.add_argument("--check-for-large-grads", action="store_true")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="FOLDER")
    group.add_argument("--save-interval", type=int, help="default: only at the end")
    group.add_argument("--load", metavar="FOLDER")
    group.add_argument("--ckpt-step", type=int, help="load this iteration instead of the latest")
    group.add_argument("--exit-on-missing-checkpoint", action="store_true")
    group.add_argument("--finetune", action="store_true", help="load the weights only and start at iteration 0")
    group.add_argument("--no-save-optim", action="store_true")
    group.add_argument("--no-save-rng", action="store_true")
    group.add_argument("--no-load-optim", action="store_true")
    group.add_argument("--no-load-rng", action="store_true")
    group.add_argument(
        "--dist-ckpt-optim-fully-reshardable",
        action="store_true",
        help="distributed optimizer state that loads at another pipeline-parallel size",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", metavar="PATH", help="a file, or a folder of text files")
    group.add_argument("--seq-length", type=int)
    group.add_argument("--split", default="969,30,1", help="train, validation (and test) weights")


def _add_logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--log-interval", type=int, default=100)
    group.add_argument("--log-num-zeros-in-grad", action="store_true")
    group.add_argument("--log-params-norm", action="store_true")
    group.add_argument("--tensorboard-dir", metavar="FOLDER")
    group.add_argument("--metrics-jsonl", metavar="FILE", help="one JSON record a step, by rank 0")
    group.add_argument("--no-progress", action="store_true", help="plain lines even on a terminal")
