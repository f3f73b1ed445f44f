"""Pictures that a person reads at a glance. They need matplotlib, which is imported where they are drawn."""
