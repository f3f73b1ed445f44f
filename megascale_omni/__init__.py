"""MegaScale: pages of mixture-of-experts models, so that they train where they do not fit.

Importing this package imports neither torch nor any training framework; public names are loaded on first use.
"""

from importlib import import_module

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS: dict[str, str] = {"recompile_nccl_topology": "megascale_omni.topology.recompile"}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
