"""One MoE layer on several ranks behind each dispatcher: what travels, and how long a forward and backward take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from scripts.comparison.collectives import CollectiveCounter

Routing = Literal["uniform", "clusters"]
DISPATCHERS = ("alltoall", "allgather", "groups")
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Travelled:
    """Bytes that a rank sent to others in one forward and backward, by dispatcher."""

    sent_bytes: dict[str, int]
    row_bytes: int
    """Of the rows alone that this routing needs: each token once to each other rank, there and back, twice."""


class ToldRouter(torch.nn.Module):
    """A router that gives the routing it was told, with probabilities that take gradients."""

    def __init__(self, map_TE: torch.Tensor) -> None:
        super().__init__()
        self.map_TE = map_TE
        self.probs_TE = torch.nn.Parameter(map_TE.float() / map_TE.sum(1, keepdim=True).clamp(min=1))

    def forward(self, hidden: torch.Tensor, padding_mask: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and map, as stock's router."""
        return self.probs_TE * self.map_TE, self.map_TE

    def set_layer_number(self, number: int) -> None:
        """As stock's; nothing depends on it."""


class DispatchBench:
    """The same layer three times: stock's two dispatchers, and groups.

    `flags`: of `pretrain_moe.py`. `routing`: uniform; or every token belongs to one of four clusters of experts,
    scattered over all ranks, and groups runs under a placement planned from another sample. `move`: what travels.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        flags: Sequence[str],
        tokens: int,
        routing: Routing = "uniform",
        seed: int = 0,
        move: str = "auto",
    ) -> None:
        self._counter = CollectiveCounter()
        self._counter.install()
        import megatron_ext
        from megascale_omni.config import MegaScaleConfig
        from scripts.exactness.sides import RandomState
        from scripts.moe_trainer.arguments import parse_args
        from scripts.moe_trainer.distributed import Distributed
        from scripts.moe_trainer.model import transformer_config

        args = parse_args(list(flags), world_size=world)
        if not args.cuda:
            from megatron_ext import cpu

            cpu.enable()
        self._rank, self._world = rank, world
        self._distributed = Distributed(args)
        self._map_TE = torch.from_numpy(_routing(args, routing, tokens, seed + rank))
        self._layers: dict[str, Any] = {}
        start = RandomState.capture()
        for name in DISPATCHERS:
            start.restore()
            args.moe_token_dispatcher_type = "alltoall" if name == "groups" else name
            config = transformer_config(args)
            if name == "groups":
                with tempfile.TemporaryDirectory(prefix="megascale-placement-") as folder:
                    placement = None if routing == "uniform" else _placement(args, tokens, world, Path(folder))
                    chosen = {"dispatcher": "groups", "move": move, "placement": placement}
                    megatron_ext.enable(MegaScaleConfig().replace("distributed", **chosen))
            try:
                self._layers[name] = self._layer(config)
            finally:
                megatron_ext.disable()
        generator = torch.Generator().manual_seed(rank)
        shape = (args.seq_length, tokens // args.seq_length, args.hidden_size)
        self._hidden_sbh = torch.randn(shape, generator=generator, dtype=config.params_dtype)
        self._gradient_sbh = torch.randn(shape, generator=generator, dtype=config.params_dtype)
        self._row = args.hidden_size * self._hidden_sbh.element_size()
        self._check_equal()

    def travelled(self) -> Travelled:
        """Counts one forward and backward of each."""
        sent = {}
        for name in DISPATCHERS:
            before = self._counter.sent_bytes
            self._step(name)
            sent[name] = self._counter.sent_bytes - before
        local = self._map_TE.shape[1] // self._world
        needs_TP = self._map_TE.view(len(self._map_TE), self._world, local).any(-1)
        needs_TP[:, self._rank] = False
        # A row to another rank is this rank's to send once forward; as many as others need go back, and the backward
        # is the same again. Over all ranks each row is sent four times.
        return Travelled(sent, 4 * self._row * int(needs_TP.sum()))

    def seconds(self, *, warmup: int, repetitions: int) -> dict[str, list[float]]:
        """Time each in every repetition, in an order that rotates, from a barrier on."""
        seconds: dict[str, list[float]] = {name: [] for name in DISPATCHERS}
        for repetition in range(warmup + repetitions):
            shift = repetition % len(DISPATCHERS)
            for name in DISPATCHERS[shift:] + DISPATCHERS[:shift]:
                torch.distributed.barrier()
                start = time.perf_counter()
                self._step(name)
                if repetition >= warmup:
                    seconds[name].append(time.perf_counter() - start)
        return seconds

    def _layer(self, config: Any) -> Any:  # noqa: ANN401 - stock's configuration and layer
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe.moe_layer import MoELayer

        spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
        layer = MoELayer(config, spec.submodules)
        layer.set_layer_number(1)
        layer.router = ToldRouter(self._map_TE)
        return layer.train()

    def _step(self, name: str) -> tuple[torch.Tensor, ...]:
        """Output, gradients of tokens and probabilities."""
        layer = self._layers[name]
        for parameter in layer.parameters():
            parameter.grad = None
        if name == "groups":
            from megascale_omni.experts.gradients import ExpertGradients

            ExpertGradients([layer.experts]).drop()
        hidden_sbh = self._hidden_sbh.detach().requires_grad_()
        output_sbh, _ = layer(hidden_sbh)
        output_sbh.backward(self._gradient_sbh)
        assert hidden_sbh.grad is not None
        return output_sbh.detach(), hidden_sbh.grad, layer.router.probs_TE.grad

    def _check_equal(self) -> None:
        """What is compared computes the same. Raises RuntimeError where it does not."""
        from scripts.exactness.checks import relative_norm

        stock = self._step("alltoall")
        for name in DISPATCHERS[1:]:
            for what, first, second in zip(
                ("output", "tokens' gradient", "router's"), stock, self._step(name), strict=True
            ):
                difference = relative_norm(second.float(), first.float())
                if not difference <= _TOLERANCE:
                    raise RuntimeError(f"{name}: {what} differs from alltoall's by {difference:.3g} of its norm")

    def simulated(self) -> dict[str, int]:
        """What the simulator says that this rank sends in one forward and backward, by dispatcher."""
        from megascale_omni.topology.routing import Choices
        from megascale_omni.topology.simulate import LayerShape, simulate

        maps = [torch.empty_like(self._map_TE) for _ in range(self._world)]
        torch.distributed.all_gather(maps, self._map_TE)
        choices = [Choices.of_map(map_TE.numpy()) for map_TE in maps]
        core = self._layers["groups"].token_dispatcher.core
        numel, width = core.pages.expert_numel, self._hidden_sbh.element_size()
        shape = LayerShape(self._hidden_sbh.shape[-1], maps[0].shape[1], numel, width=width)
        slots = None
        if core.columns is not None:
            slots = tuple(tuple(rank) for rank in core.columns.view(self._world, -1).tolist())
        found = {
            name: simulate(name, choices, shape, slots=slots, move=core.options.move)  # type: ignore[arg-type]
            for name in DISPATCHERS
        }
        return {name: round(float(one.bytes_P[self._rank])) for name, one in found.items()}


def _routing(args: Any, routing: Routing, tokens: int, seed: int) -> np.ndarray:  # noqa: ANN401 - a namespace
    from megascale_omni.topology.routing import synthetic

    return synthetic(routing, tokens=tokens, experts=args.num_experts, topk=args.moe_router_topk, seed=seed)


def _placement(args: Any, tokens: int, ranks: int, folder: Path) -> str:  # noqa: ANN401 - a namespace
    """A placement for this routing, planned from what other tokens choose."""
    from megascale_omni.topology.placement import Placement, pairs_of, place

    others = [_routing(args, "clusters", tokens, 10_000 + rank) for rank in range(ranks)]
    path = folder / "placement.json"
    Placement({"default": place(np.sum([pairs_of(map_TE) for map_TE in others], axis=0), ranks=ranks)}).write(path)
    return str(path)
