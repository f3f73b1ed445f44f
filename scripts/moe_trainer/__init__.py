"""A GPT mixture-of-experts trainer on megatron-core alone, with Megatron-LM's flag names.

`Trainer(parse_args(argv))` is the whole of it; `scripts/pretrain_moe.py` is its command line. Importing the package
imports neither torch nor megatron-core.
"""
