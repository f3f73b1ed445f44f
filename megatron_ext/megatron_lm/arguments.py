"""The ``--megascale*`` flags in Megatron-LM's own parser."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from megascale_omni.config import MegaScaleConfig
from megatron_ext import support
from megatron_ext.arguments import add_megascale_args, check_supported, config_from_args
from megatron_ext.checkpoint_folders import check_formats, check_load
from megatron_ext.megatron_lm.hooks import MisuseError, users_mistakes, wrap

PREFIX = "--megascale"
LIKENESS = 0.85
"""Of a flag's first letters to ours, from which on it is taken for one of ours; stock's nearest, `--mscale`: 0.84."""


def known_flags() -> tuple[str, ...]:
    """All flags of MegaScale."""
    parser = add_megascale_args(argparse.ArgumentParser(add_help=False))
    return tuple(sorted(flag for action in parser._actions for flag in action.option_strings))


def check_spelling(argv: Sequence[str]) -> None:
    """Refuses a flag that begins much as ours do and is none, with the one that was probably meant.

    Raises:
        MisuseError: names the flag.
    """
    known = known_flags()
    for word in argv:
        flag = word.partition("=")[0]
        if flag in known or not _means_us(flag):
            continue
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
        meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
        raise MisuseError(f"{flag} is no flag of MegaScale{meant}")


def _means_us(flag: str) -> bool:
    if flag.startswith(PREFIX):
        return True
    head = flag[: len(PREFIX)]
    return flag.startswith("--") and difflib.SequenceMatcher(None, head, PREFIX).ratio() >= LIKENESS


def wants(argv: Sequence[str]) -> bool:
    """Whether a command line asks for MegaScale."""
    return PREFIX in argv


def hook(module: ModuleType) -> None:
    """Adds the flags to ``megatron.training.arguments``' parser and checks them with the others."""
    wrap(module, "add_megatron_arguments", _add, takes=("parser",))
    wrap(module, "validate_args", _validate, takes=("args",))


def hook_yaml(module: ModuleType) -> None:
    """``--yaml-cfg`` replaces all flags, and ours with them, by a file that Megatron-LM reads itself."""
    wrap(module, "load_yaml", _load_yaml)


def _add(original: Callable[..., Any], parser: argparse.ArgumentParser, **kwargs: Any) -> Any:  # noqa: ANN401
    check_spelling(sys.argv[1:])
    return add_megascale_args(original(parser, **kwargs))


def _load_yaml(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    if wants(sys.argv[1:]):
        raise MisuseError("--yaml-cfg is not supported with --megascale, which it would drop: give flags instead")
    return original(*args, **kwargs)


def _validate(original: Callable[..., Any], args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    with users_mistakes():
        config = config_from_args(args)
        if config is not None:
            _check_formats(args, config)
            _check_experts(args, needs_experts=not config.clip.skips_nonfinite)
    if not torch.cuda.is_available():
        _check_without_accelerator(args)
    result = original(args, *rest, **kwargs)
    if config is not None:
        with users_mistakes():
            check_supported(args, config)
            if getattr(args, "load", None):
                check_load(args.load, step=getattr(args, "ckpt_step", None))
    return result


_NEEDS_STOCKS_FORMAT = {
    "use_checkpoint_args": "give the model's flags; they are compared with the checkpoint's",
    "skip_train": "convert it with `megascale checkpoint convert`, and load what that makes",
}


def _check_formats(args: argparse.Namespace, config: MegaScaleConfig) -> None:
    asked = {f"--{n.replace('_', '-')}": do for n, do in _NEEDS_STOCKS_FORMAT.items() if getattr(args, n, False)}
    load, save = getattr(args, "load", None), getattr(args, "save", None)
    check_formats(load=load, save=save, paged=config.checkpoint.format == "paged", asked=asked)


def _check_without_accelerator(args: argparse.Namespace) -> None:
    """What would fail late, or not at all and wait, whether MegaScale is asked for or not."""
    if getattr(args, "distributed_backend", None) == "nccl":
        raise MisuseError("--distributed-backend nccl needs an accelerator: add --distributed-backend gloo")
    if getattr(args, "async_save", False) and getattr(args, "use_persistent_ckpt_worker", False):
        raise MisuseError(
            "--use-persistent-ckpt-worker needs an accelerator: stock's worker ends without one, and training waits "
            "for it; leave it out"
        )


def _check_experts(args: argparse.Namespace, *, needs_experts: bool) -> None:
    """Before stock's own checks, which speak of other things first."""
    if needs_experts and not getattr(args, "num_experts", None):
        raise ValueError("--megascale needs a mixture-of-experts model: give --num-experts, or leave --megascale out")
    support.check_shared_out(args)
