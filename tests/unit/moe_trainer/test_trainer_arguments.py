"""Flags, YAML and what is derived from them; every mistake is found before the long work."""

import argparse
from pathlib import Path

import pytest
import torch

from scripts.moe_trainer.arguments import build_parser, parse_args
from scripts.moe_trainer.errors import UsageError
from scripts.moe_trainer.flags import moe_layer_freq

CONFIGS = Path(__file__).resolve().parents[3] / "configs"

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --num-experts 8 "
    "--train-iters 10 --lr 1e-3 --data-path corpus"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run in a folder with a corpus."""
    (tmp_path / "corpus").write_text("text " * 100)
    monkeypatch.chdir(tmp_path)


def parse(flags: str = "", *, world: int = 1) -> argparse.Namespace:
    return parse_args(f"{MODEL} {flags}".split(), world_size=world)


def refusal(flags: str, *, world: int = 1) -> str:
    with pytest.raises(UsageError) as error:
        parse(flags, world=world)
    return str(error.value)


class TestDerivedValues:
    def test_sizes(self) -> None:
        args = parse()
        assert (args.ffn_hidden_size, args.moe_ffn_hidden_size, args.kv_channels) == (128, 128, 8)
        assert (args.max_position_embeddings, args.global_batch_size, args.num_microbatches) == (16, 2, 1)
        assert parse("--swiglu --hidden-size 256").ffn_hidden_size == 640

    @pytest.mark.parametrize(
        ("flags", "world", "expected"),
        [
            ("--global-batch-size 16", 1, (1, 8)),
            ("--global-batch-size 16", 4, (4, 2)),
            ("--global-batch-size 16 --expert-model-parallel-size 4", 4, (4, 2)),
            ("--global-batch-size 16 --pipeline-model-parallel-size 2", 4, (2, 4)),
            ("--global-batch-size 16 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2", 4, (2, 4)),
        ],
    )
    def test_data_parallel_size_and_micro_batches(self, flags: str, world: int, expected: tuple[int, int]) -> None:
        args = parse(flags, world=world)
        assert (args.data_parallel_size, args.num_microbatches) == expected

    @pytest.mark.parametrize(
        ("flags", "stages"),
        [
            ("--num-layers-per-virtual-pipeline-stage 1", 2),
            ("--num-layers-per-virtual-pipeline-stage 2", None),
            ("--num-virtual-stages-per-pipeline-rank 2", 2),
            ("", None),
        ],
    )
    def test_virtual_stages(self, flags: str, stages: int | None) -> None:
        args = parse(f"--pipeline-model-parallel-size 2 --global-batch-size 4 {flags}", world=2)
        assert args.virtual_pipeline_model_parallel_size == stages
        assert args.overlap_p2p_comm is (stages is not None)

    def test_bf16_accumulates_in_fp32_unless_told_otherwise(self) -> None:
        assert parse("--bf16").accumulate_allreduce_grads_in_fp32
        assert not parse("--bf16 --grad-reduce-in-bf16").accumulate_allreduce_grads_in_fp32
        assert not parse().accumulate_allreduce_grads_in_fp32

    def test_defaults_are_megatrons(self) -> None:
        args = parse()
        assert args.add_bias_linear
        assert args.check_for_nan_in_loss_and_grad
        assert (args.hidden_dropout, args.clip_grad, args.adam_beta2, args.weight_decay) == (0.1, 1.0, 0.999, 0.01)
        assert (args.moe_token_dispatcher_type, args.moe_router_load_balancing_type) == ("allgather", "aux_loss")
        assert not parse("--disable-bias-linear").add_bias_linear
        assert not parse("--no-check-for-nan-in-loss-and-grad").check_for_nan_in_loss_and_grad

    def test_weight_decay_follows_its_style(self) -> None:
        args = parse("--weight-decay 0.3")
        assert (args.start_weight_decay, args.end_weight_decay) == (0.3, 0.3)
        args = parse("--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2")
        assert (args.start_weight_decay, args.end_weight_decay) == (0.1, 0.2)

    def test_nothing_is_fused_on_cpu(self) -> None:
        args = parse("--swiglu")
        assert not (args.bias_swiglu_fusion)
        assert not (args.bias_dropout_fusion)
        assert not (args.masked_softmax_fusion)
        assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")

    @pytest.mark.parametrize(
        ("text", "value"), [("2", 2), ("[0]*1+[1]*3", [0, 1, 1, 1]), ("([0]+[1])*2", [0, 1, 0, 1]), ("[1,0]", [1, 0])]
    )
    def test_moe_layer_freq(self, text: str, value: object) -> None:
        assert moe_layer_freq(text) == value

    @pytest.mark.parametrize("text", ["", "x", "[2]", "__import__('os')", "[0]*", "1.5"])
    def test_bad_moe_layer_freq(self, text: str) -> None:
        with pytest.raises(argparse.ArgumentTypeError):
            moe_layer_freq(text)


class TestMistakes:
    @pytest.mark.parametrize(
        ("flags", "world", "message"),
        [
            ("--num-expert 8", 1, "unknown flag --num-expert; did you mean --num-experts?"),
            ("--moe-rooter-topk=2", 1, "unknown flag --moe-rooter-topk; did you mean --moe-router-topk?"),
            ("stray", 1, "unexpected argument 'stray'"),
            ("--num-layers two", 1, "argument --num-layers: invalid int value: 'two'"),
            ("--moe-token-dispatcher-type flex", 1, "invalid choice: 'flex'"),
            (
                "--expert-model-parallel-size 3",
                3,
                "--num-experts 8 cannot be divided by --expert-model-parallel-size 3",
            ),
            ("--expert-model-parallel-size 2", 1, "start a multiple of 2 ranks"),
            ("--expert-model-parallel-size 4", 6, "start a multiple of 4 ranks"),
            ("--pipeline-model-parallel-size 2", 3, "3 ranks cannot be divided by"),
            (
                "--pipeline-model-parallel-size 3",
                3,
                "--num-layers 4 cannot be divided by --pipeline-model-parallel-size 3",
            ),
            ("--global-batch-size 3", 1, "--global-batch-size 3 is no multiple of --micro-batch-size 2 x 1"),
            ("--global-batch-size 4", 4, "--global-batch-size 4 is no multiple of --micro-batch-size 2 x 4"),
            ("--moe-router-topk 9", 1, "--moe-router-topk 9 must be between 1 and --num-experts 8"),
            ("--num-experts 0", 1, "--num-experts 0 must be at least 1"),
            ("--moe-layer-freq [1]*3", 1, "--moe-layer-freq names 3 layers, --num-layers 4"),
            ("--moe-apply-probs-on-input", 1, "--moe-apply-probs-on-input needs --moe-router-topk 1, not 2"),
            ("--moe-grouped-gemm", 1, "SequentialMLP"),
            ("--moe-permute-fusion", 1, "--moe-permute-fusion needs Transformer Engine"),
            ("--tensor-model-parallel-size 2", 2, "use --expert-model-parallel-size instead"),
            ("--sequence-parallel", 1, "--sequence-parallel needs a GPU"),
            ("--transformer-impl transformer_engine", 1, "needs a GPU and Transformer Engine"),
            ("--distributed-backend nccl", 1, "nccl needs a GPU"),
            ("--ddp-average-in-collective", 1, "gloo cannot average"),
            ("--overlap-param-gather", 1, "--use-distributed-optimizer and --overlap-grad-reduce"),
            ("--hidden-size 30", 1, "--hidden-size 30 cannot be divided by --num-attention-heads 4"),
            ("--group-query-attention --num-query-groups 3", 1, "cannot be divided by --num-query-groups 3"),
            ("--swiglu --squared-relu", 1, "--swiglu and --squared-relu exclude each other"),
            ("--activation-func-clamp-value 7", 1, "add --swiglu or --quick-geglu"),
            ("--moe-router-enable-expert-bias", 1, "--moe-router-score-function sigmoid"),
            ("--moe-shared-expert-intermediate-size 8", 1, "needs --disable-bias-linear"),
            ("--moe-pad-expert-input-to-capacity", 1, "needs --moe-expert-capacity-factor"),
            ("--lr-warmup-iters 10", 1, "a warm-up of 10 iterations must be shorter than --lr-decay-iters 10"),
            ("--min-lr 1", 1, "--min-lr 1"),
            ("--lr nan", 1, "--lr nan"),
            ("--weight-decay-incr-style linear", 1, "needs --start-weight-decay and --end-weight-decay"),
            ("--start-weight-decay 0.1", 1, "--weight-decay-incr-style linear or cosine"),
            ("--recompute-granularity full", 1, "needs --recompute-method"),
            ("--recompute-modules moe", 1, "needs --recompute-granularity selective"),
            ("--seq-length 32 --max-position-embeddings 16", 1, "exceeds --max-position-embeddings 16"),
            ("--train-iters 0", 1, "--train-iters 0 must be at least 1"),
            ("--data-path nowhere", 1, "--data-path nowhere does not exist"),
            ("--save corpus/folder", 1, "--save: corpus is not a folder"),
            ("--metrics-jsonl corpus/file", 1, "--metrics-jsonl: corpus is not a folder"),
            ("--metrics-jsonl .", 1, "is a folder; name a file"),
            ("--load nowhere", 1, "--load nowhere is no folder"),
            ("--save-interval 2", 1, "--save-interval needs --save"),
            ("--megascale-page-size 1MiB", 1, "no effect without --megascale"),
            ("--megascale --megascale-page-size many", 1, "many"),
            ("--yaml-cfg nowhere.yaml", 1, "--yaml-cfg nowhere.yaml: No such file"),
        ],
    )
    def test_is_named_with_a_remedy(self, flags: str, world: int, message: str) -> None:
        assert message in refusal(flags, world=world)

    def test_several_missing_flags_are_named_together(self) -> None:
        with pytest.raises(UsageError, match=r"missing --num-layers, --hidden-size.*--data-path"):
            parse_args([], world_size=1)

    def test_a_folder_that_may_not_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
        assert "is not writable" in refusal("--save out")

    def test_a_virtual_pipeline_needs_divisible_micro_batches(self) -> None:
        flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6"
        assert "3 micro-batches a step cannot be divided by" in refusal(flags, world=2)
        assert "at least 2" in refusal("--num-layers-per-virtual-pipeline-stage 1")

    def test_grouped_gemm_and_tensor_parallelism_pass_where_there_is_a_gpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find_spec = importlib_find_spec()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "grouped_gemm" or find_spec(name))
        args = parse("--moe-grouped-gemm --tensor-model-parallel-size 2 --sequence-parallel", world=2)
        assert args.distributed_backend == "nccl"


def importlib_find_spec():
    import importlib.util

    return importlib.util.find_spec


class TestYaml:
    def write(self, text: str) -> str:
        Path("run.yaml").write_text(text)
        return "--yaml-cfg run.yaml"

    def test_sections_types_and_switches(self) -> None:
        args = parse(
            self.write(
                "language_model:\n  moe_router_topk: 4\n  add_bias_linear: false\n  qk-layernorm: true\n"
                "model_parallel:\n  use_distributed_optimizer: true\n"
                "moe_aux_loss_coeff: 0.01\nno_check_for_nan_in_loss_and_grad: true\nadam_eps: 1e-6\n"
                "moe_layer_freq: '[0]*2+[1]*2'\nmoe_router_load_balancing_type: [aux_loss, seq_aux_loss]\nbf16: false\n"
            )
        )
        assert (args.moe_router_topk, args.moe_aux_loss_coeff, args.adam_eps) == (4, 0.01, 1e-6)
        assert args.add_bias_linear is False
        assert args.qk_layernorm
        assert args.use_distributed_optimizer
        assert args.check_for_nan_in_loss_and_grad is False
        assert args.bf16 is False
        assert args.moe_layer_freq == [0, 0, 1, 1]
        assert args.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"]

    def test_the_command_line_wins(self) -> None:
        args = parse(self.write("num_layers: 2\nlr: 3.0e-4\nmoe_router_topk: 1\nbf16: true\n"))
        assert (args.num_layers, args.lr, args.moe_router_topk) == (4, 1e-3, 1)
        assert args.bf16

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("num_expertz: 2", "unknown key 'num_expertz'; did you mean 'num_experts'?"),
            ("langauge_model: {}", "unknown key 'langauge_model'; did you mean 'language_model'?"),
            ("bf16: 1", "bf16: 1 must be true or false"),
            ("num_experts: 2.5", "num_experts: 2.5 is not a value of --num-experts"),
            ("num_experts: true", "num_experts: True is not a value of --num-experts"),
            ("normalization: BatchNorm", "'BatchNorm' is not one of LayerNorm, RMSNorm"),
            ("add_bias_linear: false\ndisable_bias_linear: true", "sets 'add_bias_linear' a second time"),
            ("language_model: {bf16: true}\nbf16: true", "key 'bf16' stands there twice"),
            ("- a", "must hold 'name: value' settings, not a list"),
            ("a: [", "is not YAML"),
            ("moe_aux_loss_coeff: [0.1, x]", "'x' is not a value of"),
        ],
    )
    def test_mistakes(self, text: str, message: str) -> None:
        assert message in refusal(self.write(text))

    @pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
    def test_every_configuration_of_the_project_is_complete(self, path: Path) -> None:
        args = parse_args(["--yaml-cfg", str(path), "--data-path", "corpus"], world_size=1)
        assert args.global_batch_size * args.seq_length == 1024
        assert args.lr_warmup_iters == 50
        assert args.lr == 3e-4

    def test_comparison_presets_have_the_shapes_they_are_named_for(self) -> None:
        shapes = {}
        for name in ("coarse", "fine"):
            args = parse_args(["--yaml-cfg", str(CONFIGS / f"{name}.yaml"), "--data-path", "corpus"], world_size=1)
            shapes[name] = (args.hidden_size, args.moe_ffn_hidden_size, args.num_experts, args.moe_router_topk)
        assert shapes == {"coarse": (512, 2048, 16, 2), "fine": (256, 256, 64, 8)}


def test_help_lists_the_trainers_and_the_plugins_flags() -> None:
    text = build_parser().format_help()
    assert all(flag in text for flag in ("--megascale", "--moe-router-topk", "--yaml-cfg", "--metrics-jsonl"))
