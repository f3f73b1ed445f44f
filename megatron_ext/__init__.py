"""MegaScale for stock Megatron-Core: `--megascale` replaces the experts of every MoE layer by paged ones.

``enable(config)`` before the model is built, ``disable()`` to undo. A script that has Megatron's arguments calls
``add_megascale_args(parser)`` and, after parsing, ``enable_from_args(args)``.
"""

from megatron_ext.arguments import add_megascale_args, config_from_args, enable_from_args
from megatron_ext.patches import disable, enable, is_enabled

__all__ = ["add_megascale_args", "config_from_args", "disable", "enable", "enable_from_args", "is_enabled"]
