"""Runs of Megatron-LM's own scripts, with and without `--megascale`."""
