"""Parts of `scripts/demonstrate_cmsa.py`."""
