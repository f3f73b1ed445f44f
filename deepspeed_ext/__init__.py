"""MegaScale for stock DeepSpeed: experts of Hugging Face models in pages.

``import deepspeed_ext`` and ``"megascale": {"enabled": true}`` in the DeepSpeed configuration are all there is to add;
``deepspeed.initialize`` and the training loop stay as they are. :func:`disable` takes it back.
"""

from deepspeed_ext.patches import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled"]

enable()
