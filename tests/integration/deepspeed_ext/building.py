"""What the ranks of test_building.py do."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.deepspeed_runs.models import Size, build, configuration
from scripts.deepspeed_runs.proof import Case, batches_of
from scripts.deepspeed_runs.state import State, read_state
from tests.distributed.deepspeed_state import fresh_deepspeed
from tests.integration.deepspeed_ext.ranks import differences


def publish(rank: int, world: int, *, case: Case, folder: str) -> None:
    """A model as one is published."""
    model: Any = build(configuration(case.family, case.size), seed=5 + rank)
    model.save_pretrained(folder)


def loaded_both_ways(rank: int, world: int, *, case: Case, folder: str) -> list[str]:
    """Tensors that differ after three steps between a model whose experts moved, and those that were loaded in pages,
    in a block and under a live HfDeepSpeedConfig.
    """
    with fresh_deepspeed():
        import deepspeed
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        import deepspeed_ext

        states: list[State] = []
        for way in ("moved", "block", "live"):
            config = case.config(megascale=True)
            live = HfDeepSpeedConfig(copy.deepcopy(config)) if way == "live" else None
            with deepspeed_ext.init(config if way == "block" else {}):
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            if way != "moved":
                assert not [name for name, _ in model.named_parameters() if "experts" in name]
            engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(config))
            engine.train()
            for step in range(3):
                for batch in batches_of(case, rank, world, step):
                    engine.backward(engine(input_ids=batch, labels=batch).loss)
                    engine.step()
            states.append(read_state(engine))
            engine.destroy()
            del live
        return [*differences(states[0], states[1]), *differences(states[0], states[2])]


def initialised_both_ways(rank: int, world: int, *, case: Case) -> list[str]:
    """Tensors that differ between random weights of stock's and those made in pages, from the same seed."""
    with fresh_deepspeed():
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        import deepspeed_ext

        made = []
        for way in ("moved", "block", "live"):
            config = case.config(megascale=True)
            live = HfDeepSpeedConfig(config) if way == "live" else None
            with deepspeed_ext.init(config if way == "block" else {}):
                torch.manual_seed(11)
                model = AutoModelForCausalLM.from_config(configuration(case.family, case.size))
            assert any("experts" in name for name, _ in model.named_parameters()) == (way == "moved")
            made.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            del live
        assert made[0].keys() == made[1].keys() == made[2].keys()
        return [name for name, tensor in made[0].items() for other in made[1:] if not tensor.equal(other[name])]


def zero_init(rank: int, world: int, *, case: Case) -> bool:
    """Whether a model built under zero.Init trains to the same losses as one that was not."""
    with fresh_deepspeed():
        import deepspeed
        from transformers import AutoModelForCausalLM

        import deepspeed_ext  # noqa: F401

        case = replace(case, stage=3)
        plain, config = configuration(case.family, case.size), case.config(megascale=True)
        plain.pad_token_id = None  # whose row transformers would zero in a weight that is elsewhere
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(plain)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with deepspeed.zero.Init(config_dict_or_path=config):
            partitioned = AutoModelForCausalLM.from_config(plain)
        named = dict(partitioned.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=0):
            for name, parameter in named.items():
                if rank == 0:
                    parameter.data.copy_(weights[name])
        losses: list[list[float]] = []
        for one in (model, partitioned):
            engine, *_ = deepspeed.initialize(model=one.train(), config=config)
            losses.append([])
            for step in range(3):
                for batch in batches_of(case, rank, world, step):
                    loss = engine(input_ids=batch, labels=batch).loss
                    losses[-1].append(float(loss.detach()))
                    engine.backward(loss)
                    engine.step()
            engine.destroy()
        return losses[0] == losses[1]


def moving(rank: int, world: int, *, layers: int) -> float:
    """The most that experts took at once while they moved, in layers: pages, and what had not gone yet."""
    with fresh_deepspeed():
        import deepspeed

        from deepspeed_ext.experts import HfExperts

        case = Case(size=Size(layers=layers, hidden=128, ffn=128))
        model, seen, take = build(configuration(case.family, case.size), seed=5), [0], HfExperts.take
        left = [p for name, p in model.named_parameters() if ".experts." in name]
        whole = sum(p.nbytes for p in left)

        def taken(self: HfExperts, *args: Any) -> None:
            take(self, *args)
            seen.append(sum(self.manager.resident_bytes().values()) + sum(p.nbytes for p in left))

        HfExperts.take = taken  # type: ignore[method-assign]
        try:
            engine, *_ = deepspeed.initialize(model=model, config=case.config(megascale=True))
        finally:
            HfExperts.take = take  # type: ignore[method-assign]
        engine.destroy()
        return max(seen) / (whole / layers)


def exported(rank: int, world: int, *, case: Case, folder: str) -> list[str]:
    """Tensors of a plain checkpoint that differ from what the engine holds; loaded without DeepSpeed."""
    with fresh_deepspeed():
        import deepspeed
        from transformers import AutoModelForCausalLM

        import deepspeed_ext

        model = build(configuration(case.family, case.size), seed=9)
        engine, *_ = deepspeed.initialize(model=model, config=case.config(megascale=True))
        for batch in batches_of(case, rank, world, 0):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        deepspeed_ext.export_hf(engine, folder)
        held = read_state(engine)
        engine.destroy()
        if rank:
            return []
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert all(load_file(path) for path in Path(folder).glob("*.safetensors"))
        dtype = torch.bfloat16 if case.bf16 else torch.float32
        return [name for name in held if not plain[name].equal(held[name]["weight"].to(dtype).float())]


def refusals(rank: int, world: int, *, folder: str) -> list[str]:
    """What is said of blocks that cannot be, and of a copy of what was built in one."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext

        case = Case(stage=3, size=Size(experts=4, layers=1))
        config, broken = case.config(megascale=True), Path(folder) / "broken.json"
        broken.write_text("{")
        configs: list[Path | dict[str, Any]] = [
            broken,
            Path(folder) / "missing.json",
            {**config, "bf16": {"enabled": "auto"}},
            config,
        ]
        said = []
        for one in configs:
            try:
                with deepspeed_ext.init(one):
                    for _ in range(2):
                        build(configuration(case.family, case.size), seed=1)
            except ValueError as error:
                said.append(str(error))
        partitioned = deepspeed.zero.Init(config_dict_or_path=case.config(megascale=False))
        for outer, inner in ((partitioned, deepspeed_ext.init(config)), (deepspeed_ext.init(config), partitioned)):
            try:
                with outer, inner:
                    build(configuration(case.family, case.size), seed=1)
            except ValueError as error:
                said.append(str(error))
        with deepspeed_ext.init(config):
            model = build(configuration(case.family, case.size), seed=1)
        try:
            copy.deepcopy(model)
        except TypeError as error:
            said.append(str(error))
        return said
