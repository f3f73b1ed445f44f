"""Heat: which experts are used how much, and what follows from it for their pages."""
