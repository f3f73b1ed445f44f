"""The DeepSpeed adapter of MegaScale.

There is no adapter in this package yet: importing it changes nothing, and a ``"megascale"`` section in a DeepSpeed
configuration has no effect. Training with paged experts works on Megatron-Core, see :mod:`megatron_ext`.
"""

__all__: list[str] = []
