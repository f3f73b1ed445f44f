"""The errors that a user can mend."""


class UsageError(ValueError):
    """A mistake in flags, configuration, data or checkpoint, raised on every rank.

    The message names the value and the remedy.
    """


class LocalUsageError(UsageError):
    """Such a mistake that struck this rank and perhaps not the others, which may be waiting for it."""


def without_places(error: BaseException) -> BaseException:
    """The error without what Megatron-Core's `build_module` adds at every level: the class that was being made."""
    while error.__context__ is not None and str(error).startswith(f"{error.__context__} when instantiating "):
        error = error.__context__
    return error
