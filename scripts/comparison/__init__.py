"""Stock and MegaScale trained side by side: what `compare_with_stock.py` runs, measures and shows."""
