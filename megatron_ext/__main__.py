"""``torchrun ... -m megatron_ext SCRIPT FLAGS``; see :mod:`megatron_ext.megatron_lm.launcher`.

Nothing happens on import: processes that a checkpoint writer starts import this module again.
"""

if __name__ == "__main__":
    import sys

    from megatron_ext.megatron_lm.launcher import main

    sys.exit(main(sys.argv[1:], globals()))
