"""Alpha: its stages, its fit against a solver, and where it is held."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megascale_omni.clipping.calibration import (
    Calibration,
    Observation,
    Stage,
    as_plain,
    fit_alpha,
    fixed,
    from_plain,
    observe,
    restarted,
)
from megascale_omni.clipping.policy import clip, threshold, total_norm
from megascale_omni.clipping.report import fit_message
from megascale_omni.clipping.statistics import GradientStatistics

BASE, RIDGE = 2.0, 0.7


def observations(steps: int, *, alpha: float = 0.4, noise: float = 0.0, seed: int = 0) -> list[Observation]:
    """Steps of three modules whose norms follow their spread with a known alpha, and with the loss."""
    random = np.random.default_rng(seed)
    found = []
    for step in range(steps):
        gvcs = 1.0 + step * 0.1 + random.random(3)
        norms = BASE * (1 + alpha * gvcs) + noise * random.standard_normal(3)
        found.append(Observation(tuple(norms), tuple(gvcs), (3.0 + 0.3 * step,) * 3))
    return found


def run(steps: int, start: Calibration | None = None) -> list[tuple[Stage, float | None]]:
    calibration, found = start or Calibration(), []
    for seen in observations(steps, noise=0.1):
        stage = calibration.stage
        calibration, alpha = observe(calibration, seen, base=BASE, ridge=RIDGE)
        found.append((stage, alpha))
    return found


def test_three_steps_off_three_on_trial_five_fitted_then_fixed():
    found = run(14)
    assert [stage for stage, _ in found] == [*["off"] * 3, *["trial"] * 3, *["fitting"] * 5, *["fixed"] * 3]
    alphas = [alpha for _, alpha in found]
    assert alphas[:6] == [None] * 3 + [0.1] * 3
    fitted = alphas[6:11]
    assert all(alpha is not None and 0 <= alpha <= 1 for alpha in fitted)
    assert len(set(fitted)) == 5, "each step of the fit has one more observation"
    assert set(alphas[11:]) == {fitted[-1]}


def test_calibrating_again_keeps_the_alpha_in_force_until_there_is_a_new_one():
    first = Calibration()
    for seen in observations(12):
        first, _ = observe(first, seen, base=BASE, ridge=RIDGE)
    before = first.alpha
    again = run(11, restarted(first))
    assert [alpha for _, alpha in again[:6]] == [before] * 6, "clipping is never switched off in the middle of a run"
    assert all(alpha != before for _, alpha in again[6:])


def test_a_given_alpha_is_in_force_from_the_first_step():
    assert run(2, fixed(0.35)) == [("fixed", 0.35)] * 2


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_the_minimum_of_its_objective(seed):
    window = observations(11, noise=0.5, seed=seed)
    fit = fit_alpha(window, base=BASE, ridge=RIDGE)
    norms, gvcs = np.array([s.norms for s in window]), np.array([s.gvcs for s in window])
    losses = np.array([s.losses for s in window])
    weights = [abs(np.corrcoef(norms[:, i], losses[:, i])[0, 1]) for i in range(3)]
    assert fit.weights == pytest.approx(weights, rel=1e-9)

    def objective(alpha: np.ndarray) -> np.ndarray:
        residuals = norms[..., None] / BASE - 1 - alpha * gvcs[..., None]
        return (np.array(weights)[None, :, None] * residuals**2).sum((0, 1)) + RIDGE * alpha**2

    grid = np.linspace(0.2, 0.6, 40_001)
    assert fit.unclamped == pytest.approx(grid[objective(grid).argmin()], abs=1e-5)


def test_the_standard_error_is_that_of_repeated_experiments():
    fits = [fit_alpha(observations(11, noise=0.3, seed=seed), base=BASE, ridge=0.0) for seed in range(300)]
    # Weights are close to 1 here, so that the fit is ordinary least squares.
    spread = np.std([fit.unclamped for fit in fits])
    assert np.mean([fit.standard_error for fit in fits]) == pytest.approx(spread, rel=0.25)
    assert np.mean([fit.unclamped for fit in fits]) == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("factor", "held"), [(1e4, 1.0), (1e-3, 0.0)])
def test_alpha_is_held_between_0_and_1_and_says_so(factor, held):
    window = [Observation(tuple(n * factor for n in s.norms), s.gvcs, s.losses) for s in observations(11)]
    fit = fit_alpha(window, base=BASE, ridge=RIDGE)
    assert fit.alpha == held
    assert fit.clamped
    assert "held there" in fit_message(fit)


def test_without_losses_all_weights_are_one_and_a_constant_norm_or_loss_has_none():
    window = observations(11, noise=0.2)
    silent = [Observation(s.norms, s.gvcs, (math.nan,) * 3) for s in window]
    assert fit_alpha(silent, base=BASE, ridge=RIDGE).weights == (1.0, 1.0, 1.0)
    constant = [Observation((*s.norms[:2], 1.0), s.gvcs, (s.losses[0], 2.0, 3.0)) for s in window]
    assert [w > 0 for w in fit_alpha(constant, base=BASE, ridge=RIDGE).weights] == [True, False, False]


def test_modules_without_gradient_are_no_terms():
    window = [Observation((s.norms[0], 0.0, 0.0), s.gvcs, s.losses) for s in observations(11, noise=0.1)]
    fit = fit_alpha(window, base=BASE, ridge=RIDGE)
    assert fit.terms == 11
    nothing = fit_alpha([Observation((0.0,), (0.0,), (math.nan,))], base=BASE, ridge=0.0)
    assert (nothing.alpha, nothing.terms) == (0.0, 0)
    assert math.isnan(nothing.standard_error)


def test_a_calibration_survives_json():
    calibration = Calibration()
    for seen in observations(8, noise=0.1):
        calibration, _ = observe(calibration, seen, base=BASE, ridge=RIDGE)
    assert from_plain(json.loads(json.dumps(as_plain(calibration)))) == calibration


# --- thresholds -----------------------------------------------------------------------------------


def test_a_threshold_follows_the_spread_up_to_its_limit():
    assert threshold(base=2.0, alpha=0.5, gvc=3.0, gvc_max=10.0) == 5.0
    assert threshold(base=2.0, alpha=0.5, gvc=30.0, gvc_max=10.0) == 12.0
    assert threshold(base=2.0, alpha=0.0, gvc=3.0, gvc_max=10.0) == 2.0


def test_only_norms_above_their_threshold_are_clipped():
    found = GradientStatistics(count=4, total=0.0, absolute=40.0, squares=400.0, largest=10.0)
    above = clip(name="a", found=found, base=2.0, alpha=0.5, gvc_max=10.0)
    assert above.threshold == 3.0
    assert above.coefficient == 3.0 / (20.0 + 1e-6)
    below = clip(name="b", found=found, base=50.0, alpha=0.5, gvc_max=10.0)
    assert below.coefficient == 1.0
    off = clip(name="c", found=found, base=2.0, alpha=None, gvc_max=10.0)
    assert (off.threshold, off.coefficient) == (None, 1.0)
    nothing = clip(name="d", found=GradientStatistics(), base=2.0, alpha=0.5, gvc_max=10.0)
    assert (nothing.norm, nothing.gvc, nothing.coefficient) == (0.0, 0.0, 1.0)
    assert total_norm([above, below]) == pytest.approx(math.sqrt(800.0))
