"""Compiles every kernel for accelerators that need not be there, and says what became of it."""
