"""The time of a step: what is computed, what moves, and what of it can happen at once.

[Note: time of a step]
A step has two parts. In the *passes* (forwards, backwards) products are made while weights and gradients move; in the
*optimizer* every element is read and written once while its state moves. In each part computing and moving go on side
by side and the longer one counts; the second part begins when the first has ended, because the norm of all gradients is
needed before the first page may be stepped. Where nothing is clipped, pages are stepped in the last backward, and all
of it is one part. Reading and writing share a disk, but not a link.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale_omni.paging.trace import Trace
from megascale_omni.planner.bandwidth import Disk
from megascale_omni.planner.devices import Device
from megascale_omni.planner.models import ModelCard
from megascale_omni.planner.state import RankState, rank_state
from megascale_omni.planner.steps import Work
from megascale_omni.planner.traffic import Moves, Traffic, step_traffic, traced_traffic


@dataclass(frozen=True)
class Machine:
    """One rank's share of a machine. ``disk`` None: there is none."""

    device: Device
    device_memory: int
    host_memory: int
    disk: Disk | None


@dataclass(frozen=True)
class Run:
    """How the model is trained. ``active_share``: of experts with tokens in a micro-batch; None: evenly drawn.

    ``routed``: which ones, for each forward and layer of the whole model, where it was measured. ``trace``: of a run
    of the same model, which tells what a step moves.
    """

    page_bytes: int
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    fp32_gradients: bool = True
    active_share: float | None = None
    routed: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    budget_bytes: int | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Part:
    """Seconds of computing and of moving that go on side by side."""

    compute_seconds: float
    io_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.compute_seconds, self.io_seconds)


@dataclass(frozen=True)
class Prediction:
    """A step under a budget. ``passes`` and ``optimizer`` come one after the other, see [Note: time of a step]."""

    budget_bytes: int
    passes: Part
    optimizer: Part
    loaded_bytes: float
    written_bytes: float

    @property
    def compute_seconds(self) -> float:
        """Of both parts."""
        return self.passes.compute_seconds + self.optimizer.compute_seconds

    @property
    def io_seconds(self) -> float:
        """What moves, at the bandwidth of where it lies."""
        return self.passes.io_seconds + self.optimizer.io_seconds

    @property
    def step_seconds(self) -> float:
        """Both parts."""
        return self.passes.seconds + self.optimizer.seconds

    @property
    def stall_seconds(self) -> float:
        """What is waited for."""
        return self.step_seconds - self.compute_seconds


def predict(
    card: ModelCard, machine: Machine, run: Run, state: RankState, *, budget_bytes: int, least: bool = False
) -> Prediction:
    """A step's time under a budget, see [Note: time of a step]; ``least``: moving no more than it must."""
    work = work_of(card, run)
    if run.trace is None:
        traffic = step_traffic(state, work, budget_bytes=budget_bytes, least=least)
    else:
        traffic = traced_traffic(run.trace, state, budget_bytes=budget_bytes)
    passes = passes_seconds(card, machine.device, run)
    optimizer = optimizer_bytes(card, run, state) / machine.device.memory_bytes_s
    tiers = tiers_of(state, machine, budget_bytes=budget_bytes)
    return timed(traffic, machine, tiers=tiers, passes=passes, optimizer=optimizer, together=work.step_in_backward)


def timed(
    traffic: Traffic, machine: Machine, *, tiers: dict[str, int], passes: float, optimizer: float, together: bool
) -> Prediction:
    """A step that moves ``traffic``. ``passes``, ``optimizer``: seconds of computing, in one part if ``together``."""
    on_disk = tiers["disk"] / max(1, tiers["host"] + tiers["disk"])

    def moving(moves: Moves) -> float:
        return io_seconds(moves, machine, on_disk=on_disk)

    first, second = Part(passes, moving(traffic.passes)), Part(optimizer, moving(traffic.step))
    if together:
        first, second = Part(passes + optimizer, moving(traffic.all)), Part(0.0, 0.0)
    moved = traffic.all
    return Prediction(tiers["device"], first, second, moved.loaded_bytes, moved.written_bytes)


def io_seconds(moves: Moves, machine: Machine, *, on_disk: float) -> float:
    """Seconds that moving takes where a share ``on_disk`` of it goes to and comes from the disk, the rest the link."""
    link = max(moves.loaded_bytes, moves.written_bytes) / machine.device.link_bytes
    if not on_disk or machine.disk is None:
        return link
    return max(link, machine.disk.seconds(on_disk * moves.loaded_bytes, on_disk * moves.written_bytes))


def state_of(card: ModelCard, run: Run) -> RankState:
    """The pages of the rank that has most.

    Raises:
        ValueError: see :func:`megascale_omni.planner.state.rank_state`.
    """
    return rank_state(
        card,
        page_bytes=run.page_bytes,
        expert_parallel=run.expert_parallel,
        pipeline_parallel=run.pipeline_parallel,
        fp32_gradients=run.fp32_gradients,
    )


def tiers_of(state: RankState, machine: Machine, *, budget_bytes: int) -> dict[str, int]:
    """Bytes of all pages by tier: device first, then host, then disk."""
    device = min(budget_bytes, state.total_bytes)
    host = min(machine.host_memory, state.total_bytes - device)
    return {"device": device, "host": host, "disk": state.total_bytes - device - host}


# -- what a step does --------------------------------------------------------------------------------------------------


def micro_batches(card: ModelCard, run: Run) -> int:
    """Of a step and rank; one at least, if ranks are more than a batch of the card has samples for."""
    return max(1, card.global_batch_size // (card.micro_batch_size * run.data_parallel))


def active_share(card: ModelCard, run: Run) -> float:
    """Share of a rank's experts that get tokens in a micro-batch where tokens choose evenly."""
    if run.active_share is not None:
        return run.active_share
    chosen = card.micro_batch_size * card.seq_length * card.moe_router_topk * run.expert_parallel
    return float(1.0 - (1.0 - 1.0 / card.num_experts) ** chosen)


def work_of(card: ModelCard, run: Run) -> Work:
    """What a step does with pages: the last backward completes gradients, where nobody else adds to them."""
    complete = run.data_parallel <= run.expert_parallel
    return Work(
        micro_batches(card, run),
        active_share(card, run),
        recompute=card.recompute,
        gradient_sweep=not complete,
        step_in_backward=complete and not card.clips,
        routed=run.routed if run.expert_parallel == 1 else None,
    )


def passes_seconds(card: ModelCard, device: Device, run: Run) -> float:
    """Six operations a token and active parameter (eight with recompute), attention's scores included."""
    tokens = micro_batches(card, run) * card.micro_batch_size * card.seq_length
    passes = 8 if card.recompute else 6
    experts = card.moe_layers * card.moe_router_topk * card.expert.num_parameters
    dense = card.dense_parameters + card.num_layers * card.seq_length * card.hidden_size
    rate = device.flops(bf16=card.bf16)
    return tokens * passes * (dense / rate + experts / (rate * device.experts)) / run.pipeline_parallel


def optimizer_bytes(card: ModelCard, run: Run, state: RankState) -> float:
    """Read and written by one pass over gradients, masters, moments and weights of a rank's parameters.

    An expert without tokens in the whole step is not stepped.
    """
    each = 30 if card.bf16 else 28
    stepped = 1.0 - (1.0 - active_share(card, run)) ** micro_batches(card, run)
    experts = sum(m.entry.num_experts * m.layout.shape.num_parameters for m in state.modules)
    return each * (card.dense_parameters / run.pipeline_parallel + stepped * experts)
