"""A plan: bytes by plane and tier, budgets, step time, stalls, break-even, and plain words.

[Note: break-even]
A page that comes over a link of ``B`` bytes/s to be used once in a forward must be met by enough tokens to hide it:
``tokens x 2 P / F >= P x s / B`` for ``P`` weights of ``s`` bytes and ``F`` FLOP/s, hence ``tokens >= s F / (2 B)``
for each expert and load. The optimizer has no such condition: its state comes once a step, however many tokens there
were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from megascale_omni.planner.models import ModelCard
from megascale_omni.planner.prediction import (
    Machine,
    Prediction,
    Run,
    active_share,
    micro_batches,
    predict,
    state_of,
    tiers_of,
)
from megascale_omni.planner.state import RankState

DEVICE_SHARE = 0.9
"""Of the device memory that a plan gives away; the rest is the framework's and for fragments."""

ADVISED = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
"""Shares of all pages that are tried, from much to little; the smallest that costs little is advised."""

SLOWER = 1.05
"""What a smaller budget may cost to be advised: time of a step, relative to the best that fits."""


@dataclass(frozen=True)
class Plan:
    """What a run will need and cost on one rank."""

    model: str
    device: str
    parameters: int
    expert_parameters: int
    dense_bytes: int
    activation_bytes: int
    plane_bytes: dict[str, int]
    total_page_bytes: int
    smallest_budget: int
    room_bytes: int
    advised_budget: int | None
    tier_bytes: dict[str, int]
    tokens_per_step: int
    tokens_per_expert: float
    break_even_tokens: dict[str, float]
    prediction: Prediction | None
    words: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        found = asdict(self)
        if self.prediction is not None:
            names = ("compute_seconds", "io_seconds", "step_seconds", "stall_seconds")
            found["prediction"] |= {name: getattr(self.prediction, name) for name in names}
        return found


def dense_state_bytes(card: ModelCard, run: Run) -> int:
    """Weights, gradients, masters and moments of the dense parameters of a rank."""
    each = (2 + (4 if run.fp32_gradients else 2) + 12) if card.bf16 else 16
    return card.dense_parameters * each // run.pipeline_parallel


def activation_bytes(card: ModelCard, run: Run) -> int:
    """A rough count of what forward keeps of a micro-batch: 34 numbers a token, layer and hidden element, and the
    experts' pre-activations; with full recompute only a layer's input and one whole layer.
    """
    tokens, size = card.micro_batch_size * card.seq_length, 2 if card.bf16 else 4
    layer = 17 * tokens * card.hidden_size * size
    wide = (2 if card.gated else 1) * card.moe_ffn_hidden_size + card.hidden_size
    layer += tokens * card.moe_router_topk * wide * size
    layers = -(-card.num_layers // run.pipeline_parallel)
    if card.recompute:
        return layer + layers * tokens * card.hidden_size * size
    return layer * layers * min(run.pipeline_parallel, micro_batches(card, run))


def room_bytes(card: ModelCard, run: Run, *, device_memory: int) -> int:
    """For pages, beside dense state and activations."""
    given = int(device_memory * DEVICE_SHARE)
    return max(0, given - dense_state_bytes(card, run) - activation_bytes(card, run))


def leaves_pages_out(card: ModelCard, run: Run, *, device_memory: int) -> bool:
    """Whether not all pages stay in device memory."""
    room = room_bytes(card, run, device_memory=device_memory) if run.budget_bytes is None else run.budget_bytes
    return room < state_of(card, run).total_bytes


def make_plan(card: ModelCard, machine: Machine, run: Run) -> Plan:
    """Plans a run on one rank.

    Raises:
        ValueError: what does not fit at all, with what would; layouts that cannot be.
    """
    state = state_of(card, run)
    dense, activations = dense_state_bytes(card, run), activation_bytes(card, run)
    room = room_bytes(card, run, device_memory=machine.device_memory)
    tokens = card.micro_batch_size * card.seq_length * card.moe_router_topk * run.expert_parallel
    tokens_per_expert = tokens / (card.num_experts * active_share(card, run))
    break_even = break_even_tokens(card, machine)
    fits = room >= state.smallest_budget
    wanted = run.budget_bytes if run.budget_bytes is not None else _advised(card, machine, run, state, room)
    planned = wanted is not None and (fits or run.budget_bytes is not None)
    words = []
    if _samples(card, run) != card.global_batch_size:
        words.append(
            f"A batch of {card.global_batch_size} samples cannot be divided into micro-batches of "
            f"{card.micro_batch_size} on {run.data_parallel} ranks: counted are {_samples(card, run)}."
        )
    words += _words(card, machine, state, room=room, dense=dense + activations, planned=planned)
    prediction = None
    tiers = dict.fromkeys(("device", "host", "disk"), 0)
    if wanted is not None and planned:
        if wanted < state.smallest_budget:
            raise ValueError(
                f"a budget of {wanted} bytes is too small for {card.name}: {state.smallest_budget} are needed: give "
                "that, or smaller pages"
            )
        prediction = predict(card, machine, run, state, budget_bytes=wanted)
        tiers = tiers_of(state, machine, budget_bytes=wanted)
        words += _about(prediction, tokens_per_expert=tokens_per_expert, break_even=break_even, tiers=tiers)
    if room < state.total_bytes:
        words += _ranks_that_hold(card, run, room=room)
    return Plan(
        model=card.name,
        device=machine.device.name,
        parameters=card.parameters,
        expert_parameters=card.expert_parameters,
        dense_bytes=dense,
        activation_bytes=activations,
        plane_bytes=state.plane_bytes,
        total_page_bytes=state.total_bytes,
        smallest_budget=state.smallest_budget,
        room_bytes=room,
        advised_budget=wanted if fits or run.budget_bytes is not None else None,
        tier_bytes=tiers,
        tokens_per_step=_samples(card, run) * card.seq_length,
        tokens_per_expert=tokens_per_expert,
        break_even_tokens=break_even,
        prediction=prediction,
        words=tuple(words),
    )


def break_even_tokens(card: ModelCard, machine: Machine) -> dict[str, float]:
    """Tokens an expert must have for each load, by where it comes from, see [Note: break-even]."""
    size = 2 if card.bf16 else 4
    peak = machine.device.bf16_flops if card.bf16 else machine.device.fp32_flops
    found = {"host": size * peak / (2 * machine.device.link_bytes)}
    if machine.disk is not None:
        found["disk"] = size * peak / (2 * machine.disk.read_bytes_s)
    return found


def _advised(card: ModelCard, machine: Machine, run: Run, state: RankState, room: int) -> int | None:
    if room < state.smallest_budget:
        return None
    if room >= state.total_bytes:
        return state.total_bytes
    if machine.disk is None and state.total_bytes - room > machine.host_memory:
        return room  # what else there is does not hold the rest
    tried: list[Prediction] = []
    for share in ADVISED:
        budget = max(state.smallest_budget, int(share * state.total_bytes))
        if budget <= room:
            tried.append(predict(card, machine, run, state, budget_bytes=budget, least=True))
            if tried[-1].step_seconds > SLOWER * tried[0].step_seconds:
                return tried[-2].budget_bytes
    return tried[-1].budget_bytes if tried else room


def _samples(card: ModelCard, run: Run) -> int:
    """Of a step that is counted."""
    return micro_batches(card, run) * card.micro_batch_size * run.data_parallel


def _ranks_that_hold(card: ModelCard, run: Run, *, room: int) -> list[str]:
    """The least expert parallelism with which all pages stay, where there is one."""
    for ranks in range(run.expert_parallel + 1, card.num_experts + 1):
        if card.num_experts % ranks == 0 and state_of(card, replace(run, expert_parallel=ranks)).total_bytes <= room:
            return [f"With --expert-parallel {ranks} all pages fit in device memory, and nothing has to move."]
    return []


def _words(card: ModelCard, machine: Machine, state: RankState, *, room: int, dense: int, planned: bool) -> list[str]:
    """What does not fit, and what to do."""
    found = []
    if room < state.smallest_budget:
        found.append(
            f"This does not fit: besides {gib(dense)} for dense state and activations, pages need "
            f"{gib(state.smallest_budget)} at least; {gib(room)} are left. Use more pipeline stages, full recompute, "
            + ("a smaller micro-batch or smaller pages." if room else "or a smaller micro-batch.")
        )
    elif room >= state.total_bytes:
        found.append("Everything fits in device memory: paging is not needed. Leave the budget out.")
    short = state.total_bytes - room - machine.host_memory
    if short > 0 and machine.disk is None:
        found.append(
            f"{gib(short)} have no place: give a disk (--disk-bandwidth), more host memory or more ranks."
            + (" The step above counts them as if host memory had room." if planned else "")
        )
    return found


def _about(
    prediction: Prediction,
    *,
    tokens_per_expert: float,
    break_even: Mapping[str, float],
    tiers: Mapping[str, int],
) -> list[str]:
    """Where paging loses, in words."""
    if prediction.loaded_bytes <= 0:
        return []
    if prediction.stall_seconds <= 0.05 * prediction.step_seconds:
        share = 100 * prediction.stall_seconds / prediction.step_seconds
        return ["What moves is hidden behind compute" + (f", but for {share:.0f} %." if share >= 1 else ".")]
    where = "disk" if tiers["disk"] and "disk" in break_even else "host"
    needed = break_even.get(where, 0.0)
    slower = prediction.step_seconds / prediction.compute_seconds
    found = [
        f"Paging loses here: a step moves {gib(prediction.loaded_bytes + prediction.written_bytes)} and waits for it: "
        f"it takes {slower:.1f} times what its compute takes."
    ]
    if needed > tokens_per_expert:
        found.append(
            f"Weights that come from {where} with every micro-batch pay from {needed:,.0f} tokens an expert; there are "
            f"{tokens_per_expert:,.0f}. Use larger micro-batches, or more expert parallelism, so that weights stay."
        )
    if tiers["disk"] and "disk" in break_even:
        found.append("More host memory keeps pages off the disk; larger global batches step the optimizer less often.")
    elif prediction.optimizer.io_seconds > prediction.passes.io_seconds:
        found.append("A larger global batch steps the optimizer, whose state is most of what moves, less often.")
    return found


def gib(nbytes: float) -> str:
    """Bytes for people."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes / 1024:.0f} KiB"
