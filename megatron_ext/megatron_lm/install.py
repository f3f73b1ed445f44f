"""Puts the hooks where Megatron-LM will be imported from."""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import torch

from megatron_ext.megatron_lm import arguments, checkpointing, cpu, norms, session, standin, writing
from megatron_ext.megatron_lm.imports import CheckoutFinder, Hook, checkout_root
from megatron_ext.megatron_lm.reword import reword

HOOKS: dict[str, tuple[Hook, ...]] = {
    "megatron.training.arguments": (arguments.hook,),
    "megatron.training.yaml_arguments": (arguments.hook_yaml,),
    "megatron.training.training": (session.hook, norms.hook),
    "megatron.training.checkpointing": (checkpointing.hook,),
    "megatron.core.dist_checkpointing.strategies.filesystem_async": (writing.hook,),
}
"""What MegaScale hooks into, by module of Megatron-LM."""


def install(root: Path | None = None, *, megascale: bool = True) -> CheckoutFinder | None:
    """Hooks into the checkout ``root`` (default: the one on ``sys.path``); None where there is none.

    Without an accelerator, code of the checkout is reworded and repaired to run on the CPU (megascale or not).

    Raises:
        RuntimeError: parts of the checkout were imported already.
    """
    installed = active()
    root = root or checkout_root()
    if root is None or (installed is not None and installed.root == root.resolve()):
        return installed
    early = [name for name in sorted(sys.modules) if name.startswith("megatron.") and _is_of(name, root)]
    if early:
        raise RuntimeError(f"megatron_ext must be imported before Megatron-LM, but {early[0]} is imported already")
    if installed is not None:
        sys.meta_path.remove(installed)
    hooks: dict[str, list[Hook]] = {}
    if megascale:
        hooks = {name: list(of_module) for name, of_module in HOOKS.items()}
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        standin.install()
        for name, repair in cpu.REPAIRS.items():
            hooks.setdefault(name, []).insert(0, repair)
    if sys.version_info < (3, 12) and not hasattr(typing, "override"):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]  # all that main needs of 3.12
    finder = CheckoutFinder(root, hooks=hooks, rewords=reword if on_cpu else None)
    sys.meta_path.insert(0, finder)
    return finder


def active() -> CheckoutFinder | None:
    """What is installed."""
    return next((finder for finder in sys.meta_path if isinstance(finder, CheckoutFinder)), None)


def uninstall() -> None:
    """Modules that are imported from now on are stock's; those that were stay as they are."""
    finder = active()
    if finder is not None:
        sys.meta_path.remove(finder)


def _is_of(module: str, root: Path) -> bool:
    file = getattr(sys.modules[module], "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(root)
