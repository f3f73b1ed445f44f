"""Hugging Face MoE models under stock DeepSpeed and with the megascale section: models, state, step-by-step proof."""
