"""CMSAClipper in plain PyTorch: bits of torch's own clipping, odd gradients, state."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch

from megascale_omni.clipping import ClipConfig, CMSAClipper, GradientPart
from megascale_omni.clipping.mpus import mpus_from_patterns
from megascale_omni.clipping.parts import expert_names, expert_pieces

SEED = 11


class TwoPart(torch.nn.Module):
    """A vision part whose gradients are large beside those of the text part."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = torch.nn.Linear(6, 5)
        self.text = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.text(torch.tanh(self.vision(x)))
        return output


MPUS = {"vision.*": "encoder", "text.*": "generator"}


def two_part(dtype: torch.dtype = torch.float32) -> TwoPart:
    torch.manual_seed(SEED)
    return TwoPart().to(dtype)


def backward(model: torch.nn.Module, seed: int, scale: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    loss = model(x).square().mean() * scale
    loss.backward()
    return loss


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_one_module_and_alpha_0_is_torchs_own_clipping_bit_for_bit(dtype, scale):
    model = two_part(dtype)
    config = ClipConfig(mode="cmsa", alpha=0.0, mpus={"*": "all"})
    clipper = CMSAClipper.for_model(model, base=0.5, config=config)
    for step in range(4):
        backward(model, step, scale)
        expected = copy.deepcopy(model)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert mine.grad is not None
            other.grad = mine.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        report = clipper.clip(model.named_parameters())
        assert report.norm == float(norm)
        assert (report.modules[0].coefficient < 1) == (scale > 1)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad)


def test_each_module_is_clipped_to_its_own_threshold():
    model = two_part()
    clipper = CMSAClipper.for_model(model, base=0.1, config=ClipConfig(mode="cmsa", alpha=0.35, mpus=MPUS))
    backward(model, 1, 50.0)
    before = gradients(model)
    report = clipper.clip(model.named_parameters())
    for module, prefix in (("encoder", "vision"), ("generator", "text")):
        found = report.module(module)
        flat = torch.cat([g.flatten() for n, g in before.items() if n.startswith(prefix)]).double()
        assert found.norm == pytest.approx(float(flat.norm()), rel=1e-6)
        gvc = float(flat.std(correction=0) / flat.abs().mean())
        assert found.gvc == pytest.approx(gvc, rel=1e-6)
        assert found.threshold == pytest.approx(0.1 * (1 + 0.35 * gvc), rel=1e-6)
        after = torch.cat([g.flatten() for n, g in gradients(model).items() if n.startswith(prefix)])
        assert float(after.norm()) == pytest.approx(found.threshold, rel=1e-4)
    assert report.module("encoder").threshold != report.module("generator").threshold
    with pytest.raises(KeyError):
        report.module("aligner")


def test_a_frozen_part_and_a_part_of_zeros_are_left_alone():
    model = two_part()
    model.vision.requires_grad_(False)
    clipper = CMSAClipper.for_model(model, base=0.1, config=ClipConfig(mode="cmsa", alpha=0.5, mpus=MPUS))
    backward(model, 1)
    assert clipper.clip(model.named_parameters()).module("encoder").elements == 0
    for parameter in model.text.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    report = clipper.clip(model.named_parameters())
    found = report.module("generator")
    assert (found.norm, found.gvc, found.coefficient, report.norm) == (0.0, 0.0, 1.0, 0.0)
    assert not report.skip


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_left_out_named_and_not_learned_from(bad, caplog):
    model = two_part()
    clipper = CMSAClipper.for_model(model, base=0.1, config=ClipConfig(mode="cmsa", mpus=MPUS))
    for step in range(8):
        backward(model, step)
        clipper.clip(model.named_parameters(), loss=1.0 + step)
    calibration = clipper.calibration
    backward(model, 9)
    assert model.text.bias.grad is not None
    model.text.bias.grad[1] = bad
    before = gradients(model)
    with caplog.at_level(logging.WARNING):
        report = clipper.clip(model.named_parameters(), loss=math.nan)
    assert report.skip
    assert report.skipped_steps == clipper.skipped_steps == 1
    assert report.non_finite == "generator (rank 0: text.bias)"
    assert "step left out (1 so far): gradients of generator (rank 0: text.bias) are not finite" in caplog.text
    assert clipper.calibration == calibration
    after = gradients(model)
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    backward(model, 10)
    report = clipper.clip(model.named_parameters(), loss=1.0)
    assert not report.skip
    assert report.alpha is not None


def train(clipper: CMSAClipper, model: torch.nn.Module, steps: range) -> list[dict[str, object]]:
    found = []
    for step in steps:
        loss = backward(model, step, 5.0 + step % 3)
        found.append(clipper.clip(model.named_parameters(), loss=loss).as_record())
    return found


@pytest.mark.parametrize("at", [2, 5, 8, 11, 14])
def test_a_clipper_that_is_saved_and_restored_goes_on_as_if_nothing_had_happened(at):
    model = two_part()
    config = ClipConfig(mode="cmsa", mpus=MPUS, recalibrate_steps=13)
    whole = train(CMSAClipper.for_model(model, base=0.3, config=config), model, range(26))
    first = CMSAClipper.for_model(model, base=0.3, config=config)
    found = train(first, model, range(at))
    second = CMSAClipper.for_model(model, base=0.3, config=config)
    second.load_state_dict(first.state_dict())
    found += train(second, model, range(at, 26))
    assert found == whole, "deterministic, too"
    stages = [record["stage"] for record in whole]
    assert stages[11:13] == ["fixed", "fixed"]
    assert stages[13] == "off", "after 13 steps it begins anew"
    assert whole[13]["alpha"] == whole[12]["alpha"] is not None


def test_states_that_do_not_fit():
    model = two_part()
    clipper = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS))
    train(clipper, model, range(7))
    state = clipper.state_dict()
    with pytest.raises(ValueError, match="version 7"):
        clipper.load_state_dict({**state, "version": 7})
    other = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus={"*": "all"}))
    other.load_state_dict(state)
    assert other.calibration.step == 0, "an unfinished calibration is of other modules"
    given = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS, alpha=0.2))
    given.load_state_dict(state)
    assert given.calibration.alpha == 0.2


def test_a_run_that_is_to_fit_alpha_fits_it_after_one_with_a_number():
    model = two_part()
    given = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS, alpha=0.35))
    train(given, model, range(3))
    auto = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS))
    auto.load_state_dict(given.state_dict())
    records = train(auto, model, range(12))
    assert [record["alpha"] for record in records[:6]] == [0.35] * 6, "in force until there is a fitted one"
    assert auto.calibration.fit is not None
    assert records[11]["alpha"] == auto.calibration.fit.alpha
    again = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS))
    again.load_state_dict(auto.state_dict())
    assert again.calibration == auto.calibration, "what was fitted is not fitted again"


def test_of_a_run_that_clipped_as_stock_the_left_out_steps_are_taken():
    model = two_part()
    clipper = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS))
    clipper.load_state_dict({"skipped_steps": 3})
    assert (clipper.skipped_steps, clipper.calibration.step) == (3, 0)


def test_losses_by_module_weight_their_modules_and_unknown_modules_are_refused():
    model = two_part()
    clipper = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS))
    for step in range(11):
        backward(model, step, 1.0 + step)
        norm = sum(float(g.square().sum()) for n, g in gradients(model).items() if n.startswith("vision")) ** 0.5
        clipper.clip(model.named_parameters(), loss={"encoder": norm, "generator": 2.0})
    fit = clipper.calibration.fit
    assert fit is not None
    assert fit.weights == pytest.approx((1.0, 0.0))
    with pytest.raises(ValueError, match=r"loss of 'decoder': there is no such module; there are encoder, generator"):
        clipper.report_loss({"decoder": 1.0})


def test_calibration_on_request():
    model = two_part()
    clipper = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS))
    train(clipper, model, range(12))
    clipper.recalibrate()
    assert train(clipper, model, range(1))[0]["stage"] == "off"
    given = CMSAClipper.for_model(model, base=0.3, config=ClipConfig(mode="cmsa", mpus=MPUS, alpha="0.2"))
    with pytest.raises(ValueError, match=r"alpha was given as 0\.2"):
        given.recalibrate()


def test_a_clipping_norm_is_needed():
    with pytest.raises(ValueError, match="CMSA needs a clipping norm above 0, not 0"):
        CMSAClipper.for_model(two_part(), base=0.0)
    with pytest.raises(RuntimeError, match="decide"):
        CMSAClipper.for_model(two_part(), base=1.0).coefficient("text.weight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "other"}, r"clip\.mode='other' is unknown; choose one of stock, cmsa"),
        ({"nonfinite": "raise"}, r"clip\.nonfinite='raise' is unknown; choose one of stock, skip"),
        ({"alpha": 1.5}, r"clip\.alpha=1\.5 must be auto or a number from 0 to 1"),
        ({"alpha": "much"}, r"clip\.alpha='much' must be auto or a number"),
        ({"alpha": True}, r"clip\.alpha=True must be auto"),
        ({"base": 0}, r"clip\.base=0 would clip every gradient to nothing"),
        ({"base": -1.0}, r"clip\.base=-1\.0 must be a finite number"),
        ({"gvc_max": math.inf}, r"clip\.gvc_max=inf must be a finite number"),
        ({"ridge": "1"}, r"clip\.ridge='1' must be a finite number"),
        ({"recalibrate_steps": 1.5}, r"clip\.recalibrate_steps=1\.5 must be a whole number"),
        ({"mpus": 3}, r"clip\.mpus=3 must be a mapping"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ClipConfig(**options)


# --- experts -------------------------------------------------------------------------------------------


def test_elements_of_experts_without_tokens_do_not_count():
    names = ["layers.0.mlp.experts.gate_up_proj", "layers.0.attn.weight"]
    shape = (4, 6, 5)
    mpus = mpus_from_patterns({"*experts*": "experts", "*": "dense"}, names)
    experts = [(expert, names[0]) for expert in expert_names(names[0], shape)]
    assert len(experts) == 4
    clipper = CMSAClipper(mpus, base=1.0, config=ClipConfig(mode="cmsa", alpha=0.5), experts=experts)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    gradient[[0, 2]] = 0.0
    whole = [GradientPart(names[0], gradient, experts=expert_pieces(names[0], shape))]
    found = clipper.decide(whole).module("experts")
    touched = gradient[[1, 3]].double()
    assert found.elements == touched.numel()
    assert found.gvc == pytest.approx(float(touched.std(correction=0) / touched.abs().mean()), rel=1e-6)
    # The same gradient as flat shards that end inside of experts.
    shards = []
    for first, last in ((0, 25), (25, 26), (26, 100), (100, 120)):
        pieces = expert_pieces(names[0], shape, offset=first, numel=last - first)
        assert sum(elements for _, elements in pieces) == last - first
        shards.append(GradientPart(names[0], gradient.flatten()[first:last], experts=pieces))
    again = clipper.decide(shards).module("experts")
    assert again.elements == found.elements
    assert again.gvc == pytest.approx(found.gvc, rel=1e-6)


def test_an_expert_that_is_divided_among_modules_counts_in_each():
    """Each part is measured, and clipped, with its own module."""
    model = torch.nn.Module()
    model.experts = torch.nn.ModuleList()
    for _ in range(2):
        model.experts.append(torch.nn.ModuleDict({"up": torch.nn.Linear(3, 4), "down": torch.nn.Linear(4, 3)}))
    config = ClipConfig(mode="cmsa", alpha=0.35, mpus={"*up*": "up", "*down*": "down"})
    clipper = CMSAClipper.for_model(model, base=0.1, config=config)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():  # the second expert got no tokens
        size = 0.0 if name.startswith("experts.1") else 1e3 if "up" in name else 1.0
        parameter.grad = torch.randn(parameter.shape, generator=generator) * size
    before = gradients(model)
    report = clipper.clip(model.named_parameters())
    for module, elements in (("up", 16), ("down", 15)):
        found = report.module(module)
        flat = torch.cat([g.flatten() for n, g in before.items() if n.startswith(f"experts.0.{module}")])
        assert found.elements == elements
        assert found.norm == pytest.approx(float(flat.norm()), rel=1e-6)
        after = torch.cat([g.flatten() for n, g in gradients(model).items() if module in n])
        assert float(after.norm()) == pytest.approx(found.threshold, rel=1e-4)


def test_experts_are_recognised_by_name_and_shape():
    assert expert_pieces("model.layers.0.mlp.experts.3.w1.weight", (4, 2)) == (("model.layers.0.mlp.experts.3", 8),)
    assert expert_pieces("model.layers.0.mlp.experts.down_proj", (2, 3, 2), offset=4, numel=5) == (
        ("model.layers.0.mlp.experts.down_proj[0]", 2),
        ("model.layers.0.mlp.experts.down_proj[1]", 3),
    )
    assert expert_pieces("model.layers.0.mlp.gate.weight", (4, 2)) == ()
    assert expert_pieces("conv.weight", (4, 2, 3)) == ()


def test_an_expert_that_was_not_announced_is_an_error():
    mpus = mpus_from_patterns({"*": "all"}, ["experts.0.w"])
    clipper = CMSAClipper(mpus, base=1.0)
    with pytest.raises(RuntimeError, match=r"experts\.0 was not named"):
        clipper.decide([GradientPart("experts.0.w", torch.ones(2), experts=(("experts.0", 2),))])
