"""Code that names the accelerator, with other words in it (see :mod:`megatron_ext.megatron_lm.standin`)."""

from __future__ import annotations

from types import CodeType

from megatron_ext.megatron_lm.standin import NAME

_TENSOR_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "DoubleTensor", "LongTensor", "IntTensor")
_TENSORS = {f"torch.cuda.{name}": f"torch.{name}" for name in _TENSOR_TYPES}
_STRINGS = {"cuda": "cpu", "cuda:": "cpu:", "cuda:0": "cpu:0", **_TENSORS}


def reword(code: CodeType) -> CodeType:
    """``code`` with attribute ``cuda`` and strings that name the device replaced, in everything nested too."""
    return code.replace(
        co_names=tuple(NAME if name == "cuda" else name for name in code.co_names),
        co_consts=tuple(_constant(value) for value in code.co_consts),
    )


def _constant(value: object) -> object:
    if isinstance(value, CodeType):
        return reword(value)
    if isinstance(value, str):
        return _STRINGS.get(value, value)
    if isinstance(value, tuple):
        return tuple(_constant(item) for item in value)
    if isinstance(value, frozenset):
        return frozenset(_constant(item) for item in value)
    return value
