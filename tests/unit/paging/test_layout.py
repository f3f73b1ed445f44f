"""The cut of an expert into pages: every neuron in one page, parts without gaps, sizes as asked for."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megascale_omni.paging.layout import (
    KIB,
    MAX_PAGE_BYTES,
    MIB,
    MIN_PAGE_BYTES,
    ROW_TILE,
    SLOT_ALIGNMENT,
    ExpertShape,
    PageLayout,
    Part,
    SlotClass,
)

SHAPES = st.builds(
    ExpertShape, hidden=st.integers(1, 40), ffn=st.integers(1, 70), gated=st.booleans(), bias=st.booleans()
)
LARGE_SHAPES = st.builds(
    ExpertShape, hidden=st.integers(1, 5000), ffn=st.integers(1, 20000), gated=st.booleans(), bias=st.booleans()
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(SHAPES, st.integers(1, 80))
def test_every_neuron_is_in_one_page_in_order(shape, rows):
    layout = PageLayout(shape, min(rows, shape.ffn))
    neurons = [n for s in range(layout.num_slices) for n in range(shape.ffn)[layout.neurons(s)]]
    assert neurons == list(range(shape.ffn))
    assert [layout.rows_of(s) for s in range(layout.num_slices - 1)] == [layout.rows] * (layout.num_slices - 1)
    assert 1 <= layout.rows_of(layout.num_slices - 1) <= layout.rows


@given(SHAPES, st.integers(1, 80))
def test_pages_together_hold_every_parameter_once(shape, rows):
    layout = PageLayout(shape, min(rows, shape.ffn))
    numels = [layout.page_numel(s) for s in range(layout.num_slices)]
    assert sum(numels) == shape.num_parameters
    assert max(numels) == layout.slot_numel


@given(SHAPES, st.integers(1, 80))
def test_parts_cover_a_page_without_gap_or_overlap_matrices_first(shape, rows):
    layout = PageLayout(shape, min(rows, shape.ffn))
    for slice_ in range(layout.num_slices):
        page = torch.arange(layout.slot_numel)
        parts = [layout.part(page, slice_, part) for part in layout.parts(slice_)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        assert flat.equal(page[: layout.page_numel(slice_)])
        matrices = [part for part in layout.parts(slice_) if not part.is_bias]
        assert matrices == list(layout.parts(slice_)[: len(matrices)])
        assert sum(layout.part(page, slice_, p).numel() for p in matrices) == layout.matrix_numel(slice_)


@given(SHAPES, st.integers(1, 80))
def test_operands_of_the_products_are_the_parts_joined(shape, rows):
    layout = PageLayout(shape, min(rows, shape.ffn))
    for slice_ in range(layout.num_slices):
        page = torch.arange(layout.slot_numel)

        def joined(*parts: Part, page: torch.Tensor = page, slice_: int = slice_) -> torch.Tensor | None:
            there = [layout.part(page, slice_, p) for p in parts if p in layout.parts(slice_)]
            return torch.cat(there) if there else None

        views = layout.views(page, slice_)
        pairs = [
            (views.fc1_Rh, joined(Part.GATE, Part.UP)),
            (views.down_rh, joined(Part.DOWN)),
            (views.fc1_bias_R, joined(Part.GATE_BIAS, Part.UP_BIAS)),
            (views.down_bias_h, joined(Part.DOWN_BIAS)),
        ]
        for view, expected in pairs:
            assert (view is None) == (expected is None)
            if view is not None and expected is not None:
                assert view.equal(expected)
        assert (views.down_bias_h is not None) == (shape.bias and slice_ == 0)


def test_a_part_that_a_page_does_not_have_is_refused():
    layout = PageLayout(ExpertShape(hidden=4, ffn=32, gated=False, bias=True), 16)
    page = torch.zeros(layout.slot_numel)
    for slice_, part in ((0, Part.GATE), (0, Part.GATE_BIAS), (1, Part.DOWN_BIAS)):
        with pytest.raises(RuntimeError, match=f"slice {slice_} has no part {part.value}"):
            layout.part(page, slice_, part)


@given(LARGE_SHAPES, st.integers(MIN_PAGE_BYTES, MAX_PAGE_BYTES), DTYPES)
def test_pages_are_as_few_as_fit_and_as_equal_as_tiles_allow(shape, page_bytes, dtype):
    neuron_bytes = shape.num_matrices * shape.hidden * dtype.itemsize
    assume(page_bytes >= ROW_TILE * neuron_bytes)
    layout = PageLayout.for_page_bytes(shape, page_bytes=page_bytes, dtype=dtype)
    assert layout.matrix_numel(0) * dtype.itemsize <= page_bytes
    if layout.num_slices > 1:
        assert layout.rows % ROW_TILE == 0
        most = page_bytes // (ROW_TILE * neuron_bytes) * ROW_TILE
        assert layout.num_slices == -(-shape.ffn // most)
        assert layout.rows - layout.rows_of(layout.num_slices - 1) < ROW_TILE * layout.num_slices
    else:
        assert layout.rows == shape.ffn
        assert layout.slot_numel == shape.num_parameters  # small experts waste nothing


@pytest.mark.parametrize(
    ("hidden", "ffn", "page_bytes", "rows"),
    [
        (512, 2048, 1 * MIB, [160] * 12 + [128]),  # 6 KiB a neuron: 170 fit, 160 in whole tiles; a short last page
        (256, 1024, 1 * MIB, [256] * 4),  # 336 would fit three times, and waste a page on the 16 that are left
        (512, 2048, 16 * MIB, [2048]),  # one page is the whole expert, never more
        (256, 250, 256 * KIB, [64, 64, 64, 58]),  # ffn is no multiple of the tile
        (256, 7, 64 * KIB, [7]),  # fewer neurons than a tile
        (1, 100, 64 * KIB, [100]),
    ],
)
def test_cuts_of_odd_sizes(hidden, ffn, page_bytes, rows):
    layout = PageLayout.for_page_bytes(
        ExpertShape(hidden=hidden, ffn=ffn, gated=True, bias=False), page_bytes=page_bytes, dtype=torch.float32
    )
    assert [layout.rows_of(s) for s in range(layout.num_slices)] == rows


def test_the_dtype_decides_how_many_neurons_a_page_has():
    shape = ExpertShape(hidden=512, ffn=2048, gated=True, bias=False)
    fp32, bf16 = (
        PageLayout.for_page_bytes(shape, page_bytes=MIB, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert (fp32.rows, bf16.rows) == (160, 304)


@pytest.mark.parametrize("page_bytes", [0, MIN_PAGE_BYTES - 1, MAX_PAGE_BYTES + 1])
def test_a_page_size_out_of_range_is_named_with_the_range(page_bytes):
    shape = ExpertShape(hidden=8, ffn=8, gated=True, bias=False)
    with pytest.raises(ValueError, match=f"page size {page_bytes} bytes is outside 65536.* to 67108864"):
        PageLayout.for_page_bytes(shape, page_bytes=page_bytes, dtype=torch.float32)


@given(st.integers(1000, 20000), st.integers(1, 300), st.booleans(), DTYPES)
def test_a_page_size_too_small_for_a_tile_names_the_smallest_that_works(hidden, ffn, gated, dtype):
    shape = ExpertShape(hidden=hidden, ffn=ffn, gated=gated, bias=False)
    neuron_bytes = shape.num_matrices * hidden * dtype.itemsize
    needed = min(ROW_TILE, ffn) * neuron_bytes
    assume(needed > MIN_PAGE_BYTES)
    for page_bytes in (MIN_PAGE_BYTES, needed - 1):
        with pytest.raises(ValueError, match=f"page size {page_bytes} bytes .*hidden size {hidden}.* {needed} bytes"):
            PageLayout.for_page_bytes(shape, page_bytes=page_bytes, dtype=dtype)
    assert PageLayout.for_page_bytes(shape, page_bytes=needed, dtype=dtype).rows == min(ROW_TILE, ffn)


@pytest.mark.parametrize(("hidden", "ffn"), [(0, 4), (4, 0), (-1, 4)])
def test_an_expert_without_size_is_refused(hidden, ffn):
    with pytest.raises(ValueError, match=f"hidden={hidden}, ffn={ffn}"):
        ExpertShape(hidden=hidden, ffn=ffn, gated=True, bias=False)


def test_slot_bytes_follow_the_plane():
    layout = PageLayout(ExpertShape(hidden=64, ffn=32, gated=True, bias=False), 32)  # 3 * 64 * 32 elements
    assert layout.slot_class(torch.float32).nbytes == 24 * KIB
    assert layout.slot_class(torch.bfloat16).nbytes == 12 * KIB
    assert layout.slot_class(torch.float32) != layout.slot_class(torch.bfloat16)


@given(numel=st.integers(1, 10**6), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_slots_are_whole_blocks_of_direct_io_and_less_than_one_is_wasted(numel, dtype):
    slot_class = SlotClass(dtype, numel)
    assert slot_class.nbytes % SLOT_ALIGNMENT == 0
    assert 0 <= slot_class.nbytes - numel * dtype.itemsize < SLOT_ALIGNMENT
    assert slot_class.stride * dtype.itemsize == slot_class.nbytes
