"""How hooks are put into Megatron-LM: by feature, never by version, and loudly where one is missing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

OURS = ("megatron_ext", "megascale_omni")
"""Packages whose ValueErrors are about what the user asked for."""


class MisuseError(ValueError):
    """A mistake on the command line: told once, without a traceback, by the launcher."""


@contextmanager
def users_mistakes() -> Iterator[None]:
    """What is a ValueError in here is the user's mistake."""
    try:
        yield
    except ValueError as error:
        raise MisuseError(str(error)) from error


@contextmanager
def mistakes_we_find() -> Iterator[None]:
    """A ValueError that MegaScale raises in here is the user's mistake, however deep in stock's code it is found.

    Stock's `build_module` raises what it catches anew at every level, with the class that was being made behind it.
    """
    try:
        yield
    except ValueError as error:
        found: BaseException = error
        while found.__context__ is not None and str(found).startswith(f"{found.__context__} when instantiating "):
            found = found.__context__
        if isinstance(error, MisuseError) or not _raised_by_us(found):
            raise
        raise MisuseError(str(found)) from error


def _raised_by_us(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] in OURS


def missing(where: str, name: str, *, found: str = "") -> RuntimeError:
    """The error for a function that a hook needs and that a release does not have, or has in another shape."""
    what = f"has no {name!r}" if not found else f"has {name}({found})"
    return RuntimeError(
        f"{where} {what}, which MegaScale hooks into: this release of Megatron-LM is not known. "
        "docs/MEGATRON_LM.md lists those that are"
    )


def wrap(
    owner: Any,  # noqa: ANN401 - a module or class of stock's
    name: str,
    wrapper: Callable[..., Any],
    *,
    takes: Sequence[str] = (),
) -> None:
    """Calls ``wrapper(original, ...)`` where ``owner.name`` was called.

    ``takes``: parameters that the wrapper counts on, by name.

    Raises:
        RuntimeError: there is no such function, or it lacks one of the parameters. Nothing is changed then.
    """
    where = str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner)))
    original = getattr(owner, name, None)
    if not callable(original):
        raise missing(where, name)
    parameters = inspect.signature(original).parameters
    if any(parameter not in parameters for parameter in takes):
        raise missing(where, name, found=", ".join(parameters))

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the stock function's own
        return wrapper(original, *args, **kwargs)

    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(call) if static else call)


def argument(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """The value that a call of ``function`` gives to the parameter ``name``; its default where it gives none."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]
