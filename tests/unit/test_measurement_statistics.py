"""Medians, ratios and deviations of repeated measurements."""

import math

import pytest

from scripts.measuring.statistics import (
    largest_relative_difference,
    paired_ratio,
    relative_difference,
    summarize,
)


def test_the_median_and_quartiles_of_a_sample():
    found = summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert found.spread == pytest.approx(2 / 3)


def test_one_measurement_is_its_own_median():
    assert summarize([7.0]).median == 7.0


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_what_is_no_sample_of_numbers_is_refused(values):
    with pytest.raises(ValueError, match="finite"):
        summarize(values)


def test_a_paired_ratio_ignores_what_the_machine_does_over_time():
    stock = [1.0, 2.0, 4.0, 8.0, 16.0]  # the machine gets slower and slower
    ours = [0.5 * seconds for seconds in stock]
    assert paired_ratio(ours, stock).median == 0.5
    assert paired_ratio(ours, stock).spread == 0


def test_series_of_different_lengths_are_not_paired():
    with pytest.raises(ValueError, match="3 measurements"):
        paired_ratio([1.0, 2.0, 3.0], [1.0])
    with pytest.raises(ValueError, match="series of 2"):
        largest_relative_difference([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("value", "reference", "difference"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (1.5, 2.0, 0.25),
        (-2.5, -2.0, 0.25),
        (1.0, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.nan, math.nan, math.inf),
        (math.inf, math.inf, math.inf),
    ],
)
def test_a_relative_difference_is_never_small_for_what_is_not_finite(value, reference, difference):
    assert relative_difference(value, reference) == difference


def test_the_largest_difference_of_two_series():
    assert largest_relative_difference([1.0, 2.2, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.1)
    assert largest_relative_difference([], []) == 0.0
