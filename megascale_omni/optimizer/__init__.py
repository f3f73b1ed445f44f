"""Optimizer state of paged experts: what each applied step was, and the operations that carry it out."""
