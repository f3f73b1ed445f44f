"""What is computed from the pages."""
