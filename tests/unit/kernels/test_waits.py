"""Where all pages are resident the host waits for no numbers of tokens, and nothing else is other than if it had."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megascale_omni.experts.combine import Combine
from megascale_omni.experts.completion import LastGradients
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.tokens import ComingCounts, rows_of_map
from megascale_omni.kernels.wave import WaveItem, wave_tables
from megascale_omni.kernels.wave_schedule import whole_wave_tables
from megascale_omni.optimizer.cuda_arithmetic import CudaAdamW
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.optimizer.replay_ahead import ReplayAhead
from megascale_omni.paging import batches
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.observe import Observer
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.whole import WholeModules
from tests.unit.experts.paged import CPU, HIDDEN, Tensors, active_experts, drop_gradients, grad_of, gradients, leaf
from tests.unit.kernels.checker import checked
from tests.unit.kernels.test_backend import kernel_experts, pages_of

TOPK = 2
Routes = Sequence[Sequence[int]]


class Host(TorchDispatchMode):
    """What the host asks an accelerator for: numbers of tokens, values and sizes of results."""

    SIZES = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "repeat_interleave", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.SIZES:
            self.waits.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watched(self) -> Iterator[Host]:
        """Inside, whatever makes the host wait is written down."""

        def seen(method: str) -> Callable[..., object]:
            plain = getattr(torch.Tensor, method)

            def read(tensor: torch.Tensor, *args: object, **more: object) -> object:
                if not sys._getframe(1).f_globals["__name__"].startswith("triton"):  # the interpreter's own reading
                    self.waits.append(method)
                return plain(tensor, *args, **more)

            return read

        methods = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__")
        with ExitStack() as stack:
            for method in methods:
                stack.enter_context(mock.patch.object(torch.Tensor, method, seen(method)))
            yield stack.enter_context(self)


class Late(ComingCounts):
    """Numbers that have not come until somebody waits for them."""

    waits = 0

    def __init__(self, counts_E: torch.Tensor) -> None:
        super().__init__(counts_E.clone())
        self._heard = False

    @property
    def have_come(self) -> bool:
        return self._heard

    def wait(self) -> list[int]:
        if not self._heard:
            Late.waits += 1
        self._heard = True
        return self._counts_E.tolist()


def map_of(routes: Routes, num_experts: int = 4) -> torch.Tensor:
    map_ET = torch.zeros(num_experts, len(routes), dtype=torch.bool)
    for token, experts in enumerate(routes):
        map_ET[list(experts), token] = True
    return map_ET


def computed(experts: PagedExperts, routes: Routes, *, ahead: bool, recomputes: bool = False) -> Tensors:
    """A micro-batch there and back, as the dispatcher of one rank has it computed."""
    torch.manual_seed(len(routes))
    dtype = experts.pages.dtypes[Plane.WEIGHT]
    tokens, grad = (torch.randn(len(routes), HIDDEN).to(dtype) for _ in range(2))
    x, probs = leaf(tokens), leaf(torch.rand(len(routes), experts.num_experts).to(dtype))
    map_ET = map_of(routes, experts.num_experts)

    def layer(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        coming = Late(map_ET.sum(1))
        counts = coming if ahead else coming.wait()
        rows = TOPK * len(routes) if isinstance(counts, ComingCounts) else sum(counts)
        expert_N, index_N = rows_of_map(map_ET, rows)
        place_N = (index_N * experts.num_experts + expert_N).clamp_min(0)
        return experts(x, counts, probs.reshape(-1).index_select(0, place_N), index_N)

    if recomputes:
        y = torch.utils.checkpoint.checkpoint(layer, x, probs, use_reentrant=False)
    else:
        y = layer(x, probs)
    assert isinstance(y, torch.Tensor)
    y.backward(grad)
    assert not experts.manager.table.pins.any()
    return {"y": y.detach(), "x": grad_of(x), "probs": grad_of(probs)}


def differences(found: Tensors, expected: Tensors) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not tensor.equal(found[name])]


EVEN: Routes = [[0, 2], [2, 3]] * 9
DROPPED: Routes = [[1], [], [1, 3], [], [3]]
MICRO_BATCHES = (EVEN, DROPPED)


@pytest.mark.parametrize(("dtype", "ffn"), [(torch.float32, 24), (torch.bfloat16, 16)])
def test_nobody_waits_and_every_bit_is_as_if_the_host_had_known(seed, dtype, ffn):
    found = []
    for ahead in (False, True):
        torch.manual_seed(seed)
        experts = kernel_experts(rows=16, ffn=ffn, dtype=dtype, gradient_dtype=torch.float32)
        assert experts.goes_ahead
        Late.waits = 0
        results: Tensors = {}
        with Host().watched() as host:
            for number, routes in enumerate(MICRO_BATCHES):
                given = computed(experts, routes, ahead=ahead, recomputes=number == 1)
                results |= {f"{name} {number}": tensor for name, tensor in given.items()}
        assert (Late.waits, host.waits) == ((0, []) if ahead else (3, ["tolist"] * 3))
        assert active_experts(experts) == [0, 1, 2, 3]
        found.append(results | gradients(experts))
        assert Late.waits == 3, "what comes later is heard when somebody asks"
    assert differences(found[1], found[0]) == []


def test_every_access_is_inside_and_experts_without_tokens_are_not_touched():
    experts = kernel_experts(rows=16)
    with checked(reachable=lambda: pages_of(experts), order="backward") as launched:
        computed(experts, DROPPED, ahead=True)
    assert launched.count("wave_schedule") == 2
    tables = experts.manager.table.tier[experts.manager.ids(experts.pages, Plane.GRADIENT, [0, 2])]
    pages = [experts.manager.page_tensor(int(i)) for i in experts.manager.ids(experts.pages, Plane.GRADIENT, [0, 2])]
    assert tables.all(), "there are provisional pages"
    assert all(page.isnan().all() for page in pages), "nobody has written to them"
    assert active_experts(experts) == [1, 3]
    experts.manager.check_integrity()


def mutant(self: WholeModules, module, coming, **options):
    coming.wait()
    yield from PLAIN(self, module, coming, **options)


PLAIN = WholeModules.waves


def test_a_host_that_waits_is_seen(monkeypatch):
    monkeypatch.setattr(WholeModules, "waves", mutant)
    experts, Late.waits = kernel_experts(rows=16, ffn=16), 0
    with Host().watched() as host:
        computed(experts, EVEN[:2], ahead=True)
    assert Late.waits == 1
    assert "tolist" in host.waits
    with Host().watched() as host:
        torch.ones(3).cpu()
        bool(torch.ones(1))
        torch.ones(3).nonzero()
    assert {"cpu", "__bool__", "nonzero"} <= set(host.waits)


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "spare"), [((5, 0, 17, 3), 0), ((0, 0, 0, 0), 7), ((0, 33, 0, 0, 16), 7), ((1,), 0), ((16, 32), 0)]
)
def test_tables_made_on_the_device_are_those_of_the_host(counts, spare):
    layout = PageLayout(ExpertShape(hidden=8, ffn=40, gated=True, bias=False), 16)
    slices, total = layout.num_slices, sum(counts)
    addresses = torch.arange(1, len(counts) * slices + 1) * 4096
    written = torch.tensor([3 * (e % 2) for e in range(len(counts))])
    before = written.clone()
    sizes = {"item_rows": 16, "chain_rows": 8}
    with checked(order=4):
        made = whole_wave_tables(
            torch.tensor(counts), addresses, addresses + 1024, written, layout=layout, num_rows=total + spare, **sizes
        )
    items, row, first = [], 0, 0
    for expert, count in enumerate(counts):
        for slice_ in range(slices if count else 0):
            address = int(addresses[expert * slices + slice_])
            items.append(
                WaveItem(
                    expert=expert,
                    slice=slice_,
                    first_row=first,
                    rows=count,
                    block=first * 40 + count * 16 * slice_,
                    neurons=layout.rows_of(slice_),
                    weight_address=address,
                    gradient_address=address + 1024,
                    fresh=bool(before[expert] == 0),
                )
            )
            row += count
        first += count
    if not items:
        assert (made.tiles == torch.tensor([len(counts) * slices, 0])).all()
        assert not made.items[:, [2, 6]].any()
        return
    expected = wave_tables(items, last_slice=slices - 1, device=torch.device("cpu"), **sizes)
    numbers = [item.expert * slices + item.slice for item in items]
    assert made.items[numbers].equal(expected.items)
    others = sorted(set(range(made.items.shape[0])) - set(numbers))
    assert not made.items[others][:, [2, 6]].any(), "no rows, no neurons"
    owners = torch.tensor(numbers)[expected.tiles[:, 0].long()]
    tiles = len(expected.tiles)
    assert made.tiles[:tiles].equal(torch.stack([owners, expected.tiles[:, 1]], dim=1).int())
    assert (made.tiles[tiles:] == torch.tensor([len(counts) * slices, 0])).all()
    chains = len(expected.chain_tiles)
    active = [e for e, count in enumerate(counts) if count]
    for of_expert, of_wave in zip(made.chains[active], expected.chains, strict=True):
        assert of_expert[1:].equal(of_wave[1:])
        assert numbers[int(of_wave[0])] == of_expert[0]
    chained = torch.tensor(active)[expected.chain_tiles[:, 0].long()]
    assert made.chain_tiles[:chains, 0].equal(chained.int())
    assert made.chain_tiles[:chains, 1].equal(expected.chain_tiles[:, 1])
    assert (made.chain_tiles[chains:] == torch.tensor([len(counts), 0])).all()
    assert written.equal(before + torch.tensor(counts))


# -- books -------------------------------------------------------------------------------------------------------------


def adam_of(experts: PagedExperts, *, kernels: bool = False) -> PagedAdam:
    group = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    binding = [(experts, GroupBinding(weights=0, biases=None))]
    return PagedAdam(binding, groups=[group], arithmetic=CudaAdamW(kernels=kernels), shards=PageShards(), max_lag=4)


class Told(Observer):
    """All that an observer hears."""

    KINDS = ("visited", "routed", "reached", "held", "released", "created", "dropped", "written")

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[object]]] = []
        for kind in self.KINDS:
            setattr(self, kind, partial(self._hear, kind))

    def _hear(self, kind: str, *what: object) -> None:
        self.heard.append((kind, [each.tolist() if isinstance(each, np.ndarray) else each for each in what]))


FEW, SAME = EVEN[:2], [[0, 2]]
STEPS: list[list[Routes]] = [[FEW], [DROPPED], [FEW, SAME], [DROPPED]]
"""Experts without tokens in every step; some are caught up when they are read again, by one micro-batch or by two."""


def trained(seed: int, ahead: bool, told: Told | None = None) -> tuple[Tensors, list[list[int]]]:
    """State after some steps, and every page's last step after each of them."""
    torch.manual_seed(seed)
    experts = kernel_experts(rows=16, ffn=16)
    for plane in (Plane.MOMENT1, Plane.MOMENT2):
        experts.manager.set_plane_dtype(experts.pages, plane, torch.float32)
    adam, steps = adam_of(experts, kernels=ahead), []
    ids = experts.manager.ids(experts.pages, Plane.WEIGHT, range(experts.num_experts))
    if told is not None:
        experts.manager.observers.append(told)
    for micro_batches in STEPS:
        Late.waits = 0
        with Host().watched() as host:
            for routes in micro_batches:
                computed(experts, routes, ahead=ahead)
        assert not ahead or (Late.waits, host.waits) == (0, [])
        adam.step()
        drop_gradients(experts)
        steps.append(experts.manager.table.last_step[ids].tolist())
        experts.manager.check_integrity()
    moments = {f"m {n}": t for n, t in adam.dense(experts, Plane.MOMENT1).items()}
    return experts.dense() | moments, steps


def test_an_expert_without_tokens_is_not_stepped_as_if_it_had_any_and_observers_hear_the_same(monkeypatch, seed):
    told = Told(), Told()
    known, known_steps = trained(seed, ahead=False, told=told[0])
    found, steps = trained(seed, ahead=True, told=told[1])
    assert steps == known_steps, "deferred as ever"
    assert all(min(last) < max(last) for last in steps)
    assert differences(found, known) == []
    assert told[0].heard == told[1].heard
    assert sum(name == "routed" for name, _ in told[0].heard) == sum(map(len, STEPS))
    replay = ReplayAhead.replay
    monkeypatch.setattr(ReplayAhead, "replay", lambda self, *what, known: replay(self, *what, known=True))
    assert differences(trained(seed, ahead=True)[0], known), "what two micro-batches read is caught up once"


def test_more_tokens_than_there_is_room_for_end_the_run():
    experts = kernel_experts()
    computed(experts, [[0, 1, 2, 3], [0, 1, 2]], ahead=True)
    with pytest.raises(RuntimeError, match="experts got 7 tokens, room was made for 4; nothing of them was computed"):
        experts.manager.present(experts.pages, Plane.GRADIENT)


def test_what_fails_leaves_no_gradient_page(monkeypatch):
    experts = kernel_experts()
    monkeypatch.setattr(
        "megascale_omni.kernels.backend.launch_weight_gradient", mock.Mock(side_effect=ValueError("broken"))
    )
    with pytest.raises(ValueError, match="broken"):
        computed(experts, EVEN[:2], ahead=True)
    assert active_experts(experts) == []
    assert not experts.manager.table.pins.any()
    experts.manager.check_integrity()


def test_who_must_know_at_once_does_not_go_ahead():
    experts = kernel_experts()
    assert experts.goes_ahead
    assert not kernel_experts(bias=True).goes_ahead
    LastGradients(ExpertGradients([experts]), scale=1.0, backwards=lambda: 1)
    assert not experts.goes_ahead
    with pytest.raises(RuntimeError, match="counts are on their way, and are needed now"):
        computed(experts, EVEN[:2], ahead=True)
    with pytest.raises(RuntimeError, match="need an index"):
        kernel_experts()(torch.randn(2, HIDDEN), Late(torch.tensor([1, 1, 0, 0])))


def test_outputs_that_are_weighted_when_they_are_summed_go_ahead_too(seed):
    found = []
    index_Tk = torch.tensor(EVEN[:5])
    combine = Combine.of_routing(index_Tk, each=True)
    for ahead in (False, True):
        torch.manual_seed(seed)
        experts, Late.waits = kernel_experts(rows=16, ffn=16), 0
        x, weights = leaf(torch.randn(5, HIDDEN)), leaf(torch.rand(5, TOPK))
        coming = Late(torch.bincount(index_Tk.reshape(-1), minlength=4))
        weights_N = weights.reshape(-1).index_select(0, combine.order_N)
        y = experts(x, coming if ahead else coming.wait(), weights_N, combine.token_N, combine)
        y.square().sum().backward()
        assert Late.waits == (not ahead)
        found.append({"y": y.detach(), "x": grad_of(x), "weights": grad_of(weights), **gradients(experts)})
    assert differences(found[1], found[0]) == []


# -- gradients ---------------------------------------------------------------------------------------------------------


def stepped(
    seed: int, *, ends_run: bool | None, bad: bool = False, options: PagingOptions | None = None
) -> tuple[Tensors, Tensors, list[str], str | None]:
    """State before and after a step, what the host waited for in the backward, and the gradient that is not finite.

    ``ends_run`` None: pages are stepped after the backward.
    """
    torch.manual_seed(seed)
    manager = ExpertManager(device=CPU, options=options, poison=True)
    experts = kernel_experts(rows=16, ffn=24 if bad else 16, manager=manager)  # six waves, or three pages in one
    for plane in (Plane.MOMENT1, Plane.MOMENT2):
        experts.manager.set_plane_dtype(experts.pages, plane, torch.float32)
    adam, gradients = adam_of(experts, kernels=True), ExpertGradients([experts])
    if ends_run is not None:
        last = LastGradients(gradients, scale=0.5, backwards=lambda: 1, ends_run=ends_run)
        last.stepper = adam
    before = experts.dense()
    x = leaf(torch.randn(4, HIDDEN))
    y = experts(x, [1, 1, 0, 2], torch.rand(4))
    grad = torch.randn(4, HIDDEN)
    grad[1] *= float("nan") if bad else 1.0
    with Host().watched() as host:
        y.backward(grad)
    gradients.finish(scale=0.5)
    found = gradients.non_finite
    if found is None:
        adam.step()
    table = experts.manager.table
    experts.manager.set_catch_up(experts.pages, None)  # to look at what is there
    assert not table.pins.any()
    after = experts.dense() | {f"m {n}": t for n, t in experts.dense(Plane.MOMENT1).items()}
    assert options is None or manager.stats()["pages_loaded"] > 0
    manager.close()
    return before, after, host.waits, found


def test_a_backward_that_steps_pages_waits_for_none_of_them(monkeypatch, seed, tmp_path):
    after = stepped(seed, ends_run=None)
    with monkeypatch.context() as patched:
        patched.setattr(batches, "BATCH_BYTES", 1)  # a page a wave, and the smallest budget of all
        leaving = PagingOptions(device_budget=Budget(nbytes=0), disk_path=tmp_path)
        moved = stepped(seed, ends_run=True, options=leaving)
    read, guarded = (stepped(seed, ends_run=ends_run) for ends_run in (False, True))
    for found in (read, guarded, moved):
        assert differences(found[1], after[1]) == []
    assert after[2] == guarded[2] == moved[2] == []
    assert read[2] == ["tolist"], "once a wave, where the run goes on with what is not finite"


def test_nothing_is_stepped_from_a_gradient_on_that_is_not_finite(seed):
    before, after, waits, found = stepped(seed, ends_run=True, bad=True)
    assert waits == []
    assert found is not None
    assert "local expert 1" in found
    changed = [name.split(".")[1] for name in differences({n: after[n] for n in before}, before)]
    assert set(changed) == {"0"}, "its expert, and those that came later, are as they were"


class OneOfTwo:
    """What reduces pages of two ranks, of which this is one and the other has the same gradients."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def reduce(self, experts: PagedExperts, plan, read):
        for item in plan:
            part = torch.empty(experts.layout.page_numel(item.name[1]))
            read([item.name], {item.name: part})
            yield item.name, part * 2 if item.name[0] < 3 else None


@pytest.mark.parametrize("bad", [False, True])
def test_parts_of_replicas_are_checked_at_once(monkeypatch, seed, bad):
    found = []
    for by_kernel in (False, True):
        torch.manual_seed(seed)
        experts = kernel_experts(rows=16, ffn=24)
        backend = experts.context.backend
        names = [(0, 1), (2, 0), (3, 0)]
        experts.manager.create_ids(experts.pages, Plane.GRADIENT, experts.page_ids(Plane.GRADIENT, names))
        with experts.lease(Plane.GRADIENT, names) as lease:
            for name in names:
                lease.page(*name).normal_()
            lease.page(3, 0)[2] = float("inf") if bad else 1.0
        gradients = ExpertGradients([experts])
        mask = experts.manager.present(experts.pages, Plane.GRADIENT).reshape(1, -1)
        with monkeypatch.context() as patched:
            patched.setattr(backend, "measures", lambda page, by_kernel=by_kernel: by_kernel)
            patched.setattr("megascale_omni.experts.gradients.PageReducer", OneOfTwo)
            touched = mock.Mock(return_value=[np.repeat(mask, 2, 0)])
            patched.setattr("megascale_omni.experts.gradients.exchange_touched", touched)
            patched.setattr(torch.distributed, "get_world_size", lambda group: 2)
            patched.setattr(ExpertGradients, "_channel_of", lambda *_: mock.Mock(size=2))
            with Host().watched() as host:
                gradients.finish(scale=0.25, group=mock.Mock())
            assert bool(host.waits) != by_kernel
            with Host().watched() as host:
                heard = gradients.non_finite
            assert host.waits == (["tolist"] if by_kernel else [])
            found.append((heard, gradients.squares(PageShards()), active_pages(experts)))
    assert found[0] == found[1]
    assert (found[0][0] is not None) == bad
    assert found[0][2] == [(0, 1), (2, 0)], "the other rank keeps the third"


def active_pages(experts: PagedExperts) -> list[tuple[int, int]]:
    return [(int(e), int(s)) for e, s in np.argwhere(experts.manager.present(experts.pages, Plane.GRADIENT))]
