"""Any sequence of operations under a small budget keeps every page's bytes, wherever the page is; see ``machine.py``.

One machine decides by itself in which order jobs end, so that a failure comes back; the other has real io threads.
"""

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import rule

from megascale_omni.paging.mover import Mover
from tests.unit.paging.machine import PagerMachine
from tests.unit.paging.movers import ManualMover


class ChosenOrder(PagerMachine):
    """Jobs end when the machine says so."""

    @rule(index=st.integers(0, 100))
    def a_job_ends(self, index: int) -> None:
        assert isinstance(self.mover, ManualMover)
        if self.mover.pending:
            self.mover.complete(index=index % len(self.mover.pending))


class IoThreads(PagerMachine):
    """Real io threads."""

    def make_mover(self, seed: int) -> Mover:
        return Mover(readers=2, writers=2)


TestChosenOrder = ChosenOrder.TestCase
TestChosenOrder.settings = hypothesis.settings(max_examples=30, stateful_step_count=40)
TestIoThreads = IoThreads.TestCase
TestIoThreads.settings = hypothesis.settings(max_examples=12, stateful_step_count=40)
