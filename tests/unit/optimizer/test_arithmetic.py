"""Adam on pages has the bits of torch.optim on whole tensors, on any cut, with any steps missed and replayed."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from megascale_omni.optimizer import arithmetic as module
from megascale_omni.optimizer.arithmetic import AdamArithmetic, arithmetic_for
from megascale_omni.optimizer.history import History, StepRecord

DECOUPLED_FUSED = [(True, False), (False, False), (True, True), (False, True)]


@pytest.fixture(params=DECOUPLED_FUSED, ids=lambda p: arithmetic_for(decoupled=p[0], fused=p[1]).name)
def kind(request) -> tuple[bool, bool]:
    return request.param


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit-equal, signs of zero and all, except that NaN is NaN."""
    same = actual.view(torch.int32) == expected.view(torch.int32)
    same |= actual.isnan() & expected.isnan()
    assert bool(same.all()), f"{what}: {int((~same).sum())} of {same.numel()} elements differ"


def records(steps: int) -> list[StepRecord]:
    """Every scalar changes on the way: warm-up, decay on and off, betas beyond one half, eps."""
    return [
        StepRecord(
            step=i + 1,
            lr=3e-3 * min(1.0, (i + 1) / 10) * 0.99**i,
            weight_decay=(0.1, 0.1, 0.0, 0.013)[i // 5 % 4],
            beta1=(0.9, 0.95, 0.4, 0.0)[i // 7 % 4],
            beta2=(0.999, 0.95)[i // 11 % 2],
            eps=(1e-8, 1e-5)[i // 13 % 2],
        )
        for i in range(steps)
    ]


class Dense:
    """The dense optimizer on one whole tensor."""

    def __init__(self, p: torch.Tensor, kind: tuple[bool, bool], foreach: bool = False) -> None:
        decoupled, fused = kind
        self.p = torch.nn.Parameter(p.clone())
        cls = torch.optim.AdamW if decoupled else torch.optim.Adam
        self.optimizer = cls([self.p], lr=1.0, fused=True) if fused else cls([self.p], lr=1.0, foreach=foreach)

    def step(self, g: torch.Tensor, record: StepRecord) -> None:
        self.optimizer.param_groups[0].update(
            lr=record.lr, weight_decay=record.weight_decay, betas=(record.beta1, record.beta2), eps=record.eps
        )
        self.p.grad = g.clone()
        self.optimizer.step()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[self.p]
        return {"p": self.p.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"]}


def state_of(p: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"p": p.clone(), "m": torch.zeros_like(p), "v": torch.zeros_like(p)}


def wide(numel: int) -> torch.Tensor:
    """Values over many orders of magnitude, with zeros of both signs."""
    x = torch.randn(numel) * torch.exp(4 * torch.randn(numel))
    x[torch.rand(numel) < 0.02] = 0.0
    x[torch.rand(numel) < 0.02] = -0.0
    return x


@pytest.mark.parametrize("foreach", [False, True])
def test_steps_have_the_bits_of_the_dense_optimizer(kind, foreach):
    p = wide(3001)
    dense, ours, state = Dense(p, kind, foreach), arithmetic_for(decoupled=kind[0], fused=kind[1]), state_of(p)
    for record in records(60):
        g = wide(3001)
        kept = g.clone()
        dense.step(g, record)
        ours.step(**state, g=g, record=record)
        assert torch.equal(g, kept), "the gradient was changed"
        for name, expected in dense.state.items():
            assert_same_bits(state[name], expected, f"{name} after step {record.step}")


def test_missed_steps_replayed_at_next_touch_have_the_bits_of_dense_zero_gradients(kind):
    """Half of each seldom touched: 5 % of 300 steps; the others are replayed in one go, the last ones at the end."""
    numel, steps = 3001, 300
    p, zero = wide(numel), torch.zeros(numel)
    dense, ours, state = Dense(p, kind), arithmetic_for(decoupled=kind[0], fused=kind[1]), state_of(p)
    history, seen, touches = History(), 0, 0
    for record in records(steps):
        active = torch.rand(()).item() < 0.05
        g = wide(numel) if active else zero
        dense.step(g, record)
        history.append("group", record)
        if active:
            ours.replay(**state, records=history.since("group", seen)[:-1])
            ours.step(**state, g=g, record=record)
            seen, touches = record.step, touches + 1
            for name, expected in dense.state.items():
                assert_same_bits(state[name], expected, f"{name} after step {record.step}")
    assert 3 <= touches <= 40
    ours.replay(**state, records=history.since("group", seen))
    for name, expected in dense.state.items():
        assert_same_bits(state[name], expected, f"{name} at the end")


def test_idle_is_a_step_without_gradient(kind):
    ours = arithmetic_for(decoupled=kind[0], fused=kind[1])
    state = {"p": wide(517), "m": wide(517), "v": wide(517).abs()}
    other = {name: tensor.clone() for name, tensor in state.items()}
    for record in records(40):
        ours.idle(**state, record=record)
        ours.step(**other, g=torch.zeros(517), record=record)
        for name in state:
            assert_same_bits(state[name], other[name], f"{name} after step {record.step}")


def test_moments_decay_into_subnormal_numbers(kind):
    """A thousand steps after the last gradient m is a few times the smallest number; the bits agree all the way."""
    ours = arithmetic_for(decoupled=kind[0], fused=kind[1])
    p = torch.randn(67)
    dense, state = Dense(p, kind), state_of(p)
    steps = [StepRecord(i + 1, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8) for i in range(1000)]
    g = wide(67)
    dense.step(g, steps[0])
    for record in steps[1:]:
        dense.step(torch.zeros(67), record)
    ours.step(**state, g=g, record=steps[0])
    ours.replay(**state, records=steps[1:])
    for name, expected in dense.state.items():
        assert_same_bits(state[name], expected, name)
    if kind[0]:
        assert bool(state["m"].abs().lt(torch.finfo(torch.float32).tiny).all())


def step_in_pieces(ours: AdamArithmetic, state: dict, g: torch.Tensor, record: StepRecord, cuts: list[int]) -> None:
    for start, stop in itertools.pairwise(cuts):
        views = {name: tensor[start:stop] for name, tensor in state.items()}
        ours.step(**views, g=g[start:stop], record=record)


@hypothesis.given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 4097])), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    decoupled=st.booleans(),
)
@hypothesis.settings(max_examples=60)
def test_unfused_steps_are_the_same_on_any_cut(lengths, seed, decoupled):
    """Odd lengths at odd offsets: no element is rounded otherwise for standing at the end of a view."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    p, g = (torch.randn(total, generator=generator) for _ in range(2))
    m, v = torch.randn(total, generator=generator), torch.randn(total, generator=generator).square()
    whole = {"p": p, "m": m, "v": v}
    state = {name: tensor.clone() for name, tensor in whole.items()}
    ours = arithmetic_for(decoupled=decoupled, fused=False)
    cuts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    for record in records(20)[::6]:
        ours.step(**whole, g=g, record=record)
        step_in_pieces(ours, state, g, record, cuts)
    for name, expected in whole.items():
        assert_same_bits(state[name], expected, name)


@hypothesis.given(
    multiples=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    tail=st.integers(0, 40),
    seed=st.integers(0, 2**31),
    decoupled=st.booleans(),
)
@hypothesis.settings(max_examples=40)
def test_fused_steps_are_the_same_on_cuts_at_the_stated_multiple(multiples, tail, seed, decoupled):
    generator = torch.Generator().manual_seed(seed)
    ours = arithmetic_for(decoupled=decoupled, fused=True)
    cuts = [ours.cut_multiple * sum(multiples[:i]) for i in range(len(multiples) + 1)]
    cuts.append(cuts[-1] + tail)  # only the last view may have any length
    total = cuts[-1]
    p, g = (torch.randn(total, generator=generator) for _ in range(2))
    m, v = torch.randn(total, generator=generator), torch.randn(total, generator=generator).square()
    whole = {"p": p, "m": m, "v": v}
    state = {name: tensor.clone() for name, tensor in whole.items()}
    for record in records(20)[::6]:
        ours.step(**whole, g=g, record=record)
        step_in_pieces(ours, state, g, record, cuts)
    for name, expected in whole.items():
        assert_same_bits(state[name], expected, name)


@pytest.mark.parametrize(("chunk", "threads"), [(4096, 1), (4096, 2), (2**16, 1), (2**17, 2)])
def test_views_of_many_chunks_and_any_number_of_threads(kind, monkeypatch, chunk, threads):
    numel = 2**16 + 2**12 + 13
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(module, "STEP_CHUNK", chunk)
    p, g = torch.randn(numel), torch.randn(numel)
    dense, ours, state = Dense(p, kind), arithmetic_for(decoupled=kind[0], fused=kind[1]), state_of(p)
    first, *rest = records(6)
    dense.step(g, first)
    for record in rest:
        dense.step(torch.zeros(numel), record)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        ours.step(**state, g=g, record=first)
        ours.replay(**state, records=rest)
    finally:
        torch.set_num_threads(before)
    for name, expected in dense.state.items():
        assert_same_bits(state[name], expected, name)


def test_non_finite_gradients_do_what_torch_does(kind):
    p = torch.randn(100)
    dense, ours, state = Dense(p, kind), arithmetic_for(decoupled=kind[0], fused=kind[1]), state_of(p)
    for record in records(5):
        g = wide(100)
        if record.step == 2:
            g[[0, 17, 50, 99]] = torch.tensor([math.nan, math.inf, -math.inf, 3e38])
        if record.step >= 4:
            g.zero_()
            ours.idle(**state, record=record)
        else:
            ours.step(**state, g=g, record=record)
        dense.step(g, record)
        for name, expected in dense.state.items():
            assert_same_bits(state[name], expected, f"{name} after step {record.step}")
    assert bool(state["p"].isnan().any())


def test_no_elements_and_no_records_are_no_work(kind):
    ours = arithmetic_for(decoupled=kind[0], fused=kind[1])
    empty = state_of(torch.empty(0))
    ours.step(**empty, g=torch.empty(0), record=records(1)[0])
    ours.replay(**empty, records=records(3))
    state = state_of(torch.randn(5))
    kept = state["p"].clone()
    ours.replay(**state, records=[])
    assert torch.equal(state["p"], kept)


def test_what_cannot_be_replayed_is_refused_by_name():
    with pytest.raises(ValueError, match="amsgrad"):
        arithmetic_for(decoupled=True, fused=False, amsgrad=True)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=str(dtype)):
            arithmetic_for(decoupled=True, fused=False, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("m", torch.zeros(7)),
        ("p", torch.zeros(8, dtype=torch.bfloat16)),
        ("v", torch.zeros(16)[::2]),
        ("g", torch.zeros(8, dtype=torch.float64)),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_nothing_is_stepped(kind, name, wrong):
    ours = arithmetic_for(decoupled=kind[0], fused=kind[1])
    state = {**state_of(torch.ones(8)), "g": torch.ones(8), name: wrong}
    before = {key: tensor.clone() for key, tensor in state.items()}
    with pytest.raises(ValueError, match=f"{name}:"):
        ours.step(**state, record=records(1)[0])
    assert all(torch.equal(tensor, before[key]) for key, tensor in state.items())
