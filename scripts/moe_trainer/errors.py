"""The one kind of error that a user can mend."""


class UsageError(ValueError):
    """A mistake in flags, configuration, data or checkpoint. The message names the value and the remedy."""
