"""One MoE layer, stock's and the paged one, and the products inside them: times, interleaved in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer

import megatron_ext
from megascale_omni.config import MegaScaleConfig, PagingConfig
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from scripts.exactness.checks import relative_norm
from scripts.exactness.sides import RandomState
from scripts.measuring.statistics import summarize
from scripts.moe_trainer.arguments import parse_args
from scripts.moe_trainer.distributed import Distributed
from scripts.moe_trainer.model import transformer_config

STOCK, PAGED, BARE = "stock", "paged", "bare"
_OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of forward and backward, by repetition, of what took turns; and what it was."""

    seconds: dict[str, list[float]]
    stock_experts: str
    pages_per_expert: int

    def describe(self) -> str:
        """Medians in a line."""
        medians = {name: summarize(seconds).median for name, seconds in self.seconds.items()}
        times = ", ".join(f"{name} {1000 * median:.1f} ms" for name, median in medians.items())
        return f"{times}; stock is {self.stock_experts}, an expert has {self.pages_per_expert} page(s)"


class LayerBench:
    """Both layers with the same weights on the same tokens. `flags`: of `pretrain_moe.py`."""

    def __init__(
        self, rank: int, world: int, *, flags: Sequence[str], page_size_bytes: int | None, tokens: int
    ) -> None:
        args = parse_args(list(flags), world_size=world)
        if not args.cuda:
            from megatron_ext import cpu

            cpu.enable()
        self._distributed = Distributed(args)
        config = transformer_config(args)
        start = RandomState.capture()
        self._stock = self._layer(config)
        start.restore()
        paging = PagingConfig() if page_size_bytes is None else PagingConfig(page_size_bytes=page_size_bytes)
        megatron_ext.enable(MegaScaleConfig(paging=paging))
        try:
            self._paged = self._layer(config)
        finally:
            megatron_ext.disable()
        assert isinstance(self._paged.experts, PagedExperts)
        self._experts = self._paged.experts
        self._gradients = ExpertGradients([self._experts])
        shape = (args.seq_length, tokens // args.seq_length, args.hidden_size)
        self._hidden_sbh = torch.randn(shape, dtype=config.params_dtype)
        self._gradient_sbh = torch.randn(shape, dtype=config.params_dtype)
        self._check_equal()
        self._bare = _BareProducts(self._stock.experts, self._counts())

    def measure(self, *, warmup: int, repetitions: int) -> LayerTimes:
        """Time each of the three in every repetition, in an order that rotates."""
        timed: dict[str, Callable[[], float]] = {
            STOCK: lambda: self._time(self._stock),
            PAGED: lambda: self._time(self._paged),
            BARE: self._bare.time,
        }
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        names = list(timed)
        for repetition in range(warmup + repetitions):
            shift = repetition % len(names)
            for name in names[shift:] + names[:shift]:
                taken = timed[name]()
                if repetition >= warmup:
                    seconds[name].append(taken)
        return LayerTimes(seconds, type(self._stock.experts).__name__, self._experts.layout.num_slices)

    def _layer(self, config: object) -> MoELayer:
        spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)  # type: ignore[attr-defined]
        layer = MoELayer(config, spec.submodules)
        layer.set_layer_number(1)
        return layer.train()

    def _time(self, layer: MoELayer) -> float:
        """Forward and backward. What a training step clears between steps is cleared before the clock starts."""
        for parameter in layer.parameters():
            parameter.grad = None
        self._gradients.drop()
        hidden_sbh = self._hidden_sbh.detach().requires_grad_()
        start = time.perf_counter()
        output_sbh, _ = layer(hidden_sbh)
        output_sbh.backward(self._gradient_sbh)
        return time.perf_counter() - start

    def _check_equal(self) -> None:
        """What is timed computes the same. Raises RuntimeError where it does not."""
        results = []
        for layer in (self._stock, self._paged):
            hidden_sbh = self._hidden_sbh.detach().requires_grad_()
            output_sbh, _ = layer(hidden_sbh)
            output_sbh.backward(self._gradient_sbh)
            assert hidden_sbh.grad is not None
            results.append((output_sbh.detach(), hidden_sbh.grad))
        for what, stock, paged in zip(("output", "input gradient"), *results, strict=True):
            difference, allowed = relative_norm(paged.float(), stock.float()), _OUTPUT_TOLERANCE[stock.dtype]
            if not difference <= allowed:
                raise RuntimeError(f"the layers' {what} differs by {difference:.3g} of its norm, more than {allowed}")

    def _counts(self) -> list[int]:
        """Tokens an expert."""
        counts: list[int] = []
        hook = self._stock.experts.register_forward_pre_hook(lambda module, inputs: counts.extend(inputs[1].tolist()))
        with torch.no_grad():
            self._stock(self._hidden_sbh)
        hook.remove()
        return counts


class _BareProducts:
    """The six products of each expert's forward and backward, through `torch.mm` into outputs that exist already."""

    def __init__(self, experts: torch.nn.Module, counts: Sequence[int]) -> None:
        self._products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for expert, count in zip(experts.local_experts, counts, strict=True):  # type: ignore[arg-type]
            if count:
                up_Rh, down_hf = expert.linear_fc1.weight.detach(), expert.linear_fc2.weight.detach()
                self._add(count, up_Rh, down_hf)

    def _add(self, count: int, up_Rh: torch.Tensor, down_hf: torch.Tensor) -> None:
        def rows(width: int) -> torch.Tensor:
            return torch.randn(count, width, dtype=up_Rh.dtype)

        (wide, hidden), ffn = up_Rh.shape, down_hf.shape[1]
        x_nh, act_nf, gy_nh, gpre_nR = rows(hidden), rows(ffn), rows(hidden), rows(wide)
        for left, right in (
            (x_nh, up_Rh.t()),
            (act_nf, down_hf.t()),
            (gy_nh, down_hf),
            (gy_nh.t(), act_nf),
            (gpre_nR, up_Rh),
            (gpre_nR.t(), x_nh),
        ):
            self._products.append((left, right, torch.empty(left.shape[0], right.shape[1], dtype=left.dtype)))

    def time(self) -> float:
        start = time.perf_counter()
        for left, right, out in self._products:
            torch.mm(left, right, out=out)
        return time.perf_counter() - start
