"""How tokens reach experts on other ranks: the options, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megascale_omni.config.sizes import path_or_none

Dispatcher = Literal["stock", "groups"]
Move = Literal["auto", "tokens", "pages"]
Discovery = Literal["allgather", "gossip"]
GradWire = Literal["fp32", "bf16"]
Fetch = Literal["step", "demand"]


@dataclass(frozen=True)
class DistributedConfig:
    """How tokens reach experts on other ranks.

    Attributes:
        dispatcher: ``stock`` (the one that the framework is configured with), or ``groups``: each token once to each
            rank, partial results summed there.
        move: what travels to meet, with ``groups``: ``tokens``, ``pages`` of experts, or ``auto``, for each expert what
            costs less.
        discovery: how ranks tell each other their counts: ``allgather``, or ``gossip`` in ceil(log2 ranks) rounds.
        group_cache: groups (sets of ranks) that are remembered.
        topology: file that says where ranks are and what links carry; ``auto`` moves decide by it. None: bytes decide.
        placement: file that says which rank keeps which expert; None: experts by number, as stock.
        grad_wire: what expert gradients travel in between the ranks that have copies of an expert, and home from where
            its pages travelled: ``fp32`` (as they are), or ``bf16``, once, summed in fp32.
        fetch: when updated pages go to ranks that do not keep their optimizer state: all of them at each ``step``, or
            on ``demand``, those that tokens are about to need.
    """

    dispatcher: Dispatcher = "stock"
    move: Move = "auto"
    discovery: Discovery = "allgather"
    group_cache: int = 1024
    topology: str | None = None
    placement: str | None = None
    grad_wire: GradWire = "fp32"
    fetch: Fetch = "step"

    def __post_init__(self) -> None:
        known_choices = {"dispatcher": Dispatcher, "move": Move, "discovery": Discovery, "grad_wire": GradWire}
        for key, choices in {**known_choices, "fetch": Fetch}.items():
            if getattr(self, key) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise ValueError(f"distributed.{key}={getattr(self, key)!r} is unknown; choose one of {known}")
        size = self.group_cache
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"distributed.group_cache={size!r} must be a whole number of entries, 1 or more")
        for key in ("topology", "placement"):
            object.__setattr__(self, key, path_or_none(getattr(self, key), key=f"distributed.{key}", what="file"))
            if getattr(self, key) is not None and self.dispatcher != "groups":
                raise ValueError(
                    f"distributed.{key}={getattr(self, key)} has no effect with the framework's own dispatcher; add "
                    "distributed.dispatcher: groups (--megascale-dispatcher groups)"
                )
