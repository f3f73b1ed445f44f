"""What the ranks of test_layouts.py do: models around experts of any layout, and the forms that models are saved in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from scripts.deepspeed_runs.models import build, configuration
from scripts.deepspeed_runs.proof import Case, batches_of
from scripts.deepspeed_runs.state import read_state
from tests.distributed.deepspeed_state import fresh_deepspeed

HIDDEN, FFN, EXPERTS, TOP_K = 16, 24, 4, 2


def experts_of(*, transposed: bool, concatenated: bool, bias: bool) -> nn.Module:
    """Behind transformers' experts interface, whose own function computes them."""
    from transformers.integrations.moe import use_experts_implementation

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = EXPERTS
            wide, narrow = (HIDDEN, 2 * FFN), (FFN, HIDDEN)
            self.gate_up_proj = nn.Parameter(0.3 * torch.randn(EXPERTS, *(wide if transposed else wide[::-1])))
            self.down_proj = nn.Parameter(0.3 * torch.randn(EXPERTS, *(narrow if transposed else narrow[::-1])))
            if bias:
                self.gate_up_proj_bias = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * FFN))
                self.down_proj_bias = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN))
            self.act_fn = nn.SiLU()

        def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    def interleaved(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2]
        return result

    if not concatenated:
        Experts._apply_gate = interleaved  # type: ignore[attr-defined]
    made = use_experts_implementation(is_transposed=transposed, is_concatenated=concatenated, has_bias=bias)(Experts)
    return made(SimpleNamespace(_experts_implementation="grouped_mm"))


class Model(nn.Module):
    def __init__(self, **layout: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.experts = experts_of(**layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = torch.topk(torch.softmax(x @ self.gate.t(), dim=-1), TOP_K)
        return (self.experts(x, index, weights) - 1).square().mean()


def losses(rank: int, world: int, *, layouts: list[dict[str, bool]]) -> list[tuple[list[float], list[float]]]:
    """Of each layout, those of stock and of the section."""
    with fresh_deepspeed():
        return [(_losses(layout, megascale=False), _losses(layout, megascale=True)) for layout in layouts]


def _losses(layout: dict[str, bool], *, megascale: bool) -> list[float]:
    import deepspeed

    import deepspeed_ext  # noqa: F401

    config = Case(stage=1, clipping=0.0).config(megascale=megascale)
    engine, *_ = deepspeed.initialize(model=Model(**layout), config=config)
    assert len(getattr(engine, "modules_in_pages", [])) == int(megascale)
    found = []
    for step in range(4):
        loss = engine(torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    engine.destroy()
    return found


def saved_forms(rank: int, world: int, *, case: Case, folder: str) -> dict[str, str]:
    """By form: "experts" where it has all of them as they are, else what is said."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        config = case.config(megascale=True)
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        engine, *_ = deepspeed.initialize(model=build(configuration(case.family, case.size), seed=2), config=config)
        for batch in batches_of(case, rank, world, 0):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        held = {name: kinds["weight"] for name, kinds in read_state(engine).items() if ".experts." in name}
        assert held
        here = Path(folder) / "published"
        made = {
            "state_dict": lambda: engine.module.state_dict(),
            "save_pretrained": lambda: _published(engine.module, here),
            "save_16bit_model": lambda: _of_16_bits(engine, folder),
        }
        said = {}
        for form, make in made.items():
            try:
                found = make()
                said[form] = "experts" if all(found[name].equal(value) for name, value in held.items()) else "others"
            except ValueError as error:
                said[form] = str(error)
        engine.destroy()
        return said


def _published(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model.save_pretrained(folder)  # of ranks that are not the first one it writes nothing
    torch.distributed.barrier()
    loaded: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return loaded


def _of_16_bits(engine: Any, folder: str) -> dict[str, torch.Tensor]:
    assert engine.save_16bit_model(folder)
    torch.distributed.barrier()
    loaded: dict[str, torch.Tensor] = torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)
    return loaded
