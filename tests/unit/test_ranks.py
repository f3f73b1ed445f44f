"""What one rank cannot do, none does: all of them raise the same."""

import pytest

from megascale_omni.ranks import all_or_none
from tests.unit.checkpoint.runs import ThreadRanks


class Refused(ValueError):
    """Of a caller."""


def errors_of(failing: dict[int, Exception], *, doing: str = "") -> list[tuple[type, str] | int]:
    """What three ranks got, of which some fail."""

    def work(rank) -> tuple[type, str] | int:
        def made() -> int:
            if rank.rank in failing:
                raise failing[rank.rank]
            return rank.rank

        try:
            return all_or_none(made, kind=Refused, doing=doing, ranks=rank)
        except (Refused, RuntimeError) as error:
            caused = error.__cause__ is failing.get(rank.rank)
            return (type(error), str(error)) if caused else -1

    return ThreadRanks(3).run(work)


def test_each_rank_has_its_own_where_none_failed():
    assert errors_of({}) == [0, 1, 2]
    assert all_or_none(lambda: 7) == 7


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({1: Refused("no")}, (Refused, "no (rank 1)")),
        ({0: Refused("no"), 1: Refused("no"), 2: Refused("no")}, (Refused, "no")),
        ({0: Refused("no"), 2: Refused("never")}, (Refused, "no (rank 0); never (rank 2)")),
        ({2: OSError(28, "full")}, (RuntimeError, "OSError: [Errno 28] full (rank 2)")),
        ({0: Refused("no"), 1: KeyError("x")}, (RuntimeError, "no (rank 0); KeyError: 'x' (rank 1)")),
    ],
)
def test_every_rank_raises_what_any_did(failing, expected):
    assert errors_of(failing) == [expected] * 3


def test_the_message_says_what_was_being_done():
    assert errors_of({1: Refused("no")}, doing="loading x") == [(Refused, "loading x: no (rank 1)")] * 3
