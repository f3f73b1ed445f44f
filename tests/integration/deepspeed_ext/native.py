"""What the ranks of test_native.py do: a small model with DeepSpeed's own MoE layers."""

from typing import Any

import torch
from torch import nn

from tests.distributed.deepspeed_state import fresh_deepspeed

HIDDEN = 16


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, 24, bias=False), nn.Linear(HIDDEN, 24, bias=False)
        self.w2 = nn.Linear(24, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return result


def expert_of(kind: str) -> nn.Module:
    if kind == "swiglu":
        return Swiglu()
    return nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))


class Model(nn.Module):
    def __init__(self, kind: str, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(
            MoE(HIDDEN, expert_of(kind), num_experts=4, ep_size=ep_size, k=1, capacity_factor=2.0, use_rts=False)
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


def made(kind: str, ep_size: int) -> Model:
    """The same at every call; a copy would lose what DeepSpeed writes on parameters."""
    torch.manual_seed(5)
    return Model(kind, ep_size)


def config_of(stage: int, *, megascale: bool, section: dict[str, object] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 16},
    }
    return config | {"megascale": {"enabled": True, **(section or {})}} if megascale else config


def train(model: nn.Module, config: dict[str, Any], rank: int) -> tuple[Any, list[float]]:
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    import deepspeed_ext  # noqa: F401

    groups = None  # DeepSpeed wants experts in groups of their own, but not without ZeRO
    if config["zero_optimization"]["stage"]:
        groups = split({"params": list(model.parameters()), "name": "parameters"})
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups)
    losses = []
    for step in range(5):
        x = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x.bfloat16() if engine.bfloat16_enabled() else x)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return engine, losses


def beside_stock(
    rank: int, world: int, *, stages: list[int], kind: str, ep_size: int, bf16: bool = False
) -> list[list[list[float]]]:
    """By stage: losses of stock (those of stage 2 where stock refuses) and of the section."""
    with fresh_deepspeed():
        found = []
        for stage in stages:
            ours, theirs = config_of(stage, megascale=True), config_of(min(stage, 2), megascale=False)
            for config in (ours, theirs):
                config["bf16"] = {"enabled": bf16}
            found.append([train(made(kind, ep_size), config, rank)[1] for config in (theirs, ours)])
        return found


def modules_of(rank: int, world: int, *, stages: list[int], ep_size: int) -> list[dict[str, dict[str, float]]]:
    """By stage: what clipping by module finds at the fifth step."""
    section: dict[str, object] = {"clip": {"mode": "cmsa", "alpha": 0.35, "base": 1e-3}}
    with fresh_deepspeed():
        found = []
        for stage in stages:
            engine, _ = train(made("swiglu", ep_size), config_of(stage, megascale=True, section=section), rank)
            found.append(engine.clip_report.as_record()["mpus"])
            engine.destroy()
        return found


def states(rank: int, world: int, *, kind: str) -> list[bool]:
    """Whether the state dict has stock's names and values, and a checkpoint goes on where it was."""
    with fresh_deepspeed():
        import tempfile

        expected = {name: value.clone() for name, value in made(kind, 1).state_dict().items()}
        import deepspeed

        import deepspeed_ext  # noqa: F401

        engine, *_ = deepspeed.initialize(model=made(kind, 1), config=config_of(0, megascale=True))
        held = engine.module.state_dict()
        same = held.keys() == expected.keys() and all(held[name].equal(value) for name, value in expected.items())
        engine, _ = train(made(kind, 1), config_of(1, megascale=True), rank)
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)
            other, *_ = deepspeed.initialize(model=Model(kind, 1), config=config_of(1, megascale=True))
            other.load_checkpoint(folder)
        one, two = engine.module.state_dict(), other.module.state_dict()
        return [same, all(one[name].equal(two[name]) for name in one)]


def refused(rank: int, world: int) -> None:
    with fresh_deepspeed():
        model = Model("gelu", 1)
        model.layers[1].deepspeed_moe.experts.deepspeed_experts[0][1] = nn.Tanh()  # type: ignore
        train(model, config_of(0, megascale=True), rank)
