"""Models larger than memory: while a model is built or loaded, its experts go into pages layer by layer.

    with deepspeed_ext.init("ds_config.json"):
        model = AutoModelForCausalLM.from_pretrained(folder)

[Note: how experts stream]
Inside the block Hugging Face's experts modules keep their parameters on the meta device. What ``from_pretrained`` would
have put into a parameter, and what random initialisation makes, is taken when all tensors of a module are there, cut
into pages and forgotten: one module at a time is in memory. At the end of the block the modules are replaced by paged
ones. Tensors are read one after the other, not by threads that run ahead. What is no expert is whole on every rank,
also where a live HfDeepSpeedConfig says ZeRO 3; deepspeed.initialize partitions it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepspeed_ext import support
from deepspeed_ext.config import section_of
from deepspeed_ext.convert import Dtypes, replace_module
from deepspeed_ext.experts import HfExperts
from deepspeed_ext.hf_config import unheard
from deepspeed_ext.recognise import describe, is_hf_experts
from deepspeed_ext.run import Run, run_for

_LOADS_IN_ORDER = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}


@contextmanager
def init(config: str | Path | Mapping[str, Any]) -> Iterator[None]:
    """Builds and loads Hugging Face models with their experts in pages; see the module. A collective of all ranks.

    Args:
        config: the DeepSpeed configuration that the model will be trained with (a dict, or a JSON file).

    Raises:
        ValueError: a bad section, something that it does not support, or ``deepspeed.zero.Init`` in force as well.
    """
    values = dict(config) if isinstance(config, Mapping) else _read(Path(config))
    section = section_of(values)
    if section is None:
        yield
        return
    _refuse_auto(values)
    support.check(values, mpu=None)
    _refuse_zero_init()
    import deepspeed

    deepspeed.init_distributed(dist_backend=deepspeed.get_accelerator().communication_backend_name())
    run = run_for(section)
    builder = _Builder(run, Dtypes.of_config(values))
    try:
        with builder.in_force():
            yield
        builder.finish()
    except BaseException:
        run.close()
        raise
    if not run.manager.modules:  # nobody will have it
        run.close()


def _read(path: Path) -> dict[str, Any]:
    """Raises ValueError for a file that is no DeepSpeed configuration."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"DeepSpeed configuration {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"DeepSpeed configuration {path} must be a JSON object, not a {type(values).__name__}")
    return values


def _refuse_auto(values: Mapping[str, Any]) -> None:
    """A Trainer fills in "auto", but after the model was built: pages need to know their dtype before."""
    for name in ("bf16", "bfloat16", "fp16"):
        if (values.get(name) or {}).get("enabled") == "auto":
            raise ValueError(
                f'{name}.enabled="auto" is not known yet when a model is built under deepspeed_ext.init; write true or '
                "false"
            )


def _refuse_zero_init(*_: object) -> None:
    """Also what stands for zero.Init's beginning while a block lasts, whose own beginning comes before that."""
    from deepspeed.runtime.zero import partition_parameters

    if _ or partition_parameters.zero_init_context:
        raise ValueError(
            "deepspeed.zero.Init and deepspeed_ext.init cannot both build a model; leave one of them out (under "
            "deepspeed_ext.init the rest of the model is whole until deepspeed.initialize)"
        )


class _Builder:
    """What happens to experts modules between their construction and the end of the block."""

    def __init__(self, run: Run, dtypes: Dtypes) -> None:
        self._run, self._dtypes = run, dtypes
        self._numbers = itertools.count()
        self._models: list[torch.nn.Module] = []
        self._arrived: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        self._paged: dict[torch.nn.Module, HfExperts] = {}

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Patches for the length of the block."""
        from deepspeed import zero
        from transformers import PreTrainedModel, core_model_loading, modeling_utils

        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.nn.Module, "register_parameter", self._register_parameter),
            (PreTrainedModel, "post_init", self._post_init),
            (PreTrainedModel, "_initialize_weights", self._initialize_weights),
            (core_model_loading, "set_param_for_module", self._set_param_for_module),
            (modeling_utils, "safe_open", _reads_instead_of_mapping),
            (zero.Init, "__enter__", _refuse_zero_init),
        ]
        with ExitStack() as stack:
            stack.enter_context(unheard())
            stack.enter_context(mock.patch.dict(os.environ, _LOADS_IN_ORDER))
            for owner, name, ours in places:
                stack.enter_context(mock.patch.object(owner, name, _around(getattr(owner, name), ours)))
            yield

    def finish(self) -> None:
        """Replaces the modules.

        Raises:
            ValueError: two models with experts. RuntimeError: a module whose tensors have not all arrived.
        """
        self._refuse_two_models()
        for model in reversed(self._models):  # a model is recorded after its parts
            for path, module in list(model.named_modules()):
                if not is_hf_experts(module):
                    continue
                if module not in self._paged:
                    got = ", ".join(sorted(self._arrived.get(module, {}))) or "none"
                    raise RuntimeError(f"{path}: not all weights of the experts have arrived (those that have: {got})")
                experts = self._paged[module]
                experts.train(module.training)
                self._run.manager.numbering.rename(experts.pages.entry.module, path)
                replace_module(model, module, experts)

    def _refuse_two_models(self) -> None:
        """An engine has all pages of a block."""
        parts = {id(part) for model in self._models for part in model.modules() if part is not model}
        whole = [model for model in self._models if id(model) not in parts]
        found = [type(model).__name__ for model in whole if any(is_hf_experts(part) for part in model.modules())]
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} models with experts ({', '.join(found)}) were built in one deepspeed_ext.init block; "
                "give each a block of its own"
            )

    # -- what stock's functions become

    def _register_parameter(self, stock: Callable[..., None], module: torch.nn.Module, name: str, value: Any) -> None:  # noqa: ANN401
        if value is not None and hasattr(type(module), "_apply_gate") and not value.is_meta:
            value = torch.nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
        stock(module, name, value)

    def _post_init(self, stock: Callable[..., None], model: torch.nn.Module) -> None:
        self._models.append(model)
        stock(model)

    def _initialize_weights(
        self, stock: Callable[..., None], model: torch.nn.Module, module: torch.nn.Module, is_custom_code: bool = False
    ) -> None:
        if not is_hf_experts(module):
            stock(model, module, is_custom_code)
        elif module not in self._paged:
            missing = {n: p for n, p in module._parameters.items() if n not in self._arrived.get(module, {})}
            for name, parameter in missing.items():
                assert parameter is not None
                module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            stock(model, module, is_custom_code)
            for name, parameter in missing.items():
                filled = module._parameters[name]
                assert filled is not None
                module._parameters[name] = parameter
                self._arrive(module, name, filled.detach())

    def _set_param_for_module(
        self,
        stock: Callable[..., None],
        model: torch.nn.Module,
        target_name: str,
        param_value: torch.Tensor,
        loading_info: Any,  # noqa: ANN401 - transformers' own
        hf_quantizer: Any,  # noqa: ANN401
    ) -> None:
        path, _, name = target_name.rpartition(".")
        module = model.get_submodule(path) if path else model
        if not is_hf_experts(module) or name not in module._parameters:
            stock(model, target_name, param_value, loading_info, hf_quantizer)
            return
        placeholder = module._parameters[name]
        assert placeholder is not None
        if placeholder.shape != param_value.shape:
            loading_info.mismatched_keys.add((target_name, param_value.shape, placeholder.shape))
            return
        loading_info.missing_keys.discard(target_name)
        placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
        self._arrive(module, name, param_value.detach())

    # -- pages

    @torch.no_grad()
    def _arrive(self, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        arrived = self._arrived.setdefault(module, {})
        arrived[name] = tensor
        if arrived.keys() != set(module._parameters):
            return
        path = f"experts#{next(self._numbers)}"
        described = describe(path, module)
        dtype, gradient_dtype = self._dtypes.of(path, tensor)
        experts = HfExperts(
            self._run,
            path=path,
            described=described,
            dtype=dtype,
            gradient_dtype=gradient_dtype,
            eager=getattr(module.config, "_experts_implementation", None) == "eager",
        )
        for expert in experts.owned:
            experts.take(expert, {n: value[expert : expert + 1] for n, value in arrived.items()})
        del self._arrived[module]
        self._paged[module] = experts


def _reads_instead_of_mapping(stock: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
    """Files are read a tensor at a time: mapped as stock maps them, all of them count as memory asked for."""
    if options.get("backend") == "mmap":
        options["backend"] = "pread"
    return stock(*args, **options)


def _around(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the stock function's own
        return ours(stock, *args, **kwargs)

    return replacement
