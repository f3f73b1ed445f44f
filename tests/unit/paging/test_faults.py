"""Faults injected into a whole training: each is named on the main thread, or has changed no bit; nothing is left."""

from functools import cache
from typing import get_args

import pytest

from megascale_omni.paging.manager import PagingOptions
from scripts.measurements import paging_faults
from scripts.measurements.paging_faults import HARMLESS, Fault, Kind, Outcome, expected, random_faults, run, usual_calls

KILLED: Kind = "process killed in mid-write"
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != KILLED)
COUNT = 4 * len(KINDS)
SEED = 20


@cache
def faults() -> list[Fault]:
    return random_faults(COUNT, seed=SEED, kinds=KINDS)


@pytest.mark.parametrize("number", range(COUNT), ids=lambda n: f"{KINDS[n % len(KINDS)]}-{n // len(KINDS)}")
def test_a_fault_is_named_or_harmless(number, tmp_path):
    fault = faults()[number]
    outcome = run(fault, tmp_path)
    print(outcome)
    assert outcome.problem is None
    if fault.kind in ("EIO on read", "EIO on write", "ENOSPC", "truncated file", "io thread killed", "io thread hangs"):
        assert outcome.error is not None  # these cannot pass unseen
    if fault.kind in HARMLESS:
        assert outcome.error is None


def test_a_process_killed_in_the_middle_of_a_write_leaves_no_file(tmp_path):
    outcome = run(Fault(KILLED, at=usual_calls()["write"] // 3), tmp_path)
    assert outcome.problem is None
    assert outcome.error == "killed by signal 9"


def test_pages_do_come_and_go_in_these_runs():
    calls = usual_calls()
    assert calls["read"] > 100
    assert calls["write"] > 100
    assert len(expected().tensors) > 50


# -- the sweep would see it --------------------------------------------------------------------------------------------


def test_training_on_with_wrong_bytes_is_seen(tmp_path, monkeypatch):
    real = paging_faults._options

    def without_checksums(folder) -> PagingOptions:
        options = real(folder)
        return PagingOptions(options.device_budget, options.host_budget, options.disk_path, checksum="off")

    monkeypatch.setattr(paging_faults, "_options", without_checksums)
    problems = [run(Fault("forgotten write", at=at), tmp_path).problem for at in (20, 40, 60, 80)]
    assert any(problem is not None and "trained on with wrong bytes" in problem for problem in problems)


def test_a_fault_that_does_not_happen_proves_nothing(tmp_path):
    outcome = run(Fault("EIO on read", at=10**6), tmp_path)
    assert (outcome.error, outcome.differs) == (None, ())
    assert outcome.problem == "the fault did not happen"


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(Fault("slow disk", 1), True, "PageIoError: x"), "a harmless fault ended the run: PageIoError: x"),
        (Outcome(Fault("ENOSPC", 1), True, "KeyError", named=False), "the error does not say what happened: KeyError"),
        (Outcome(Fault("ENOSPC", 1), True, "PageIoError: x", left=("f",)), "files are left: f"),
        (Outcome(Fault("ENOSPC", 1), True, None, differs=("losses",)), "trained on with wrong bytes: losses"),
        (Outcome(Fault("ENOSPC", 1), True, "PageIoError: x"), None),
        (Outcome(Fault("flipped bit", 1), True, None), None),
    ],
)
def test_what_is_a_problem(outcome, problem):
    assert outcome.problem == problem
