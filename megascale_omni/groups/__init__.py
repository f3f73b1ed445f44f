"""Dynamic expert groups: who computes which tokens of which experts, and what travels for it."""
