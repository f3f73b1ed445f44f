"""Clipping by module on real ranks: shards, replicas, ranks without gradients, and nobody waits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megascale_omni.clipping import ClipConfig, ClipReport, CMSAClipper, GradientPart, Group
from megascale_omni.clipping.agreement import agreed_experts, agreed_mpus
from megascale_omni.clipping.mpus import mpus_from_patterns
from megascale_omni.clipping.parts import expert_names, expert_pieces
from tests.distributed.pool import RanksRaised

NAMES = {"vision.weight": (40, 30), "text.weight": (64, 3), "experts.w": (4, 5, 6), "text.bias": (3,)}
MPUS = {"vision*": "encoder", "experts*": "experts", "*": "generator"}
ALONE = ClipConfig(mode="cmsa", alpha=0.35)


def whole_gradients(seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}
    found["vision.weight"] *= 1e4
    found["experts.w"][2] = 0.0  # an expert without tokens
    return found


def clipper(ranks: Group | None = None) -> CMSAClipper:
    experts = [(expert, "experts.w") for expert in expert_names("experts.w", NAMES["experts.w"])]
    mpus = mpus_from_patterns(MPUS, NAMES)
    return CMSAClipper(mpus, base=0.5, config=ALONE, ranks=ranks, experts=experts, speaks=False)


def alone() -> ClipReport:
    gradients = whole_gradients()
    return clipper().decide([GradientPart(n, g, 1.0, expert_pieces(n, g.shape)) for n, g in gradients.items()])


def parts_of_rank(rank: int, world: int, layout: str) -> list[GradientPart]:
    """``flat``: equal shards of all elements; ``uneven``: rank 1 has one element of each, later ranks none; ``owned``:
    each parameter on one rank; ``replicas``: everything on every rank; ``first``: everything on rank 0.
    """
    gradients = whole_gradients()
    if layout == "replicas":
        order = sorted(gradients, reverse=bool(rank % 2))  # stages list their parameters in orders of their own
        return [GradientPart(n, gradients[n], 1.0 / world, expert_pieces(n, gradients[n].shape)) for n in order]
    found = []
    for number, (name, gradient) in enumerate(gradients.items()):
        size, whole = gradient.numel(), gradient.flatten()
        if layout == "owned" or layout == "first":
            owner = number % world if layout == "owned" else 0
            first, last = (0, size) if rank == owner else (0, 0)
        elif layout == "uneven":
            first, last = (0, size - 1) if rank == 0 else (size - 1, size) if rank == 1 else (size, size)
        else:
            first, last = size * rank // world, size * (rank + 1) // world
        if last > first:
            pieces = expert_pieces(name, gradient.shape, offset=first, numel=last - first)
            found.append(GradientPart(name, whole[first:last], 1.0, pieces))
    return found


def decide(rank: int, world: int, *, layout: str) -> ClipReport:
    return clipper(Group()).decide(parts_of_rank(rank, world, layout))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["flat", "uneven", "owned", "replicas", "first"])
def test_every_rank_finds_what_one_process_would(pools, world, layout):
    reports = pools[world].run(decide, layout=layout)
    expected = alone()
    assert reports == [reports[0]] * world, "the same bits on every rank"
    for found, module in zip(reports[0].modules, expected.modules, strict=True):
        assert found.elements == pytest.approx(module.elements, rel=1e-12)
        assert found.largest == module.largest
        for field in ("norm", "gvc", "threshold", "coefficient"):
            assert getattr(found, field) == pytest.approx(getattr(module, field), rel=1e-6), field
    assert reports[0].module("experts").elements == 3 * 30


def calibrate(rank: int, world: int) -> tuple[list[ClipReport], dict[str, object]]:
    """Only the last rank knows the loss; one rank's gradient is not finite at step 4."""
    found, ours = [], clipper(Group())
    ours.config = ClipConfig(mode="cmsa")
    ours.calibration = type(ours.calibration)()
    for step in range(14):
        parts = [
            GradientPart(p.name, p.gradient * (1.0 + math.sin(step)), p.share, p.experts)
            for p in parts_of_rank(rank, world, "flat")
        ]
        if step == 4 and rank == 1:
            parts[0].gradient[0] = math.nan
        if rank == world - 1:
            ours.report_loss(2.0 + math.sin(step))
        found.append(ours.decide(parts))
    return found, ours.state_dict()


def test_ranks_calibrate_alike_and_leave_the_same_step_out(pools):
    answers = pools[2].run(calibrate)
    assert repr(answers) == repr([answers[0]] * 2), "NaN included"
    reports, state = answers[0]
    assert [report.skip for report in reports] == [step == 4 for step in range(14)]
    assert reports[4].non_finite == "encoder (rank 1: vision.weight)"
    assert reports[-1].alpha is not None
    fit = state["calibration"]["fit"]
    assert fit["weights"] == pytest.approx((1.0, 1.0, 1.0)), "norms follow the loss that one rank told"


# --- FSDP2 ---------------------------------------------------------------------------------------------


def sharded_and_whole(rank: int, world: int, *, one_module: bool) -> tuple[list[float], list[float], float]:
    """A model under FSDP2, clipped, beside the same model in one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build() -> torch.nn.Sequential:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))

    mpus = {"*": "all"} if one_module else {"0.*": "encoder", "2.*": "generator"}
    config = ClipConfig(mode="cmsa", alpha=0.35, mpus=mpus)
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(1)) * 5
    whole = build()
    whole(x).square().mean().backward()
    expected = CMSAClipper.for_model(whole, base=0.1, config=config).clip(whole.named_parameters())

    mesh = init_device_mesh("cpu", (world,))
    model = build()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Every rank sees the whole batch, so that the mean over ranks is the gradient of one process.
    model(x).square().mean().backward()
    ours = CMSAClipper.for_model(model, base=0.1, config=config, ranks=Group())
    report = ours.clip(model.named_parameters())
    difference = max(
        float((p.grad.full_tensor() - q.grad).abs().max())  # type: ignore[union-attr]
        for p, q in zip(model.parameters(), whole.parameters(), strict=True)
    )

    def numbers(r: ClipReport) -> list[float]:
        return [value for m in r.modules for value in (m.norm, m.gvc, m.threshold or 0.0, m.coefficient, m.elements)]

    return numbers(report), numbers(expected), difference


@pytest.mark.parametrize("one_module", [True, False])
def test_a_model_under_fsdp2_is_clipped_as_in_one_process(pools, one_module):
    for found, expected, difference in pools[2].run(sharded_and_whole, one_module=one_module):
        assert found == pytest.approx(expected, rel=1e-6)
        assert difference < 1e-7


def without_ranks(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model(torch.ones(2, 4)).sum().backward()
    CMSAClipper.for_model(model, base=1.0).clip(model.named_parameters())


def test_a_divided_gradient_needs_the_other_ranks(pools):
    with pytest.raises(RanksRaised) as raised:
        pools[2].run(without_ranks)
    message = "gradient of weight is divided among 2 ranks, and sums of 1 are put together; give the clipper ranks"
    assert all(message in failure.text for failure in raised.value.failures.values())


def tensor_parallel(rank: int, world: int) -> tuple[float, float]:
    """Two replicas of a weight that two ranks divide, beside an ordinary one: elements and norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))["tp"]
    model = torch.nn.Linear(4, 6)
    model.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))
    model.weight.grad = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    model.bias.grad = torch.ones(6)
    report = CMSAClipper.for_model(model, base=1.0, ranks=Group()).clip(model.named_parameters())
    return report.modules[0].elements, report.norm


def test_replicas_of_what_a_part_of_the_ranks_divide_count_once(pools):
    expected = float(torch.cat([torch.arange(24.0), torch.ones(6)]).norm())
    for elements, norm in pools[4].run(tensor_parallel):
        assert elements == 30
        assert norm == pytest.approx(expected, rel=1e-6)


def unreduced(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    weight = torch.nn.Parameter(torch.ones(2))
    mesh = init_device_mesh("cpu", (world,))
    found = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    holder = type("Holder", (), {"grad": found, "shape": weight.shape})()
    mpus = mpus_from_patterns({"*": "all"}, ["w"])
    CMSAClipper(mpus, base=1.0, ranks=Group()).clip([("w", holder)])


def test_a_gradient_that_is_not_reduced_is_refused(pools):
    with pytest.raises(RanksRaised) as raised:
        pools[2].run(unreduced)
    assert all("gradient of w is not reduced yet" in failure.text for failure in raised.value.failures.values())


# --- what ranks must say alike ---------------------------------------------------------------------------


def agree(rank: int, world: int, *, case: str, folder: str) -> str:
    """What a rank is told. Stages have layers of their own; files are a rank's own where ``case`` is ``files``."""
    names = [f"layers.{rank}.experts.up", f"layers.{rank}.experts.down"]
    patterns: dict[str, str] | str = {"layers.1.*up": "up", "*": "rest"}
    if case == "files":
        path = Path(folder) / f"{rank}.yaml"
        path.write_text("'*': all\n" if rank == 0 else "'layers.0.*': first\n'*': all\n")
        patterns = str(path)
    try:
        mpus = agreed_mpus(ClipConfig(mode="cmsa", mpus=patterns), names)
        agreed_experts(mpus, {f"layers.{rank}.experts": names})
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("experts", "clip.mpus divides the experts of layers.1.experts among up, rest"),
        ("files", "clip.mpus is not the same on all ranks: rank 0 has the modules all by"),
    ],
)
def test_what_one_rank_finds_wrong_is_raised_on_all(pools, tmp_path, case, message):
    for answer in pools[2].run(agree, case=case, folder=str(tmp_path)):
        assert message in answer
