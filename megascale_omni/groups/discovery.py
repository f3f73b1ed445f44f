"""Which ranks activated which expert with how many tokens: two ways to tell everyone.

* ``allgather``: one collective.
* ``gossip``: the dissemination exchange of :mod:`megascale_omni.groups.gossip`.
"""

from __future__ import annotations

import numpy as np
import torch

from megascale_omni.groups.channel import Channel, Transfer
from megascale_omni.groups.gossip import Discovery, behind, gossip_rounds


def discover(vector: torch.Tensor, channel: Channel, way: Discovery = "allgather") -> np.ndarray:
    """``[P, W]``: the vectors ``[W]`` (integers) of all ranks."""
    if way == "allgather" or channel.size == 1:
        gathered: np.ndarray = channel.all_gather(vector).cpu().numpy()
        return gathered
    result = vector.new_zeros(channel.size, *vector.shape)
    result[channel.rank] = vector
    for round_ in gossip_rounds(channel.rank, channel.size):
        sent = result[behind(channel.rank, round_.count, channel.size)]
        heard = torch.empty_like(sent)
        channel.transfer([Transfer(round_.target, sent, True), Transfer(round_.source, heard, False)]).wait()
        result[behind(round_.source, round_.count, channel.size)] = heard
    known: np.ndarray = result.cpu().numpy()
    return known
