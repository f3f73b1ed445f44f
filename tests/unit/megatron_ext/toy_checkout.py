"""A few lines that are laid out as Megatron-LM is, with the functions that are hooked and none of its code."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from types import ModuleType

FILES = {
    "megatron/training/__init__.py": """
        from .global_vars import get_args
        from .training import pretrain
    """,
    "megatron/training/global_vars.py": """
        ARGS = []

        def get_args():
            return ARGS[-1]

        def get_tensorboard_writer():
            return None
    """,
    "megatron/training/arguments.py": """
        import argparse

        def add_megatron_arguments(parser: argparse.ArgumentParser):
            parser.add_argument("--num-experts", type=int)
            parser.add_argument("--distributed-backend", default="gloo")
            parser.add_argument("--save")
            parser.add_argument("--load")
            parser.add_argument("--yaml-cfg")
            parser.add_argument("--ckpt-format")
            parser.add_argument("--async-save", action="store_true")
            parser.add_argument("--use-persistent-ckpt-worker", action="store_true")
            return parser

        def parse_args():
            args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
            if args.yaml_cfg:
                from .yaml_arguments import load_yaml
                args = load_yaml(args.yaml_cfg)
            return args

        def validate_args(args, defaults={}):
            print("stock validates", sorted(k for k in vars(args) if k.startswith("megascale"))[:1])
            return args
    """,
    "megatron/training/yaml_arguments.py": """
        def load_yaml(path):
            raise SystemExit("stock reads the file")
    """,
    "megatron/training/checkpointing.py": """
        def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                            non_persistent_ckpt=False):
            print("stock saves")

        def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg="load"):
            return 0, 0
    """,
    "megatron/core/dist_checkpointing/strategies/filesystem_async.py": """
        class FileSystemWriterAsync:
            def prepare_write_data(self, plan, planner):
                pass

            @staticmethod
            def write_preloaded_data(transform_list, local_proc_idx, write_bucket, results_queue, count_queue):
                pass
    """,
    "megatron/training/training.py": """
        import torch

        from .arguments import parse_args, validate_args
        from .checkpointing import save_checkpoint
        from .global_vars import ARGS

        def setup_model_and_optimizer(provider, model_type=None):
            from megatron_ext import is_enabled
            print("enabled", is_enabled())
            return [], None, None

        def calc_params_l2_norm(model):
            return 0.0

        def training_log(losses, iteration):
            print("stock logs", iteration)

        def pretrain(provider):
            args = parse_args()
            validate_args(args)
            ARGS.append(args)
            print("device", torch.zeros(1, device=torch.cuda.current_device()).device, torch.cuda.is_available())
            setup_model_and_optimizer(provider)
            print("the script's device", provider().device)
            training_log({}, 3)
            save_checkpoint(3, [], None, None, 0)
    """,
    "pretrain_toy.py": """
        import sys

        import torch
        from megatron.training import pretrain

        assert sys.argv[0] == __file__, (sys.argv, __file__)

        def provider():
            return torch.zeros(1, device="cuda").cuda()

        if __name__ == "__main__":
            pretrain(provider)
            from megatron_ext import is_enabled
            print("at the end", is_enabled())
    """,
}


def write_checkout(root: Path, **changed: str) -> Path:
    """Writes it (``changed``: other contents by file name without folder and suffix); returns the script."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(changed.get(path.stem, text)))
    return root / "pretrain_toy.py"


def toy_module(name: str) -> ModuleType:
    """One of its modules, by name, executed without those that it imports from beside it."""
    text = dedent(FILES[f"{name.replace('.', '/')}.py"])
    lines = [line for line in text.splitlines() if not line.startswith("from .")]
    module = ModuleType(name)
    exec(compile("\n".join(lines), name, "exec"), vars(module))
    return module
