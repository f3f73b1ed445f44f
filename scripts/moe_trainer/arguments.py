"""From a command line and a YAML file to one checked namespace.

Nothing here imports megatron-core: a mistake is reported in the second that importing it would take.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import megatron_ext

from .errors import UsageError
from .flags import add_all_flags
from .validation import fill_in_and_check
from .yaml_config import read_yaml


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every rank reports in the same way, and suggests the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def actions(self) -> list[argparse.Action]:
        return list(self._actions)


def build_parser() -> _Parser:
    """Return the parser with Megatron-LM's flags, ours, and those of the plug-in."""
    parser = _Parser(prog="pretrain_moe.py", description="Train a GPT mixture-of-experts model.", allow_abbrev=False)
    parser.add_argument("--yaml-cfg", metavar="FILE", help="settings under the flags' names; flags given here win")
    add_all_flags(parser)
    extended = megatron_ext.add_megascale_args(parser)
    assert isinstance(extended, _Parser)
    for action in extended.actions():
        said, has_value = action.help or "", action.nargs != 0 and action.default not in (None, argparse.SUPPRESS)
        if has_value and "default" not in said:
            action.help = f"{said} (default %(default)s)".strip()
    return extended


def parse_args(argv: Sequence[str] | None = None, *, world_size: int | None = None) -> argparse.Namespace:
    """Parse `argv` (default: the process's own), fill in what Megatron-LM derives, and check that it fits together.

    Args:
        argv: flags without the program name.
        world_size: number of ranks; default: that of the initialised process group, else of the launcher.

    Raises:
        UsageError: an unknown flag or key (with the nearest one), a bad value, values that do not fit together.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    yaml_path, _ = _YAML_ONLY.parse_known_args(argv)
    if yaml_path.yaml_cfg is not None:
        parser.set_defaults(**read_yaml(yaml_path.yaml_cfg, parser.actions()))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError(_unknown_flags(unknown, parser.flags()))
    args.argv = argv
    fill_in_and_check(args, world_size=_world_size() if world_size is None else world_size)
    try:
        megatron_ext.config_from_args(args)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return args


_YAML_ONLY = _Parser(add_help=False, allow_abbrev=False)
_YAML_ONLY.add_argument("--yaml-cfg")


def _world_size() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def _unknown_flags(unknown: Sequence[str], known: Sequence[str]) -> str:
    word = unknown[0].split("=")[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}: settings are given as --flag value (see --help)"
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"unknown flag {word}" + (f"; did you mean {nearest[0]}?" if nearest else " (see --help)")
