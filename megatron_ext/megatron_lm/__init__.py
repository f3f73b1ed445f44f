"""Unmodified Megatron-LM scripts: what is hooked into `megatron.training`, and how such scripts run on a CPU."""
