"""How large an arena's segments are: pure functions.

[Note: segments]
Slots that lie together are copied together, and a segment is what lies together. In ordinary memory that gains nothing:
there segments are small, so that memory follows the slots taken closely. Beside an accelerator pages of 16 MiB are
copied, and memory is locked, segment by segment: segments are as large as ``LARGE_SEGMENT_BYTES``, but no larger than a
part of what the class has, and the last one has only the slots that its limit leaves. So an arena has at no time more
memory than its budget, unless this has shrunk since: then at most a segment a class more, until its pages leave.
"""

from __future__ import annotations

import torch

from megascale_omni.paging.layout import MIB

LARGE_SEGMENT_BYTES = 256 * MIB
"""The largest segment beside an accelerator."""

OF_LIMIT = 16
"""A segment has at most this part of what a class may have: what shrinking may leave behind."""
OF_CAPACITY = 8
"""Without a limit it has at most this part of what the class has already: what may lie empty."""


def largest_segment(device: torch.device) -> int | None:
    """Bytes of the largest segment of arenas for (or beside) a device; None: they are small, whatever is asked."""
    return None if device.type == "cpu" else LARGE_SEGMENT_BYTES


def slots_to_add(*, nbytes: int, capacity: int, limit: int | None, small: int, largest: int) -> int:
    """Slots of the next segment of a class with ``capacity`` slots of ``nbytes``, see [Note: segments].

    ``small``: bytes that a segment may have in any case.
    """
    if limit is None:
        return max(1, min(largest, max(small, capacity * nbytes // OF_CAPACITY)) // nbytes)
    wanted = max(1, min(largest, max(small, limit * nbytes // OF_LIMIT)) // nbytes)
    return min(wanted, max(1, limit - capacity))
