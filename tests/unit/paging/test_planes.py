"""Page ids: dense over modules, planes, experts and slices, and invertible."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.paging.planes import PageKey, PageNumbering, Plane

MODULES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5)


def numbering_of(modules: list[tuple[int, int]]) -> PageNumbering:
    numbering = PageNumbering()
    for i, (num_experts, num_slices) in enumerate(modules):
        numbering.register(path=f"layers.{i}.experts", num_experts=num_experts, num_slices=num_slices)
    return numbering


def all_keys(modules: list[tuple[int, int]]) -> list[PageKey]:
    return [
        PageKey(plane, module, expert, slice_)
        for module, (num_experts, num_slices) in enumerate(modules)
        for expert, slice_ in itertools.product(range(num_experts), range(num_slices))
        for plane in Plane
    ]


@given(MODULES)
def test_ids_run_through_all_pages_without_a_gap_and_back(modules):
    numbering = numbering_of(modules)
    keys = all_keys(modules)
    assert [numbering.page_id(key) for key in keys] == list(range(numbering.num_pages))
    assert [numbering.key(i) for i in range(numbering.num_pages)] == keys
    assert numbering.num_pages == numbering.num_indices * len(Plane) == len(keys)


@given(MODULES)
def test_a_page_and_its_gradient_are_a_constant_apart(modules):
    numbering = numbering_of(modules)
    for key in all_keys(modules):
        weight = numbering.page_id(key._replace(plane=Plane.WEIGHT))
        assert numbering.page_id(key) == weight + int(key.plane)


@given(MODULES, st.integers(1, 5), st.integers(1, 4))
def test_ids_stay_valid_when_a_module_is_added(modules, num_experts, num_slices):
    numbering = numbering_of(modules)
    before = {key: numbering.page_id(key) for key in all_keys(modules)}
    numbering.register(path="later", num_experts=num_experts, num_slices=num_slices)
    assert {key: numbering.page_id(key) for key in before} == before


@given(MODULES, st.data())
def test_many_ids_at_once_are_those_of_each_page_in_order(modules, data):
    numbering = numbering_of(modules)
    module = data.draw(st.integers(0, len(modules) - 1))
    num_experts, num_slices = modules[module]
    experts = data.draw(st.lists(st.integers(0, num_experts - 1), unique=True))
    plane = data.draw(st.sampled_from(list(Plane)))
    ids = numbering.page_ids(module, plane, experts)
    assert ids.dtype == np.int64
    assert ids.tolist() == [
        numbering.page_id(PageKey(plane, module, expert, slice_)) for expert in experts for slice_ in range(num_slices)
    ]


def test_pages_outside_a_module_are_refused_instead_of_being_another_modules():
    numbering = numbering_of([(2, 3), (2, 3)])
    for expert, slice_ in ((2, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(RuntimeError, match=r"layers\.0\.experts: no page .*2 experts of 3 slices"):
            numbering.page_id(PageKey(Plane.WEIGHT, 0, expert, slice_))
    for experts in ([2], [0, 2], [-1]):
        with pytest.raises(RuntimeError, match=r"layers\.0\.experts: no .*2 experts of 3 slices"):
            numbering.page_ids(0, Plane.WEIGHT, experts)
    for page_id in (-1, numbering.num_pages):
        with pytest.raises(RuntimeError, match=f"no page {page_id}"):
            numbering.key(page_id)


def test_a_path_belongs_to_one_module():
    numbering = numbering_of([(1, 1), (1, 1)])
    with pytest.raises(RuntimeError, match=r"layers\.1\.experts is registered twice"):
        numbering.register(path="layers.1.experts", num_experts=1, num_slices=1)
    with pytest.raises(RuntimeError, match=r"layers\.1\.experts belongs to module 1"):
        numbering.rename(0, "layers.1.experts")
    assert len(numbering.entries) == 2
    assert [numbering.path(m) for m in (0, 1)] == ["layers.0.experts", "layers.1.experts"]


def test_a_module_gets_its_final_path_later():
    numbering = numbering_of([(2, 2)])
    numbering.rename(0, "decoder.layers.3.mlp.experts")
    numbering.rename(0, "decoder.layers.3.mlp.experts")  # again changes nothing
    page_id = numbering.page_id(PageKey(Plane.GRADIENT, 0, 1, 0))
    assert numbering.describe(page_id) == "gradient page of decoder.layers.3.mlp.experts, expert 1, slice 0"
    numbering.register(path="layers.0.experts", num_experts=1, num_slices=1)  # the old path is free again
