"""Parameters that are gathered while the next forward pass computes (`--overlap-param-gather`), or before it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig


class ParameterSync:
    """Gathers of `model`'s chunks, where they overlap with the forward pass (`overlaps`); nothing elsewhere.

    As stock: the first step gathers nothing, so that a broken start does not spread. `resume` after it.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], config: TransformerConfig, *, overlaps: bool) -> None:
        self._model, self._config, self._overlaps = model, config, overlaps
        self._paused = False
        if overlaps:
            self._pause(synchronise=False)

    def _pause(self, *, synchronise: bool) -> None:
        for chunk in self._model:
            chunk.disable_forward_pre_hook(param_sync=synchronise)
        self._function, self._config.param_sync_func = self._config.param_sync_func, None
        self._paused = True

    def resume(self) -> None:
        """From here on forward passes gather again, if they do at all."""
        if not self._paused:
            return
        for chunk in self._model:
            chunk.enable_forward_pre_hook()
        self._config.param_sync_func = self._function
        self._paused = False

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """Where parameters are gathered while the next forward pass computes, gather them now instead."""
        if not self._overlaps or self._paused:
            yield
            return
        self._pause(synchronise=True)
        yield
        self.resume()
