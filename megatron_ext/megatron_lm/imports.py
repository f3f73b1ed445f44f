"""What happens while a Megatron-LM checkout is imported: words are replaced on a CPU, hooks are put in place.

[Note: hooks at import]
A hook is applied at the end of its module's own execution, before anybody can import a name from it. So every
``from megatron.training.checkpointing import save_checkpoint`` gets the hooked function, and nobody has to be found and
changed afterwards. Only modules of the checkout are looked at, and no file of it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

Hook = Callable[[ModuleType], None]


class _Loader(SourceFileLoader):
    """Python's own loader, with changes to what it loads."""

    def __init__(
        self, fullname: str, path: str, *, rewords: Callable[[CodeType], CodeType] | None, hooks: list[Hook]
    ) -> None:
        super().__init__(fullname, path)
        self.rewords, self._hooks = rewords, hooks

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return code if code is None or self.rewords is None else self.rewords(code)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for hook in self._hooks:
            hook(module)


class CheckoutFinder(MetaPathFinder):
    """Finds modules of one checkout, as Python would, and gives them our loader.

    Args:
        root: the checkout. hooks: by module name; each is called with the module when it has been executed.
        rewords: what is done to code of the checkout; None: nothing.
    """

    def __init__(
        self, root: Path, *, hooks: Mapping[str, Sequence[Hook]], rewords: Callable[[CodeType], CodeType] | None
    ) -> None:
        self.root = root.resolve()
        self._prefix = str(self.root)
        self._hooks, self.rewords = dict(hooks), rewords
        self.applied: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if not self._may_own(fullname, path):
            return None  # not looked for a second time
        hooks = list(self._hooks.get(fullname, ()))
        if self.rewords is None and not hooks:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader) or not self._owns(spec):
            return None
        if hooks:
            self.applied.add(fullname)
        spec.loader = _Loader(fullname, spec.loader.path, rewords=self.rewords, hooks=hooks)
        return spec

    def _may_own(self, fullname: str, path: Sequence[str] | None) -> bool:
        if path is not None:
            return any(str(folder).startswith(self._prefix) for folder in path)
        return (self.root / fullname).is_dir() or (self.root / f"{fullname}.py").is_file()

    def _owns(self, spec: ModuleSpec) -> bool:
        return spec.origin is not None and Path(spec.origin).resolve().is_relative_to(self.root)


def checkout_root() -> Path | None:
    """The first folder on ``sys.path`` that holds ``megatron/training``; None where there is none."""
    for entry in sys.path:
        root = Path(entry or ".")
        if (root / "megatron" / "training" / "__init__.py").is_file():
            return root.resolve()
    return None
