"""What reducing expert gradients over the copies of an expert sends, with some of the experts active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scripts.comparison.collectives import CollectiveCounter

ACTIVE = 0.3
SIDES = ("stock", "groups", "groups-bf16")


@dataclass(frozen=True)
class ReducedBytes:
    """Bytes that a rank sent, by side, with a gradient on every copy of the active experts, or on one of them only."""

    everywhere: dict[str, int]
    apart: dict[str, int]


class GradientBench:
    """One MoE layer's experts in stock's data-parallel wrapper, and ours with both wires.

    `flags`: of `pretrain_moe.py`; experts are copied on the ranks that expert parallelism leaves. Nothing but experts
    is trained, so that all that is sent is theirs.
    """

    def __init__(self, rank: int, world: int, *, flags: Sequence[str], tokens: int) -> None:
        self._counter = CollectiveCounter()
        self._counter.install()
        import megatron_ext
        from megascale_omni.config import MegaScaleConfig
        from scripts.measurements.distributed_layer import ToldRouter
        from scripts.moe_trainer.arguments import parse_args
        from scripts.moe_trainer.distributed import Distributed
        from scripts.moe_trainer.model import transformer_config

        args = parse_args(list(flags), world_size=world)
        if not args.cuda:
            from megatron_ext import cpu

            cpu.enable()
        self._rank, self._copy, self._args = rank, rank // args.expert_model_parallel_size, args
        self._distributed = Distributed(args)
        config = transformer_config(args)
        self._tokens = tokens
        self._router = ToldRouter(torch.zeros(tokens, args.num_experts, dtype=torch.bool))
        self._router.requires_grad_(False)
        self._ddp: dict[str, Any] = {"stock": self._wrapped(config)}
        for name, wire in (("groups", "fp32"), ("groups-bf16", "bf16")):
            megatron_ext.enable(MegaScaleConfig().replace("distributed", dispatcher="groups", grad_wire=wire))
            try:
                self._ddp[name] = self._wrapped(config)
            finally:
                megatron_ext.disable()

    def reduced(self) -> ReducedBytes:
        """Counts both cases on all sides."""
        return ReducedBytes(self._bytes(apart=False), self._bytes(apart=True))

    def _wrapped(self, config: Any) -> Any:  # noqa: ANN401 - stock's configuration and wrapper
        from megatron.core import distributed
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe.moe_layer import MoELayer

        spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
        layer = MoELayer(config, spec.submodules)
        layer.set_layer_number(1)
        layer.router = self._router
        settings = distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=self._args.use_distributed_optimizer
        )
        return distributed.DistributedDataParallel(config, settings, layer)

    def _bytes(self, *, apart: bool) -> dict[str, int]:
        experts = self._args.num_experts
        active = round(ACTIVE * experts)
        chosen = torch.randperm(experts, generator=torch.Generator().manual_seed(5))[:active].sort().values
        if apart:  # every active expert has tokens on one copy only
            copies = max(1, torch.distributed.get_world_size() // self._args.expert_model_parallel_size)
            chosen = chosen[self._copy :: copies]
        map_TE = torch.zeros(self._tokens, experts, dtype=torch.bool)
        for token in range(self._tokens):
            map_TE[token, chosen[token % len(chosen)]] = True
        self._router.map_TE = map_TE
        self._router.probs_TE.data.copy_(map_TE.float())
        shape = (self._args.seq_length, self._tokens // self._args.seq_length, self._args.hidden_size)
        sent = {}
        for name, ddp in self._ddp.items():
            ddp.zero_grad_buffer()
            hidden_sbh = torch.randn(shape, generator=torch.Generator().manual_seed(self._rank)).requires_grad_()
            ddp(hidden_sbh)[0].sum().backward()
            before = self._counter.sent_bytes
            ddp.finish_grad_sync()
            sent[name] = self._counter.sent_bytes - before
        return sent
