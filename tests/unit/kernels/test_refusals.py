"""Every public function that takes tensors refuses each of them by its name, whatever is wrong with it."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

import megascale_omni.kernels
from megascale_omni.kernels.bf16_wire import pack_bf16, unpack_bf16
from megascale_omni.kernels.gradient_statistics import statistics_of_groups
from megascale_omni.kernels.page_checksum import page_checksums
from megascale_omni.kernels.page_copy import copy_pages, gather_pages, scatter_pages
from megascale_omni.kernels.paged_adam import launch_adam
from megascale_omni.kernels.permute_rows import permute, sum_by_token, sum_segments, unpermute, weight_gradient
from megascale_omni.kernels.scaled_clip import scale_groups
from megascale_omni.kernels.wave_schedule import whole_wave_tables
from megascale_omni.optimizer.arithmetic import AdamSegment
from megascale_omni.paging.layout import ExpertShape, PageLayout
from tests.unit.kernels.test_products import TAKES
from tests.unit.optimizer.test_arithmetic import records

Tensors = dict[str, torch.Tensor]
F32 = torch.float32


@dataclass(frozen=True)
class Wrapper:
    """A call with what fits; ``called``: tensors that are named otherwise in messages, ``any_dtype`` and
    ``any_length``: what takes all, ``whole``: what must begin at a multiple of 16 bytes.
    """

    call: Callable[[Tensors], object]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    any_dtype: tuple[str, ...] = ()
    any_length: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    def given(self) -> Tensors:
        return {name: torch.zeros(shape, dtype=self.dtypes.get(name, F32)) for name, shape in self.shapes.items()}


def adam(t: Tensors) -> None:
    of_page = {name: tensor for name, tensor in t.items() if name != "stop"}
    launch_adam([AdamSegment(**of_page, records=records(1))], decoupled=True, stop=t["stop"])


PAGES: dict[str, tuple[int, ...]] = {"first": (32,), "second": (32,)}
ROWS = {
    "position": torch.int64,
    "source": torch.int64,
    "index": torch.int32,
    "order": torch.int64,
    "starts": torch.int64,
    "wire": torch.bfloat16,
}
WRAPPERS = {
    "copy_pages": Wrapper(
        lambda t: copy_pages([t["first"]], [t["second"]]), PAGES,
        called={"first": "(source|target|page)", "second": "(target|page)"}, whole=("first", "second"),
    ),
    "gather_pages": Wrapper(
        lambda t: gather_pages([t["page"]], t["out"]), {"page": (32,), "out": (1, 32)},
        called={"page": "(source|out|page)"}, whole=("page",),
    ),
    "scatter_pages": Wrapper(
        lambda t: scatter_pages(t["rows"], [t["page"]]), {"rows": (1, 32), "page": (32,)},
        called={"page": "(target|rows|page)"}, whole=("page",),
    ),
    "page_checksums": Wrapper(
        lambda t: page_checksums([t["first"], t["second"]]), PAGES,
        called=dict.fromkeys(PAGES, "page"), any_dtype=tuple(PAGES),
        any_length=tuple(PAGES), whole=tuple(PAGES),
    ),
    "statistics_of_groups": Wrapper(
        lambda t: statistics_of_groups([[t["first"]], [t["second"]]]), PAGES,
        called=dict.fromkeys(PAGES, "gradient"), any_length=tuple(PAGES),
    ),
    "scale_groups": Wrapper(
        lambda t: scale_groups([[t["first"]], [t["second"]]], t["coefficients"]), {**PAGES, "coefficients": (2,)},
        called=dict.fromkeys(PAGES, "(gradient|coefficients)"), any_length=tuple(PAGES),
    ),
    "pack_bf16": Wrapper(
        lambda t: pack_bf16([t["first"], t["second"]], t["wire"]), {**PAGES, "wire": (64,)}, ROWS,
        called=dict.fromkeys(PAGES, "(gradient|wire)"),
    ),
    "unpack_bf16": Wrapper(
        lambda t: unpack_bf16(t["wire"], [t["first"], t["second"]], add=True), {**PAGES, "wire": (64,)}, ROWS,
        called=dict.fromkeys(PAGES, "(gradient|wire)"),
    ),
    "permute": Wrapper(
        lambda t: permute(t["x"], t["source"], scale=t["scale"]), {"x": (3, 8), "source": (5,), "scale": (5,)}, ROWS,
        called={"source": "(source|scale)"}, any_length=("x",),
    ),
    "unpermute": Wrapper(
        lambda t: unpermute(t["y"], t["position"], weight=t["weight"]),
        {"y": (3, 8), "position": (4, 2), "weight": (4, 2)}, ROWS,
        called={"position": "(position|weight)"}, any_length=("y",),
    ),
    "weight_gradient": Wrapper(
        lambda t: weight_gradient(t["y"], t["position"], t["grad"]),
        {"y": (3, 8), "position": (4, 2), "grad": (4, 8)}, ROWS,
        called={"position": "(position|grad)"}, any_length=("y",),
    ),
    "sum_by_token": Wrapper(
        lambda t: sum_by_token(t["y"], t["index"], 2), {"y": (3, 8), "index": (3,)}, ROWS, called={"y": "(y|index)"}
    ),
    "sum_segments": Wrapper(
        lambda t: sum_segments(t["y"], t["order"], t["starts"]), {"y": (3, 8), "order": (3,), "starts": (2,)}, ROWS,
        called={"y": "(y|order)"}, any_length=("starts",),
    ),
    "whole_wave_tables": Wrapper(
        lambda t: whole_wave_tables(
            t["counts"], t["weights"], t["gradients"], t["written"],
            layout=PageLayout(ExpertShape(24, 40, gated=True, bias=False), 16), num_rows=8, item_rows=16, chain_rows=16,
        ), {"counts": (4,), "weights": (12,), "gradients": (12,), "written": (4,)},
        dict.fromkeys(("counts", "weights", "gradients", "written"), torch.int64),
        called={"counts": "(counts|weights)"},
    ),
    "launch_adam": Wrapper(
        adam, {**dict.fromkeys(("p", "m", "v", "g", "weight"), (32,)), "stop": (1,)}, {"stop": torch.int32},
        called={"p": "(p|m)"},
    ),
}  # fmt: skip
HELPERS = {"checks", "segments", "interpreter", "tiles", "wave", "backend", "bulk", "weighted_outputs"}


def test_every_public_function_that_takes_tensors_is_here_or_among_the_products():
    found = set()
    for module in pkgutil.iter_modules(megascale_omni.kernels.__path__):
        imported = importlib.import_module(f"megascale_omni.kernels.{module.name}")
        for name, function in inspect.getmembers(imported, inspect.isfunction):
            takes = " ".join(str(annotation) for annotation in function.__annotations__.values())
            own = function.__module__ == imported.__name__ and not name.startswith("_")
            if own and module.name not in HELPERS and ("Tensor" in takes or "Segment" in takes):
                found.add(name)
    assert found == set(WRAPPERS) | {f"launch_{product}" for product in TAKES}


def bad(wrapper: Wrapper, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What does not fit in the place of a tensor, and what is wrong with it."""
    good = wrapper.given()[name]
    if name not in wrapper.any_dtype:
        yield "dtype", good.to(torch.complex64)
    yield "device", good.to("meta")
    if good.numel() > 1:
        yield "strides", torch.stack([good, good], dim=-1)[..., 0]
    if name not in wrapper.any_length:
        yield "length", good[:-1]
    if name in wrapper.whole:
        flat = good.new_zeros(good.numel() + 1)
        yield "alignment", flat[1:].view(good.shape)


@pytest.mark.parametrize("name", WRAPPERS)
def test_each_tensor_is_refused_by_its_name(name):
    wrapper = WRAPPERS[name]
    wrapper.call(wrapper.given())
    for tensor in wrapper.shapes:
        for what, wrong in bad(wrapper, tensor):
            with pytest.raises(ValueError, match=rf"^{wrapper.called.get(tensor, tensor)}( \d+)?: ") as error:
                wrapper.call(wrapper.given() | {tensor: wrong})
            assert error.value.args, (name, tensor, what)
