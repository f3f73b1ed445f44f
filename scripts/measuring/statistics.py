"""Medians and deviations of repeated measurements."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """A sample of repeated measurements."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    count: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.high - self.low) / self.median if self.median else math.nan


def summarize(values: Sequence[float]) -> Summary:
    """Median and quartiles. Raises ValueError when there is nothing, or something that is no finite number."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"a median needs finite measurements, not {list(values)[:5]}")
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, low, high, len(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Ratios of measurements that were made next to each other, summarized.

    The ratio is taken inside each repetition: what a machine does slowly over time falls out of it.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} measurements cannot be paired with {len(denominators)}")
    return summarize([above / below for above, below in zip(numerators, denominators, strict=True)])


def relative_difference(value: float, reference: float) -> float:
    """`|value - reference| / |reference|`: 0 where equal, infinite where one is not finite or the reference is 0."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def largest_relative_difference(values: Sequence[float], references: Sequence[float]) -> float:
    """The largest `relative_difference` of two series of one length; 0 for empty ones."""
    if len(values) != len(references):
        raise ValueError(f"a series of {len(values)} cannot be compared with one of {len(references)}")
    return max(map(relative_difference, values, references), default=0.0)
