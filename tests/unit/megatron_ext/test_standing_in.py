"""Reworded code finds a CPU where it asks for an accelerator; torch itself, and everybody else, finds what there is."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from megatron_ext.megatron_lm import standin
from megatron_ext.megatron_lm.cpu import REPAIRS
from megatron_ext.megatron_lm.reword import reword

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator: nothing stands in for it")


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    standin.install()
    yield
    standin.uninstall()


def run(text: str) -> dict[str, object]:
    """The names that reworded code defines."""
    namespace: dict[str, object] = {"torch": torch}
    exec(reword(compile(text, "stock", "exec")), namespace)
    return namespace


def test_tensors_are_made_on_the_cpu() -> None:
    found = run(
        "def make(device='cuda'): return torch.zeros(2, device=device)\n"
        "class Layer(torch.nn.Linear):\n"
        "    def place(self): return self.cuda(torch.cuda.current_device())\n"
        "made = [make(), torch.ones(2).cuda(non_blocking=True), torch.empty(1, device=torch.cuda.current_device()),\n"
        "        torch.ones(1, device=torch.device(f'cuda:{torch.cuda.current_device()}')),\n"
        "        torch.zeros(1, device='cuda:0')]\n"
        "layer = Layer(2, 2)\n"
        "same = layer.place() is layer\n"
        "kind = torch.zeros(1).type() == 'torch.cuda.FloatTensor'\n"
        "typed = torch.cuda.LongTensor([1, 2])\n"
    )
    assert {tensor.device.type for tensor in found["made"]} == {"cpu"}  # type: ignore[attr-defined]
    assert found["same"] is True
    assert found["kind"] is True
    assert found["typed"].tolist() == [1, 2]  # type: ignore[attr-defined]


def test_streams_and_events_are_there_and_do_nothing() -> None:
    found = run(
        "stream = torch.cuda.Stream()\n"
        "stream.wait_stream(torch.cuda.current_stream())\n"
        "start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event()\n"
        "with torch.cuda.stream(stream):\n"
        "    start.record(); torch.cuda.synchronize(); end.record()\n"
        "took = start.elapsed_time(end)\n"
        "memory = torch.cuda.memory_stats()['allocated_bytes.all.current'], torch.cuda.max_memory_allocated()\n"
    )
    assert found["took"] >= 0.0  # type: ignore[operator]
    assert all(value > 1 << 20 for value in found["memory"])  # type: ignore[attr-defined]


def test_random_numbers_are_the_default_generators() -> None:
    found = run(
        "torch.cuda.manual_seed(5)\n"
        "state = torch.cuda.get_rng_state()\n"
        "first = torch.rand(3)\n"
        "torch.cuda.set_rng_state(state)\n"
        "second = torch.rand(3)\n"
    )
    torch.manual_seed(5)
    assert torch.equal(found["first"], torch.rand(3))  # type: ignore[arg-type]
    assert torch.equal(found["second"], found["first"])  # type: ignore[arg-type]


def test_others_see_what_there_is() -> None:
    assert run("there = torch.cuda.is_available()")["there"] is True
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_other_words_stay() -> None:
    found = run("words = {'cuda_rng_state': 1, 'no cuda here': 2}\nname = 'torch.cuda.Unknown'\n'cuda' in words\n")
    assert list(found["words"]) == ["cuda_rng_state", "no cuda here"]  # type: ignore[call-overload]
    assert found["name"] == "torch.cuda.Unknown"


def test_it_can_be_taken_away() -> None:
    standin.uninstall()
    assert not hasattr(torch, standin.NAME)
    assert not hasattr(torch.Tensor, standin.NAME)
    standin.install()
    standin.install()
    assert isinstance(getattr(torch, standin.NAME), standin.StandIn)


@pytest.mark.parametrize("have_te", [False, True])
def test_no_layer_is_of_a_class_that_is_none(have_te: bool) -> None:
    module = ModuleType("megatron.core.tensor_parallel.inference_layers")
    vars(module).update(HAVE_TE=have_te, is_inference_column_parallel_linear=lambda layer: isinstance(layer, Mock()))
    REPAIRS[module.__name__](module)
    if have_te:
        with pytest.raises(TypeError):
            module.is_inference_column_parallel_linear(None)
    else:
        assert not module.is_inference_column_parallel_linear(None)
