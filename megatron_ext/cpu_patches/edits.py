"""The kinds of edit that the CPU patches are made of.

[Note: rewording code objects]
Stock names the accelerator inside function bodies: `torch.cuda.current_device()`, `device='cuda'`, `.cuda()`,
`'torch.cuda.FloatTensor'`. `torch.cpu` offers the same calls for the CPU, so what these functions need is one word
changed. `Reword` does exactly that: it gives the function a copy of its own code object in which a name or a string
constant is replaced. The function object stays the same one, hence every `from ... import` of it, every subclass and
every bound method sees the change; nothing outside the function does; and a call costs what it cost before. Wrapping
`torch.zeros` or `torch.Tensor.to` instead would touch every caller in the process and slow each of them.
"""

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

StockObject = Any
"""An object of stock's, which has no types that a checker could read."""


class Edit(Protocol):
    """One reversible change of one place in stock."""

    @property
    def target(self) -> str:
        """Where the change is, as `module:qualified.name`."""
        ...

    def apply(self) -> None:
        """Make the change. Raises RuntimeError, and changes nothing, if the target is not what it expects."""
        ...

    def undo(self) -> None:
        """Put back the very object that `apply` found."""
        ...


def _unexpected(target: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"CPU patch target {target} is not what it expects: {what}. This release of megatron-core differs from the one "
        "the patch was written for (0.16.1); leave the patch out by name or install that release."
    )


def _resolve_owner(module: str, qualname: str) -> tuple[object, str]:
    """Return the object whose own attribute `qualname` names, and the attribute's name."""
    owner: object = importlib.import_module(module)
    *path, name = qualname.split(".")
    for part in path:
        if not hasattr(owner, part):
            raise _unexpected(f"{module}:{qualname}", f"there is no {part!r}")
        owner = getattr(owner, part)
    return owner, name


def _resolve_function(module: str, qualname: str) -> FunctionType:
    """Return the plain function that `qualname` names, beneath decorators that keep `__wrapped__`."""
    owner, name = _resolve_owner(module, qualname)
    if name not in vars(owner):
        raise _unexpected(f"{module}:{qualname}", f"there is no {name!r}")
    found = inspect.unwrap(getattr(owner, name))
    found = getattr(found, "__func__", found)
    if not isinstance(found, FunctionType):
        raise _unexpected(f"{module}:{qualname}", f"it is a {type(found).__name__}, not a function")
    return found


def _reword_constant(value: object, words: Mapping[str, str], seen: set[str]) -> object:
    if isinstance(value, str) and value in words:
        seen.add(value)
        return words[value]
    if isinstance(value, tuple):
        return tuple(_reword_constant(item, words, seen) for item in value)
    return value


def _reword_code(code: CodeType, *, names: Mapping[str, str], constants: Mapping[str, str], seen: set[str]) -> CodeType:
    """Return `code` with attribute names and string constants replaced, in nested functions too."""
    seen.update(name for name in code.co_names if name in names)
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(
            _reword_code(value, names=names, constants=constants, seen=seen)
            if isinstance(value, CodeType)
            else _reword_constant(value, constants, seen)
            for value in code.co_consts
        ),
    )


class _CodeEdit:
    """Swap the code object of one stock function; see [Note: rewording code objects]."""

    def __init__(self, module: str, qualname: str) -> None:
        self._module, self._qualname = module, qualname
        self._original: tuple[FunctionType, CodeType] | None = None

    @property
    def target(self) -> str:
        return f"{self._module}:{self._qualname}"

    def _new_code(self, function: FunctionType) -> CodeType:
        raise NotImplementedError

    def apply(self) -> None:
        function = _resolve_function(self._module, self._qualname)
        code = self._new_code(function)
        self._original = (function, function.__code__)
        function.__code__ = code

    def undo(self) -> None:
        if self._original is not None:
            function, code = self._original
            function.__code__ = code
            self._original = None


class Reword(_CodeEdit):
    """Replace words in one function: attribute `names` and whole string `constants`. Each must occur at least once."""

    def __init__(
        self,
        module: str,
        qualname: str,
        *,
        names: Mapping[str, str] | None = None,
        constants: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(module, qualname)
        self._names, self._constants = dict(names or {}), dict(constants or {})

    def _new_code(self, function: FunctionType) -> CodeType:
        names_seen: set[str] = set()
        constants_seen: set[str] = set()
        code = _reword_code(function.__code__, names=self._names, constants={}, seen=names_seen)
        code = _reword_code(code, names={}, constants=self._constants, seen=constants_seen)
        missing = (self._names.keys() - names_seen) | (self._constants.keys() - constants_seen)
        if missing:
            raise _unexpected(self.target, f"its body does not contain {sorted(missing)}")
        return code


class NewBody(_CodeEdit):
    """Give one function another body. `body` runs with the stock module's globals and must take the same parameters."""

    def __init__(self, module: str, qualname: str, body: Callable[..., object]) -> None:
        super().__init__(module, qualname)
        self._body = body

    def _new_code(self, function: FunctionType) -> CodeType:
        assert isinstance(self._body, FunctionType)
        stock, ours = list(inspect.signature(function).parameters), list(inspect.signature(self._body).parameters)
        if stock != ours:
            raise _unexpected(self.target, f"its parameters are {stock}, not {ours}")
        if function.__code__.co_freevars:
            raise _unexpected(self.target, f"it closes over {function.__code__.co_freevars}")
        return self._body.__code__


class Wrap:
    """Call one function through another, which gets the original as its first argument.

    Only callers that look the name up at the call see the wrapper; those that imported it before do not.
    """

    def __init__(self, module: str, qualname: str, wrapper: Callable[..., object]) -> None:
        self._module, self._qualname, self._wrapper = module, qualname, wrapper
        self._wrapped: tuple[object, str, object] | None = None

    @property
    def target(self) -> str:
        return f"{self._module}:{self._qualname}"

    def apply(self) -> None:
        original = _resolve_function(self._module, self._qualname)
        owner, name = _resolve_owner(self._module, self._qualname)
        if vars(owner)[name] is not original:
            raise _unexpected(self.target, "it is decorated")
        wrapper = self._wrapper

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            return wrapper(original, *args, **kwargs)

        self._wrapped = (owner, name, original)
        setattr(owner, name, call)

    def undo(self) -> None:
        if self._wrapped is not None:
            setattr(*self._wrapped)
            self._wrapped = None


class Bind:
    """Bind a module or class attribute that stock leaves unbound."""

    def __init__(self, module: str, qualname: str, value: object) -> None:
        self._module, self._qualname, self._value = module, qualname, value
        self._bound: tuple[object, str] | None = None

    @property
    def target(self) -> str:
        return f"{self._module}:{self._qualname}"

    def apply(self) -> None:
        owner, name = _resolve_owner(self._module, self._qualname)
        if name in vars(owner):
            raise _unexpected(self.target, "it is already bound")
        setattr(owner, name, self._value)
        self._bound = (owner, name)

    def undo(self) -> None:
        if self._bound is not None:
            delattr(*self._bound)
            self._bound = None


class Keep:
    """Put a module or class attribute back on undo: stock itself fills it while the patches are in force."""

    def __init__(self, module: str, qualname: str) -> None:
        self._module, self._qualname = module, qualname
        self._found: tuple[object, str, object] | None = None

    @property
    def target(self) -> str:
        return f"{self._module}:{self._qualname}"

    def apply(self) -> None:
        owner, name = _resolve_owner(self._module, self._qualname)
        if name not in vars(owner):
            raise _unexpected(self.target, f"there is no {name!r}")
        self._found = (owner, name, vars(owner)[name])

    def undo(self) -> None:
        if self._found is not None:
            setattr(*self._found)
            self._found = None


class Uncompile:
    """Use functions that stock wraps in `torch.compile` as they were written, wherever a stock module holds them."""

    def __init__(self, module: str, *qualnames: str) -> None:
        self._module, self._qualnames = module, qualnames
        self._swapped: list[tuple[object, object, object]] = []

    @property
    def target(self) -> str:
        return f"{self._module}:{','.join(self._qualnames)}"

    def apply(self) -> None:
        swaps: list[tuple[object, object, object]] = []
        for qualname in self._qualnames:
            owner, name = _resolve_owner(self._module, qualname)
            if name not in vars(owner):
                raise _unexpected(f"{self._module}:{qualname}", f"there is no {name!r}")
            compiled = vars(owner)[name]
            plain = getattr(compiled, "_torchdynamo_orig_callable", None)
            if plain is not None:  # None: compilation was already off when stock was imported
                swaps.append((owner, compiled, plain))
        for owner, compiled, plain in swaps:
            _swap_everywhere(owner, old=compiled, new=plain)
        self._swapped = swaps

    def undo(self) -> None:
        for owner, compiled, plain in self._swapped:
            _swap_everywhere(owner, old=plain, new=compiled)
        self._swapped = []


def _swap_everywhere(owner: object, *, old: object, new: object) -> None:
    """Replace `old` in the class that owns it or, where a module does, in every stock module that imported it."""
    holders: list[object] = [owner]
    if isinstance(owner, ModuleType):
        holders = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core")]
    for holder in holders:
        for attribute in [key for key, value in vars(holder).items() if value is old]:
            setattr(holder, attribute, new)


class Mute(logging.Filter):
    """Drop one warning that is always wrong on CPU."""

    def __init__(self, logger: str, message: str) -> None:
        super().__init__()
        self._logger, self._message = logger, message

    @property
    def target(self) -> str:
        return f"logger {self._logger}"

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != self._message

    def apply(self) -> None:
        logging.getLogger(self._logger).addFilter(self)

    def undo(self) -> None:
        logging.getLogger(self._logger).removeFilter(self)
