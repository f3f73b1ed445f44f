"""Programs of the project; run them from anywhere."""
