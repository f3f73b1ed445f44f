"""Kernels that work element by element: values against plain torch, every access checked, any order of programs."""

from collections.abc import Sequence

import pytest
import torch

from megascale_omni.experts.tokens import sum_rows
from megascale_omni.kernels.bf16_wire import pack_bf16, unpack_bf16
from megascale_omni.kernels.gradient_statistics import CHUNK, COLUMNS, statistics_of_groups
from megascale_omni.kernels.page_checksum import page_checksum, page_checksums
from megascale_omni.kernels.page_copy import copy_pages, gather_pages, page_copy, scatter_pages
from megascale_omni.kernels.permute_rows import permute, sum_by_token, unpermute, weight_gradient
from megascale_omni.kernels.scaled_clip import scale_groups
from megascale_omni.paging.word_sums import word_sums
from tests.unit.kernels.checker import checked, quiet

ORDERS = pytest.mark.parametrize("order", ["forward", "backward", 7])


def pages_of(
    count: int, numel: int, dtype: torch.dtype = torch.float32, *, stride: int | None = None
) -> list[torch.Tensor]:
    """Pages in slots that are larger than they are, as in an arena: an access behind a page is inside no tensor."""
    stride = stride or -(-numel // 8) * 8 + 8
    arena = torch.randn(count, stride).to(dtype)
    return [slot[:numel] for slot in arena]


@ORDERS
@pytest.mark.parametrize(("numel", "dtype"), [(4096, torch.float32), (5000, torch.bfloat16), (2, torch.bfloat16)])
def test_pages_are_copied_gathered_and_scattered(numel, dtype, order):
    sources, targets = pages_of(5, numel, dtype), pages_of(5, numel, dtype)
    with checked(reachable=[*sources, *targets], order=order) as launched:
        copy_pages(sources, targets)
    assert launched == ["page_copy"]
    assert all(torch.equal(s, t) for s, t in zip(sources, targets, strict=True))
    out = torch.empty(3, -(-numel // 8) * 8, dtype=dtype)[:, :numel].contiguous()
    if out.stride(0) * out.element_size() % 16 == 0:
        gather_pages(sources[1:4], out)
        assert torch.equal(out, torch.stack(sources[1:4]))
        scatter_pages(out.flip(0).contiguous(), targets[:3])
        assert torch.equal(torch.stack(targets[:3]), out.flip(0))


def test_pages_that_do_not_fit_are_refused():
    pages = pages_of(2, 64)
    with pytest.raises(ValueError, match=r"targets: 1 pages for 2 sources"):
        copy_pages(pages, pages[:1])
    with pytest.raises(ValueError, match=r"target: 32 elements, must be 64"):
        copy_pages(pages[:1], [pages[1][:32]])
    with pytest.raises(ValueError, match=r"target: dtype torch.bfloat16, must be torch.float32"):
        copy_pages(pages[:1], [pages[1].bfloat16()])
    with pytest.raises(ValueError, match=r"source: address 0x[0-9a-f]+, must be a multiple of 16 bytes"):
        copy_pages([pages[0][1:]], [pages[1][1:]])
    with pytest.raises(ValueError, match=r"bytes a page, must be a multiple of 4"):
        copy_pages(pages_of(1, 3, torch.bfloat16), pages_of(1, 3, torch.bfloat16))
    with pytest.raises(ValueError, match=r"out: shape"):
        gather_pages(pages, torch.empty(3, 64))


def checksum(page: torch.Tensor) -> list[int]:
    words = page.view(torch.int32).tolist()
    sums = sum(words), sum((i + 1) * w for i, w in enumerate(words))
    return [(s + 2**63) % 2**64 - 2**63 for s in sums]


@ORDERS
def test_checksums_are_the_sums_of_the_words(order):
    pages = [*pages_of(3, 5001), *pages_of(2, 10), torch.empty(0)]
    with checked(reachable=pages, order=order):
        found = page_checksums(pages)
    assert found.tolist() == [checksum(page) for page in pages] == [list(word_sums(page)) for page in pages]
    swapped = pages[0].clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    first, second = page_checksums([pages[0], swapped]).tolist()
    assert first[0] == second[0]
    assert first[1] != second[1]


def statistics(gradients: Sequence[torch.Tensor]) -> list[float]:
    g = torch.cat([gradient.double() for gradient in gradients]) if gradients else torch.empty(0, dtype=torch.float64)
    finite = g[g.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    return [
        len(finite), float(finite.sum()), float(finite.abs().sum()), float(finite.square().sum()), largest,
        len(g) - len(finite), int((g != 0).sum()),
    ]  # fmt: skip


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_those_of_each_group(dtype, order):
    first, second = pages_of(2, CHUNK + 777, dtype), pages_of(3, 100, dtype)
    first[1][5:9] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    second[0][:] = 1e30
    groups = [first, [], second]
    with checked(reachable=[*first, *second], order=order):
        found = statistics_of_groups(groups)
    for row, group in zip(found.tolist(), groups, strict=True):
        assert dict(zip(COLUMNS, row, strict=True)) == pytest.approx(dict(zip(COLUMNS, statistics(group), strict=True)))


def test_statistics_have_the_same_bits_in_any_order_of_programs():
    pages = pages_of(3, CHUNK + 40)
    found = []
    for order in ("forward", "backward", 3):
        with checked(reachable=pages, order=order):
            found.append(statistics_of_groups([pages]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_every_group_are_scaled_and_those_of_coefficient_one_left_alone(dtype, order):
    first, second, third = pages_of(2, 2050, dtype), pages_of(1, 3, dtype), pages_of(2, 64, dtype)
    third[0][0] = float("nan")  # times 1 a NaN might change its bits
    before = [page.clone() for page in (*first, *second, *third)]
    coefficients = torch.tensor([0.3, 0.77, 1.0])
    with checked(reachable=[*first, *second, *third], order=order):
        scale_groups([first, second, third], coefficients)
    factors = [0.3, 0.3, 0.77, 1.0, 1.0]
    for page, old, factor in zip((*first, *second, *third), before, factors, strict=True):
        expected = old if factor == 1.0 else (old.float() * torch.tensor(factor)).to(dtype)
        assert torch.equal(page.view(torch.int16), expected.view(torch.int16))


@ORDERS
def test_bf16_on_the_wire_rounds_to_nearest_even_and_is_added_in_fp32(order):
    pages = [*pages_of(2, 2049), *pages_of(1, 8)]
    pages[0][:4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, float("nan"), 3.4e38])
    wire = torch.empty(sum(page.numel() for page in pages), dtype=torch.bfloat16)
    with checked(reachable=pages, order=order):
        pack_bf16(pages, wire)
    expected = torch.cat(pages).bfloat16()
    assert torch.equal(wire.nan_to_num(1.5).view(torch.int16), expected.nan_to_num(1.5).view(torch.int16))
    before = [page.clone() for page in pages]
    with checked(reachable=pages, order=order):
        unpack_bf16(wire, pages, add=True)
    parts = wire.float().split([page.numel() for page in pages])
    for page, old, part in zip(pages, before, parts, strict=True):
        assert torch.equal(page.nan_to_num(1.5), (old + part).nan_to_num(1.5))
    unpack_bf16(wire, pages, add=False)
    assert all(torch.equal(p.nan_to_num(1.5), q.nan_to_num(1.5)) for p, q in zip(pages, parts, strict=True))
    with pytest.raises(ValueError, match=r"wire: shape \(1,\)"):
        pack_bf16(pages, wire[:1])


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [24, 1030])
def test_rows_are_permuted_and_come_back_weighted(hidden, dtype, order):
    tokens, topk = 7, 2
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, topk)
    position = torch.randperm(tokens * topk).view(tokens, topk)
    source = torch.empty(tokens * topk, dtype=torch.int64)
    source[position.view(-1)] = torch.arange(tokens).repeat_interleave(topk)
    with checked(order=order):
        rows = permute(x, source)
        back = unpermute(rows, position, weight=weight)
        dweight = weight_gradient(rows, position, back)
    assert torch.equal(rows, x[source])
    expected = (rows[position].float() * weight.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(back.float(), expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-5)
    torch.testing.assert_close(
        dweight, (rows[position].float() * back.float().unsqueeze(1)).sum(-1), rtol=1e-5, atol=1e-4
    )


def test_dropped_rows_are_zeros_and_a_scale_is_applied():
    x = torch.randn(3, 20)
    source = torch.tensor([2, -1, 0], dtype=torch.int32)
    scale = torch.tensor([0.5, 3.0, -1.0])
    assert torch.equal(permute(x, source, scale=scale), torch.stack([x[2] * 0.5, torch.zeros(20), -x[0]]))
    position = torch.tensor([[1, -1], [-1, -1]])
    assert torch.equal(unpermute(x, position), torch.stack([x[1], torch.zeros(20)]))
    assert weight_gradient(x, position, torch.ones(2, 20)).tolist()[1] == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"source: dtype torch.float32"):
        permute(x, scale)
    with pytest.raises(ValueError, match=r"x: strides"):
        permute(x.t(), source)


BEYOND = {
    "permute": lambda bad: permute(torch.ones(3, 20), torch.tensor([bad, 1])),
    "unpermute": lambda bad: unpermute(torch.ones(3, 20), torch.tensor([[bad, 2], [0, 1]])),
    "weights": lambda bad: weight_gradient(torch.ones(3, 20), torch.tensor([[bad], [1]]), torch.ones(2, 20)),
    "sums": lambda bad: sum_by_token(torch.ones(2, 20), torch.tensor([bad, 0]), 1),
}


@pytest.mark.parametrize("bad", [3, -2, 2**40])
@pytest.mark.parametrize("kernel", BEYOND)
def test_an_index_of_no_row_traps_and_without_debug_gives_nan_and_reads_nothing(monkeypatch, kernel, bad):
    with pytest.raises(Exception, match=r"index: a row (that|is of a token that) does not exist"):
        BEYOND[kernel](bad)
    quiet(monkeypatch)
    with checked():
        found = BEYOND[kernel](bad)
    assert found[0].isnan().all()
    assert not found[1:].isnan().any()


def test_a_page_that_is_not_resident_traps_in_copies_and_checksums():
    zero = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(Exception, match=r"a page that is not resident is copied"):
        page_copy[(1, 1)](zero, 4, BLOCK=16)
    with pytest.raises(Exception, match=r"a page that is not resident is read"):
        page_checksum[(1,)](zero, zero, zero.clone(), ALIGNED=False, BLOCK=16)


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_rows_are_those_of_torch_in_any_order_of_programs(dtype, order):
    index = torch.tensor([0, 2, 5, 2, 0, 2, 6, 2], dtype=torch.int32)
    y = torch.randn(8, 1030).to(dtype)
    with checked(order=order):
        found = sum_by_token(y, index, 7)
    assert torch.equal(found, sum_rows(y, index.long(), 7))
    assert sum_by_token(y[:0], index[:0], 2).tolist() == [[0.0] * 1030] * 2
    assert sum_by_token(y[:0], index[:0], 0).shape == (0, 1030)


@pytest.mark.parametrize("numel", [4096, 4097])
def test_whole_words_and_single_elements_give_the_same(numel):
    """Lengths and addresses that are multiples of 16 are said to be; others are read one by one."""
    g = torch.randn(numel + 1)
    aligned, shifted = g[:-1].clone(), torch.cat([g[:1], g[:-1]])[1:]
    assert statistics_of_groups([[aligned]]).equal(statistics_of_groups([[shifted]]))
    wires = [torch.empty(numel, dtype=torch.bfloat16) for _ in range(2)]
    for page, wire in zip((aligned, shifted), wires, strict=True):
        pack_bf16([page], wire)
        scale_groups([[page]], torch.tensor([0.3]))
    assert wires[0].equal(wires[1])
    assert aligned.equal(shifted)


# -- what does not fit -------------------------------------------------------------------------------------------------


def far(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def gaps(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(2 * numel, dtype=dtype)[::2]


WIRE, PAGE, ROWS, INDEX = (
    torch.zeros(16).bfloat16(),
    torch.zeros(16),
    torch.zeros(4, 8),
    torch.zeros(4, dtype=torch.int64),
)
PLACES = torch.zeros(4, 2, dtype=torch.int64)
REFUSED = {
    "copy: device": (lambda: copy_pages([PAGE], [far(PAGE)]), "page 1: on meta, must be on cpu"),
    "copy: strides": (lambda: copy_pages([gaps(16)], [PAGE]), "source: strides"),
    "copy: twice to one": (lambda: copy_pages([PAGE, torch.ones(16)], [torch.ones(16)] * 2), "target: "),
    "copy: onto itself": (lambda: copy_pages([ROWS[0], ROWS[2]], [ROWS[2], ROWS[1]]), "target: the page at .* is also"),
    "gather: device": (lambda: gather_pages([PAGE], far(torch.zeros(1, 16))), "out: on meta"),
    "gather: dtype": (lambda: gather_pages([PAGE], torch.zeros(1, 16).bfloat16()), "out: dtype torch.bfloat16"),
    "scatter: strides": (lambda: scatter_pages(torch.zeros(16, 2).t()[:1, :16], [PAGE]), "rows: "),
    "checksum: strides": (lambda: page_checksums([gaps(16)]), "page: strides"),
    "checksum: device": (lambda: page_checksums([PAGE, far(PAGE)]), "page 1: on meta, must be on cpu"),
    "checksum: alignment": (lambda: page_checksums([torch.zeros(20)[1:]]), "page: address .* multiple of 16"),
    "checksum: words": (lambda: page_checksums([torch.zeros(3).bfloat16()]), "page: 6 bytes, must be a multiple of 4"),
    "statistics: dtype": (lambda: statistics_of_groups([[PAGE.double()]]), "gradient: dtype torch.float64"),
    "statistics: dtypes": (lambda: statistics_of_groups([[PAGE], [WIRE]]), "gradient: dtype torch.bfloat16, must be"),
    "statistics: strides": (lambda: statistics_of_groups([[PAGE, gaps(16)]]), "gradient: strides"),
    "statistics: device": (lambda: statistics_of_groups([[PAGE], [far(PAGE)]]), "gradient 1: on meta, must be on cpu"),
    "statistics: far": (
        lambda: statistics_of_groups([[far(PAGE)]]),
        "gradient: on meta, kernels run on an accelerator",
    ),
    "statistics: none": (lambda: statistics_of_groups([[]]), "groups: no gradient in any of them"),
    "clip: dtype": (lambda: scale_groups([[PAGE.int()]], torch.ones(1)), "gradient: dtype torch.int32"),
    "clip: strides": (lambda: scale_groups([[gaps(16)]], torch.ones(1)), "gradient: strides"),
    "clip: device": (lambda: scale_groups([[PAGE, far(PAGE)]], torch.ones(1)), "gradient 1: on meta"),
    "clip: coefficients": (lambda: scale_groups([[PAGE]], torch.ones(2)), "coefficients: shape"),
    "clip: their dtype": (lambda: scale_groups([[PAGE]], torch.ones(1).double()), "coefficients: dtype torch.float64"),
    "clip: their device": (lambda: scale_groups([[PAGE]], far(torch.ones(1))), "coefficients: on meta"),
    "wire: dtype": (lambda: pack_bf16([PAGE.bfloat16()], WIRE), "gradient: dtype torch.bfloat16"),
    "wire: its dtype": (lambda: pack_bf16([PAGE], PAGE), "wire: dtype torch.float32"),
    "wire: its device": (lambda: pack_bf16([PAGE], far(WIRE)), "wire: on meta"),
    "wire: its strides": (lambda: unpack_bf16(gaps(16, torch.bfloat16), [PAGE], add=True), "wire: strides"),
    "wire: its length": (lambda: unpack_bf16(WIRE[:8], [PAGE], add=False), "wire: shape"),
    "wire: strides": (lambda: pack_bf16([gaps(16)], WIRE), "gradient: strides"),
    "wire: device": (lambda: pack_bf16([PAGE, far(PAGE)], torch.zeros(32).bfloat16()), "gradient 1: on meta"),
    "permute: dtype": (lambda: permute(ROWS.double(), INDEX), "x: dtype torch.float64"),
    "permute: dimensions": (lambda: permute(PAGE, INDEX), "x: shape"),
    "permute: source's device": (lambda: permute(ROWS, far(INDEX)), "source: on meta"),
    "permute: source's strides": (lambda: permute(ROWS, gaps(4, torch.int64)), "source: strides"),
    "permute: scale's length": (lambda: permute(ROWS, INDEX, scale=torch.ones(3)), "scale: shape"),
    "permute: scale's device": (lambda: permute(ROWS, INDEX, scale=far(torch.ones(4))), "scale: on meta"),
    "permute: far": (lambda: permute(far(ROWS), far(INDEX)), "x: on meta, kernels run on an accelerator"),
    "unpermute: position": (lambda: unpermute(ROWS, INDEX), "position: shape"),
    "unpermute: its dtype": (lambda: unpermute(ROWS, PLACES.float()), "position: dtype torch.float32"),
    "unpermute: weight": (lambda: unpermute(ROWS, PLACES, weight=torch.ones(4, 1)), "weight: shape"),
    "unpermute: weight's dtype": (lambda: unpermute(ROWS, PLACES, weight=PLACES), "weight: dtype torch.int64"),
    "sums: index": (lambda: sum_by_token(ROWS, INDEX[:3], 2), "index: shape"),
    "sums: its dtype": (lambda: sum_by_token(ROWS, INDEX.float(), 2), "index: dtype torch.float32"),
    "sums: its device": (lambda: sum_by_token(ROWS, far(INDEX), 2), "index: on meta"),
    "sums: rows": (lambda: sum_by_token(ROWS.t(), INDEX, 2), "y: strides"),
    "sums: tokens": (lambda: sum_by_token(ROWS, INDEX, -1), "tokens: -1"),
    "weights: grad": (lambda: weight_gradient(ROWS, PLACES, torch.zeros(3, 8)), "grad: shape"),
    "weights: grad's strides": (lambda: weight_gradient(ROWS, PLACES, torch.zeros(8, 4).t()), "grad: strides"),
    "weights: grad's device": (lambda: weight_gradient(ROWS, PLACES, far(torch.zeros(4, 8))), "grad: on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_tensor_that_does_not_fit_is_refused_by_its_name(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
