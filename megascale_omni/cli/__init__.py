"""The ``megascale`` command.

A sub-command is a module with ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(args) -> exit code``, listed in
``COMMANDS``. Its imports at the top stay cheap (every command's module is loaded to print ``--help``): torch and the
like are imported in ``run``.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from megascale_omni import __version__

COMMANDS: tuple[str, ...] = tuple(
    f"megascale_omni.cli.{name}"
    for name in ("checkpoint", "clip", "compact", "env", "heat", "plan", "residency", "resize", "topology", "trace")
)


class Command(Protocol):
    """What the module of a sub-command defines."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; returns the exit code. A mistake of the user is a ``ValueError``."""


def build_parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of ``megascale`` with one sub-parser for each module named in ``commands``."""
    parser = argparse.ArgumentParser(prog="megascale", description="Mixture-of-experts training beyond device memory.")
    parser.add_argument("--version", action="version", version=f"megascale {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in commands:
        command = cast(Command, import_module(module))
        subparser = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``megascale`` with ``argv`` (default: the process's own arguments) and return its exit code.

    0: done; 1: a ``ValueError`` of the command, its message on stderr; 2: no command given. Arguments that argparse
    itself refuses, ``--help`` and ``--version`` leave through ``SystemExit``.
    """
    parser = build_parser(COMMANDS)
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    try:
        return args.run(args)
    except ValueError as error:
        print(f"megascale: error: {error}", file=sys.stderr)
        return 1
