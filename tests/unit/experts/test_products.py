"""The three products of a page, in both libraries, against fp64."""

import itertools

import pytest
import torch

from megascale_omni.experts.products import (
    ROW_BLOCK,
    ROW_QUANTUM,
    BlasProducts,
    OneDnnProducts,
    is_intel_cpu,
    onednn_keeps_fp32,
    padded_rows,
    products_for,
)
from megascale_omni.experts.workspace import Workspace
from tests.unit.experts.paged import CPU, PRODUCTS
from tests.unit.experts.reference import relative_error

FORMS = ("nt", "nn", "tn")
SIZES = (  # n, m, k
    (1, 1, 1),
    (1, 7, 5),
    (ROW_QUANTUM, 8, 24),
    (17, 31, 1),
    (40, 3, 16),
    (33, 16, 50),
    (ROW_BLOCK, 8, ROW_BLOCK),
    (ROW_BLOCK + 5, 8, ROW_BLOCK + 5),
    (3 * ROW_BLOCK + 17, 24, 2 * ROW_BLOCK + 40),
)


def make(name: str) -> BlasProducts:
    return (OneDnnProducts if name == "onednn" else BlasProducts)(Workspace(CPU))


def operands(form: str, n: int, m: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two operands as the form takes them, and their product in fp64."""
    a, b = torch.randn(n, k).to(dtype), torch.randn(k, m).to(dtype)
    product = a.double() @ b.double()
    match form:
        case "nt":
            return a, b.t().contiguous(), product
        case "nn":
            return a, b, product
        case _:
            return a.t().contiguous(), b, product


@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "accumulate"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "bound"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2**-8),
        (torch.bfloat16, torch.float32, 2**-8),
    ],
    ids=["fp32", "bf16", "bf16 into fp32"],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("library", PRODUCTS)
def test_products_of_all_sizes(library, form, dtype, out_dtype, bound, accumulate):
    products = make(library)
    for n, m, k in SIZES:
        left, right, expected = operands(form, n, m, k, dtype)
        out = torch.randn(n, m).to(out_dtype) if accumulate else torch.full((n, m), torch.nan, dtype=out_dtype)
        if accumulate:
            expected = expected + out.double()
        getattr(products, form)(left, right, out=out, accumulate=accumulate)
        assert relative_error(out, expected) <= bound, (n, m, k)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("library", PRODUCTS)
def test_results_go_into_views_and_leave_their_surroundings_alone(library, form):
    products = make(library)
    left, right, expected = operands(form, 20, 6, 9, torch.float32)
    memory = torch.full((24, 6), torch.nan)
    getattr(products, form)(left, right, out=memory[2:22])
    assert relative_error(memory[2:22], expected) <= 1e-6
    assert memory[:2].isnan().all()
    assert memory[22:].isnan().all()


@pytest.mark.parametrize("library", PRODUCTS)
def test_weight_gradients_are_rounded_to_bf16_before_they_are_added_and_the_fp32_sum_is_not(library):
    products = make(library)
    left, right, _ = operands("tn", 20, 6, 9, torch.bfloat16)
    product = torch.empty(20, 6, dtype=torch.bfloat16)
    products.tn(left, right, out=product)
    total = torch.full((20, 6), 1000.0) + torch.rand(20, 6)
    expected = total + product.float()
    products.tn(left, right, out=total, accumulate=True)
    assert total.equal(expected)


@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "accumulate"])
@pytest.mark.parametrize("library", PRODUCTS)
def test_parts_of_an_fp32_sum_are_not_rounded_to_bf16(library, accumulate):
    products = make(library)
    for n, m, k in SIZES:
        for form, unrounded in (("nn", {}), ("tn", {"rounded": False})):
            left, right, expected = operands(form, n, m, k, torch.bfloat16)
            out = torch.randn(n, m) if accumulate else torch.full((n, m), torch.nan)
            expected = expected + out.double() if accumulate else expected
            getattr(products, form)(left, right, out=out, accumulate=accumulate, **unrounded)
            assert relative_error(out, expected) <= 1e-6, (form, n, m, k)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("library", PRODUCTS)
def test_a_product_does_not_depend_on_products_before_it(library, form):
    """Buffers are reused: a larger or smaller product before must leave nothing behind."""
    products = make(library)
    for sizes in itertools.permutations(((50, 8, 40), (17, 8, 19), (3, 8, 33)), 3):
        for n, m, k in sizes:
            left, right, _ = operands(form, n, m, k, torch.float32)
            found, fresh = torch.empty(n, m), torch.empty(n, m)
            getattr(products, form)(left, right, out=found)
            getattr(make(library), form)(left, right, out=fresh)
            assert found.equal(fresh), (sizes, n)


@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "accumulate"])
@pytest.mark.parametrize("form", ["nt", "nn"])
@pytest.mark.parametrize("library", PRODUCTS)
def test_a_wide_product_gives_its_first_rows_the_same_bits(library, form, accumulate):
    products = make(library)
    for n in (1, 16, 17, 32, 70, ROW_BLOCK - 3, ROW_BLOCK + 1, 2 * ROW_BLOCK + 40):
        wide = products.padded(n, torch.float32)
        left, right, _ = operands(form, wide, 40, 24, torch.float32)
        left[n:] = torch.nan
        out = torch.randn(wide, 40)
        exact = out[:n].clone()
        getattr(products, form)(left, right, out=out, accumulate=accumulate)
        getattr(products, form)(left[:n], right, out=exact, accumulate=accumulate)
        assert n <= wide < n + ROW_QUANTUM
        assert out[:n].equal(exact), n
    assert products.padded(70, torch.bfloat16) == 70


@pytest.mark.skipif(not onednn_keeps_fp32(), reason="fp32 by oneDNN is not to be had here")
def test_what_torch_may_do_with_fp32_is_as_before_after_a_product():
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", before):
            matmul.fp32_precision = precision
            operand, out = torch.ones(40, 40), torch.empty(40, 40)
            make("onednn").nn(operand, operand, out=out)
            assert matmul.fp32_precision == precision
            with pytest.raises(RuntimeError, match=r"size|shape"):
                make("onednn").nn(operand, torch.ones(3, 3), out=out)
            assert matmul.fp32_precision == precision
    finally:
        matmul.fp32_precision = before


def test_few_row_counts_have_a_kernel():
    counts = {padded_rows(rows) for rows in range(1, 8 * ROW_BLOCK + 1)}
    assert len(counts) == ROW_BLOCK // ROW_QUANTUM + 7
    assert all(rows <= padded_rows(rows) for rows in range(1, 1000))


@pytest.mark.skipif(not onednn_keeps_fp32(), reason="fp32 by oneDNN is not to be had here")
def test_the_library_follows_the_processor_and_can_be_chosen():
    def name(choice, device=CPU) -> str:
        return products_for(device=device, choice=choice, workspace=Workspace(CPU)).name

    assert name("onednn") == "onednn"
    assert name("blas") == "blas"
    assert name("auto") == ("blas" if is_intel_cpu() else "onednn")
    assert name("auto", torch.device("cuda")) == "blas"


def test_onednn_where_it_is_not_to_be_had_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match="'onednn' need a CPU on which torch computes fp32 by oneDNN; the device is cuda"
    ):
        products_for(device=torch.device("cuda"), choice="onednn", workspace=Workspace(CPU))
    monkeypatch.setattr("megascale_omni.experts.products.onednn_keeps_fp32", lambda: False)
    with pytest.raises(ValueError, match="use 'auto' or 'blas'"):
        products_for(device=CPU, choice="onednn", workspace=Workspace(CPU))
    assert products_for(device=CPU, choice="auto", workspace=Workspace(CPU)).name == "blas"


def test_a_workspace_lends_the_same_memory_again_and_grows():
    work = Workspace(CPU)
    small = work.take("a", (2, 3), torch.float32)
    assert work.take("a", (3, 2), torch.float32).data_ptr() == small.data_ptr()
    assert work.take("a", (2, 3), torch.bfloat16).data_ptr() != small.data_ptr()
    assert work.take("b", (2, 3), torch.float32).data_ptr() != small.data_ptr()
    assert work.take("a", (4, 5), torch.float32).shape == (4, 5)
    assert work.take("a", (0, 5), torch.float32).shape == (0, 5)
    assert work.nbytes == 4 * 20 + 2 * 6 + 4 * 6
    work.clear()
    assert work.nbytes == 0


def test_a_lent_buffer_is_its_borrowers_until_it_is_given_back():
    work = Workspace(CPU)
    first, second = work.lend(1000, torch.float32), work.lend(1000, torch.float32)
    assert first.data_ptr() != second.data_ptr()
    assert 1000 <= first.numel() <= 1125
    work.give_back(first)
    assert work.nbytes == 4 * first.numel()
    with pytest.raises(RuntimeError, match="given back twice"):
        work.give_back(first)
    assert work.lend(1000, torch.bfloat16).dtype is torch.bfloat16  # another dtype takes the place of what is there
    assert work.nbytes == 0
    work.give_back(second)
    assert work.lend(990, torch.float32) is second
    assert work.lend(1, torch.float32).numel() == 1
    assert work.lend(0, torch.float32).numel() == 0
