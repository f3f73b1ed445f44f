"""Checkpoints that are whole or not there, load on any number of ranks, and are written beside training."""
