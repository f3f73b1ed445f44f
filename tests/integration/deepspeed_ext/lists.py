"""What the ranks of test_parameter_lists.py do."""

import contextlib
import copy
from dataclasses import replace
from typing import Any

import torch

from scripts.deepspeed_runs.models import Size, build, configuration
from scripts.deepspeed_runs.proof import Case, batches_of
from scripts.deepspeed_runs.state import State, read_state
from tests.distributed.deepspeed_state import fresh_deepspeed

CASE = Case(stage=0, steps=3)
SETTINGS: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5}


def model_of(case: Case) -> torch.nn.Module:
    return build(configuration(case.family, case.size), seed=3)


def by_group(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, as is usual: some with weight decay and some without; experts are in the second."""
    named = list(model.named_parameters())
    second = [p for name, p in named if "experts" in name or "norm" in name]
    first = [p for name, p in named if not ("experts" in name or "norm" in name)]
    return [{"params": first, "weight_decay": 0.3, "lr": 1e-3}, {"params": second, "weight_decay": 0.0, "lr": 4e-3}]


def made(model: torch.nn.Module, way: str) -> dict[str, Any]:
    """What the client gives to ``deepspeed.initialize``."""
    if way == "list":
        return {"model_parameters": list(model.parameters())}
    if way == "generator":
        return {"model_parameters": model.parameters()}
    if way == "groups":
        return {"model_parameters": by_group(model)}
    if way == "function":
        return {"model_parameters": by_group(model), "optimizer": lambda given: torch.optim.AdamW(given, **SETTINGS)}
    groups = by_group(model)
    if way == "named":
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [{**group, "params": [(names[p], p) for p in group["params"]]} for group in groups]
    return {"optimizer": torch.optim.AdamW(groups, **SETTINGS)}


def config_of(way: str, *, megascale: bool) -> dict[str, Any]:
    config = CASE.config(megascale=megascale)
    del config["scheduler"]
    if way in ("function", "optimizer", "named", "offloaded"):
        del config["optimizer"]
    if way == "offloaded":
        config["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def deviation(rank: int, world: int, *, way: str) -> dict[str, float]:
    """How far weights and first moments are from stock's after three steps, as a share of what they changed by."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        base, states = model_of(CASE), []
        for megascale in (False, True):
            model = copy.deepcopy(base)
            engine, *_ = deepspeed.initialize(
                model=model, config=config_of(way, megascale=megascale), **made(model, way)
            )
            for group in engine.basic_optimizer.param_groups:
                assert len(group.get("param_names", group["params"])) == len(group["params"])
            for step in range(CASE.steps):
                for batch in batches_of(CASE, rank, world, step):
                    engine.backward(engine(input_ids=batch, labels=batch).loss)
                    engine.step()
            states.append(read_state(engine))
        (stock, paged), before = states, base.state_dict()
        shares = {"update": 0.0, "gradient": 0.0}
        for name, kinds in stock.items():
            change = float((kinds["weight"] - before[name]).norm())
            shares["update"] = max(shares["update"], float((paged[name]["weight"] - kinds["weight"]).norm()) / change)
            norm = float(kinds["exp_avg"].norm())
            shares["gradient"] = max(
                shares["gradient"], float((paged[name]["exp_avg"] - kinds["exp_avg"]).norm()) / norm
            )
        return shares


def refusals(rank: int, world: int, *, ways: list[str]) -> list[str]:
    """What is said about things that the section cannot serve; model and optimizer are then as they were."""
    found = []
    for way in ways:
        try:
            _initialise(way)
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    return found


def _initialise(way: str) -> None:
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        case = replace(CASE, size=Size(experts=4, layers=1))
        model, config = model_of(case), case.config(megascale=True)
        given: dict[str, Any] = {}
        named = dict(model.named_parameters())
        experts = [p for name, p in named.items() if "experts" in name]
        rest = [p for name, p in named.items() if "experts" not in name]
        if way == "experts_alone":
            given["model_parameters"] = [{"params": rest}, {"params": experts, "lr": 1e-2}]
        elif way == "one_module_in_two_groups":
            given["model_parameters"] = [{"params": rest[:1] + experts[:1]}, {"params": rest[1:] + experts[1:]}]
        elif way == "stepped":
            optimizer = given["optimizer"] = torch.optim.AdamW(model.parameters(), **SETTINGS)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        elif way == "sgd":
            config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-3}}
            config["zero_allow_untested_optimizer"] = True
        elif way == "amsgrad":
            given["optimizer"] = torch.optim.AdamW(model.parameters(), amsgrad=True, **SETTINGS)
        elif way == "amsgrad_of_a_group":
            groups = [{"params": list(model.parameters()), "amsgrad": True}]
            given["optimizer"] = torch.optim.AdamW(groups, **SETTINGS)
        elif way == "list_of_experts":
            given["model_parameters"] = experts
        elif way == "rest_is_frozen":
            config["zero_optimization"]["stage"] = 1
            for parameter in rest:
                parameter.requires_grad_(False)
        elif way == "no_folder":
            config["megascale"] |= {"device_budget": "50%", "disk_path": "no/such/folder"}
        elif way == "dense":
            model = torch.nn.Linear(4, 4)
        elif way == "bf16_model":
            model = model.bfloat16()
        elif way == "ranks":
            config["megascale"]["expert_parallel_size"] = 3
        elif way == "budget":
            config["megascale"] |= {"device_budget": "64KiB", "disk_path": "."}
        elif way == "clip":
            config["megascale"]["clip"] = {"mode": "cmsa", "mpus": "no/such/file.json"}
        elif way == "clip_base":
            config["megascale"]["clip"] = {"mode": "cmsa"}
            config["gradient_clipping"] = 0.0
        before = copy.deepcopy(model.state_dict())
        lists = given["optimizer"].param_groups if "optimizer" in given else []
        held = [list(group["params"]) for group in lists]
        try:
            deepspeed.initialize(model=model, config=config, **given)
        finally:
            after = model.state_dict()
            assert before.keys() == after.keys()
            assert all(value.equal(after[name]) for name, value in before.items())
            for group, members in zip(lists, held, strict=True):
                assert all(a is b for a, b in zip(group["params"], members, strict=True))


def refusals_of_one_rank(rank: int, world: int, *, ways: list[str]) -> list[str]:
    """What each rank is told where the last one alone has the mistake."""
    found = []
    for way in ways:
        try:
            _initialise(way if rank == world - 1 else "as it is")
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("not refused")
    return found


def frozen(rank: int, world: int) -> dict[str, bool]:
    """Experts that do not train."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        model = model_of(CASE)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        engine, *_ = deepspeed.initialize(model=model, config=CASE.config(megascale=True))
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        for step in range(3):
            for batch in batches_of(CASE, rank, world, step):
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
        after = engine.module.state_dict()
        moved = {name for name, value in before.items() if not value.equal(after[name])}
        of_experts = {name for name in before if "experts" in name}
        return {
            "experts moved": bool(moved & of_experts),
            "rest moved": bool(moved - of_experts),
            "paged": bool(of_experts) and len(engine.modules_in_pages) == 2,
        }


def owned(rank: int, world: int, *, experts: int) -> list[int]:
    """The experts of this rank, which all ranks divide, and what stays with DeepSpeed under their module's name."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        case = replace(CASE, stage=3, size=Size(experts=experts, layers=1), section={"expert_parallel_size": world})
        engine, *_ = deepspeed.initialize(model=model_of(case), config=case.config(megascale=True))
        names = [name for name, _ in engine.module.named_parameters()]
        assert any("gate" in name for name in names), "the router stays with ZeRO"
        assert not any("experts" in name for name in names)
        (module,) = engine.modules_in_pages
        engine.destroy()
        return list(module.owned)


ZERO_GRADS = [
    *((stage, 2, False, of) for stage in (0, 1, 2, 3) for of in ("optimizer", "engine")),
    *((stage, 1, False, "optimizer") for stage in (1, 2, 3)),
    *((stage, accumulation, True, "optimizer") for stage in (0, 1) for accumulation in (1, 2)),
    (1, 1, True, "engine"),
]
"""Stage, micro-batches of a step, whether the backward before it was interrupted, and whose ``zero_grad``. Under ZeRO 2
and 3 stock itself does not go on after an interrupted backward."""


def after_zero_grad(rank: int, world: int) -> dict[str, float]:
    """How far the experts' first moments are from stock's after a step in which gradients were dropped."""
    with fresh_deepspeed():
        found = {}
        for stage, accumulation, interrupted, of in ZERO_GRADS:
            case = replace(CASE, stage=stage, accumulation=accumulation, size=Size(experts=4, layers=1), clipping=0.0)
            case = replace(case, bf16=stage == 0 and interrupted)
            stock, paged = (_with_zero_grad(case, interrupted, of, megascale=side) for side in (False, True))
            name = f"ZeRO {stage}, {of}, accumulation {accumulation}{', interrupted' if interrupted else ''}"
            kinds = {key: value["exp_avg"] for key, value in stock.items()}
            found[name] = max(float((paged[key]["exp_avg"] - m).norm() / m.norm()) for key, m in kinds.items())
        return found


def _with_zero_grad(case: Case, interrupted: bool, of: str, *, megascale: bool) -> State:
    import deepspeed

    import deepspeed_ext  # noqa: F401

    engine, optimizer, *_ = deepspeed.initialize(model=model_of(case), config=case.config(megascale=megascale))
    engine.train()
    first, *others = (batches_of(case, 0, 1, number)[0] for number in range(1 + case.accumulation))
    handle = engine.module.model.layers[0].self_attn.register_full_backward_hook(_interrupt) if interrupted else None
    with contextlib.suppress(InterruptedError):
        engine.backward(engine(input_ids=first, labels=first).loss)
        assert handle is None, "the backward went on"
    if handle is not None:
        handle.remove()
    (optimizer if of == "optimizer" else engine).zero_grad()
    if case.accumulation > 1 and not interrupted:  # the first micro-batch of a step whose gradients were dropped
        engine.step()
        others = others[1:]
    for batch in others:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    state = read_state(engine)
    engine.destroy()
    return state


def _interrupt(module: torch.nn.Module, inward: object, outward: object) -> None:
    raise InterruptedError


def engines(rank: int, world: int) -> list[str]:
    """Classes of engines: without a section, with one, and with one after ``disable``."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext

        names = []
        for megascale, enabled in ((False, True), (True, True), (True, False)):
            (deepspeed_ext.enable if enabled else deepspeed_ext.disable)()
            engine, *_ = deepspeed.initialize(model=model_of(CASE), config=CASE.config(megascale=megascale))
            names.append(type(engine).__name__)
        deepspeed_ext.enable()
        return names


def loops(rank: int, world: int, *, ways: list[str]) -> list[tuple[float, int]]:
    """Of loops that are not one forward and one backward a micro-batch: how far weights are from stock's, and the
    gradient pages that the last backward of a step has completed.
    """
    with fresh_deepspeed():
        found = []
        for way in ways:
            case = replace(CASE, stage=int(way != "rest_is_frozen"), accumulation=2, size=Size(experts=4, layers=1))
            (_, stock), (done, paged) = (_looped(way, case, rank, world, megascale=side) for side in (False, True))
            difference = max(float((paged[n]["weight"] - kinds["weight"]).abs().max()) for n, kinds in stock.items())
            found.append((difference, done))
        return found


def _looped(way: str, case: Case, rank: int, world: int, *, megascale: bool) -> tuple[int, State]:
    import deepspeed

    import deepspeed_ext  # noqa: F401

    model, done = model_of(case), 0
    if way == "rest_is_frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" in name)
    engine, *_ = deepspeed.initialize(model=model, config=case.config(megascale=megascale))
    engine.train()
    for number in range(6):
        batches = batches_of(case, rank, world, number)[: 2 if way == "two_losses" else 1]
        if way == "boundary_by_hand":
            engine.set_gradient_accumulation_boundary(number % 3 == 2)
        engine.backward(sum(engine(input_ids=batch, labels=batch).loss for batch in batches))
        if megascale:
            done += len(engine.experts_step.gradients.done)
        engine.step()
    state = read_state(engine)
    engine.destroy()
    return done, state
