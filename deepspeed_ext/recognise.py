"""What a stock experts module computes, as a frozen description; found out, never assumed.

Sizes and orientation come from the module's own declarations and are checked against its parameters. The activation is
found by trying: candidates are compared with the module's own gating function on numbers that reach every clamp. What
matches no candidate is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.paging.layout import ExpertShape
from megascale_omni.paging.names import NamingStyle

_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "squared_relu", "quick_gelu")
_PROBE_NEURONS = 64


@dataclass(frozen=True)
class Description:
    """A stock module of experts: sizes of one, their number, names of its tensors, activation, whether it trains."""

    shape: ExpertShape
    num_experts: int
    style: NamingStyle
    activation: Activation
    trainable: bool


def is_hf_experts(module: torch.nn.Module) -> bool:
    """Whether a module is one of Hugging Face's experts modules: 3-D parameters behind the experts interface."""
    declared = all(hasattr(module, name) for name in _DECLARED)
    return declared and ("down_proj" in module._parameters and _first(module) in module._parameters)


def _first(module: torch.nn.Module) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def describe(path: str, module: torch.nn.Module) -> Description:
    """The description of a Hugging Face experts module (see :func:`is_hf_experts`).

    Raises:
        ValueError: something that paged experts do not compute, by name.
    """
    gated, bias = bool(module.has_gate), bool(module.has_bias)
    transposed, concatenated = bool(module.is_transposed), bool(module.is_concatenated)
    _refuse_extras(path, module, bias=bias)
    num_experts, hidden, wide = _sizes(module, transposed=transposed)
    shape = ExpertShape(hidden=hidden, ffn=wide // 2 if gated else wide, gated=gated, bias=bias)
    style: NamingStyle = "hf_transposed" if transposed else "hf"
    if gated and not concatenated:
        style = "hf_gpt_oss" if transposed else "hf_interleaved"
    activation = find_activation(path, module, gated=gated, interleaved=gated and not concatenated)
    trains = {parameter.requires_grad for parameter in module.parameters()}
    if len(trains) > 1:
        raise ValueError(
            f"{path}: some of its tensors are frozen and some are not; with megascale the experts of a module train "
            "together: freeze all of them or none"
        )
    return Description(shape, num_experts, style, activation, trains.pop())


def _refuse_extras(path: str, module: torch.nn.Module, *, bias: bool) -> None:
    if module.has_post_expert_norm:
        raise ValueError(f"{path} ({type(module).__name__}): a norm after each expert is not supported with megascale")
    known = {_first(module), "down_proj"}
    if bias:
        known |= {f"{name}_bias" for name in known}
    found = {name for name, _ in module.named_parameters()}
    if found != known:
        raise ValueError(
            f"{path} ({type(module).__name__}) has the parameters {', '.join(sorted(found))}; megascale knows experts "
            f"with {', '.join(sorted(known))}"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(
            f"{path}: its experts are divided among ranks by transformers already; load the model without its "
            'expert parallelism and give "expert_parallel_size" in the megascale section'
        )


def _sizes(module: torch.nn.Module, *, transposed: bool) -> tuple[int, int, int]:
    """Experts, hidden size, and rows of an expert's first product."""
    parameter = module._parameters[_first(module)]
    assert parameter is not None
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # under zero.Init the tensor itself is empty
    return (shape[0], shape[1], shape[2]) if transposed else (shape[0], shape[2], shape[1])


def find_activation(path: str, module: torch.nn.Module, *, gated: bool, interleaved: bool) -> Activation:
    """The activation that a Hugging Face experts module applies between its products.

    Raises:
        ValueError: none of those that paged experts know.
    """
    probe_nR = _probe(_PROBE_NEURONS * (2 if gated else 1))
    given_nR = probe_nR
    if interleaved:  # ours is gate | up, the module's rows alternate
        given_nR = torch.stack(probe_nR.chunk(2, dim=1), dim=-1).flatten(1)
    apply: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate if gated else module.act_fn  # type: ignore[assignment]
    with torch.no_grad():
        expected_nr = apply(given_nR.clone())
    found = matching(expected_nr, probe_nR, gated=gated, limits=_limits(module), alphas=_alphas(module))
    if found is None:
        name = type(getattr(module, "act_fn", module)).__name__
        raise ValueError(
            f"{path} ({type(module).__name__}): its activation ({name}) is not one that paged experts compute; they "
            f"know {', '.join(_KINDS)}, gated or not, with clamp and offset"
        )
    return found


def matching(
    expected_nr: torch.Tensor,
    probe_nR: torch.Tensor,
    *,
    gated: bool,
    limits: tuple[float, ...] = (),
    alphas: tuple[float, ...] = (),
) -> Activation | None:
    """The first activation that maps the probe to what was expected."""
    for candidate in _candidates(gated, limits, alphas):
        if torch.allclose(candidate.forward(probe_nR), expected_nr, rtol=1e-5, atol=1e-6):
            return candidate
    return None


def _candidates(gated: bool, limits: tuple[float, ...], alphas: tuple[float, ...]) -> Iterator[Activation]:
    for kind in _KINDS:
        for alpha in (*alphas, 1.702) if kind == "quick_gelu" else (1.702,):
            yield Activation(kind, gated=gated, alpha=alpha)  # type: ignore[arg-type]
            for limit in limits if gated else ():
                for offset in (0.0, 1.0):
                    yield Activation(kind, gated=True, clamp=limit, offset=offset, alpha=alpha)  # type: ignore[arg-type]


def _limits(module: torch.nn.Module) -> tuple[float, ...]:
    return _numbers(module, "limit", "swiglu_limit", "clamp_limit")


def _alphas(module: torch.nn.Module) -> tuple[float, ...]:
    return _numbers(module, "alpha", "swiglu_alpha")


def _numbers(module: torch.nn.Module, *names: str) -> tuple[float, ...]:
    values = [getattr(module, name, None) for name in names]
    return tuple(float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0)


def _probe(columns: int) -> torch.Tensor:
    """Pre-activations from small to far beyond usual clamps, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 4.0, 30.0]).unsqueeze(1)
    return torch.randn(4, columns, generator=generator) * scales
