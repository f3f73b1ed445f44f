"""The errors that a user can mend."""


class UsageError(ValueError):
    """A mistake in flags, configuration, data or checkpoint, raised on every rank.

    The message names the value and the remedy.
    """


class LocalUsageError(UsageError):
    """Such a mistake that struck this rank and perhaps not the others, which may be waiting for it."""
