"""The proof that --megascale computes what stock computes: step by step, and over whole runs."""
