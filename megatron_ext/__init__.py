"""MegaScale for stock Megatron-Core: `--megascale` replaces the experts of every MoE layer by paged ones.

``enable(config)`` before the model is built, ``disable()`` to undo. A script that has Megatron's arguments calls
``add_megascale_args(parser)`` and, after parsing, ``enable_from_args(args)``. A script of Megatron-LM needs none of
this: ``import megatron_ext`` as its first line is enough, or ``python -m megatron_ext SCRIPT`` without any edit.
"""

from megatron_ext.arguments import add_megascale_args, config_from_args, enable_from_args
from megatron_ext.megatron_lm.install import install
from megatron_ext.megatron_lm.launcher import end_scripts_alike
from megatron_ext.patches import disable, enable, is_enabled

if install() is not None:  # None where there is no checkout of Megatron-LM on sys.path
    end_scripts_alike()

__all__ = ["add_megascale_args", "config_from_args", "disable", "enable", "enable_from_args", "is_enabled"]
