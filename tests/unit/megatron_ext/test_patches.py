"""What is changed in stock: little, reversible, loud where stock is not what it was."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core import optimizer as stock_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer

import megatron_ext
from megascale_omni.config import MegaScaleConfig
from megatron_ext import cpu, patches
from megatron_ext.patches import MakeSubclass, WrapFunction
from tests.unit.test_cpu_patches import differences, stock_state

PATCHED = {
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.__init__"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.__init__.__code__"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel.__init__"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel.__init__.__code__"),
    ("megatron.core.optimizer", "get_megatron_optimizer"),
    ("megatron.core.optimizer", "get_megatron_optimizer.__code__"),
    ("megatron.core.pipeline_parallel.schedules", "forward_step"),
    ("megatron.core.pipeline_parallel.schedules", "forward_step.__code__"),
}


@pytest.fixture(autouse=True, scope="module")
def everything_imported() -> None:
    """So that a later import is not taken for a change; the CPU patches are in force or not as they were."""
    before = cpu.enabled()
    cpu.enable()
    megatron_ext.enable()
    megatron_ext.disable()
    if not before:
        cpu.disable()


class TestEnableAndDisable:
    def test_four_objects_are_changed_and_put_back(self) -> None:
        before = stock_state()
        megatron_ext.enable()
        changed = {key for key in differences(before, stock_state()) if not key[1].endswith("__code__")}
        assert changed == {key for key in PATCHED if not key[1].endswith("__code__")}
        assert megatron_ext.is_enabled()
        megatron_ext.disable()
        assert differences(before, stock_state()) == []
        assert not megatron_ext.is_enabled()

    def test_twice_is_once(self) -> None:
        runtime = megatron_ext.enable()
        once = stock_state()
        assert megatron_ext.enable() is runtime
        assert megatron_ext.enable(MegaScaleConfig()) is runtime
        assert differences(once, stock_state()) == []
        megatron_ext.disable()
        megatron_ext.disable()
        assert not megatron_ext.is_enabled()

    def test_another_configuration_needs_disable_first(self) -> None:
        other = MegaScaleConfig().replace("paging", page_size_bytes="1MiB")
        runtime = megatron_ext.enable(MegaScaleConfig())
        before = stock_state()
        with pytest.raises(ValueError, match=r"another configuration already; call megatron_ext\.disable\(\) first"):
            megatron_ext.enable(other)
        assert megatron_ext.enable() is runtime
        assert differences(before, stock_state()) == []
        megatron_ext.disable()
        assert megatron_ext.enable(other).config == other

    @pytest.mark.parametrize("config", [{"paging": {"page_size_bytes": "1MiB"}}, "megascale.yaml"])
    def test_what_is_no_configuration_is_refused(self, config: Any) -> None:
        with pytest.raises(ValueError, match=r"takes a MegaScaleConfig, not .*from_mapping.*from_file"):
            megatron_ext.enable(config)
        assert not megatron_ext.is_enabled()

    def test_each_run_has_a_runtime_of_its_own(self) -> None:
        first = megatron_ext.enable()
        megatron_ext.disable()
        assert megatron_ext.enable().manager is not first.manager

    def test_the_runtime_of_nothing(self) -> None:
        with pytest.raises(RuntimeError, match=r"not enabled: call megatron_ext\.enable\(\) before the model is built"):
            patches.active_runtime()

    def test_the_optimizer_function_is_reached_under_every_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = stock_optimizer.get_megatron_optimizer
        early, late = types.ModuleType("users_script"), types.ModuleType("users_late_script")
        early.build = original  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "users_script", early)
        megatron_ext.enable()
        assert early.build is stock_optimizer.get_megatron_optimizer is not original  # type: ignore[attr-defined]
        late.build = stock_optimizer.get_megatron_optimizer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "users_late_script", late)
        megatron_ext.disable()
        assert early.build is late.build is original  # type: ignore[attr-defined]


def replaced(*arguments: object) -> None:
    """What another plug-in puts in a stock function's place."""


def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs)

    return wrapper


def of_another_release(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a parameter more at its head."""
    changed: dict[str, Any] = {}
    exec(f"def {original.__name__}(self, surprise): pass", {"__name__": original.__module__}, changed)
    function: Callable[..., Any] = changed[original.__name__]
    function.__qualname__ = original.__qualname__
    return function


class TestChangedStock:
    """Every patch refuses a target that is not what it knows; those applied before it are undone."""

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (MoELayer, "__init__"),
            (DistributedDataParallel, "__init__"),
            (stock_optimizer, "get_megatron_optimizer"),
        ],
        ids=["layer", "ddp", "optimizer"],
    )
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda original: replaced, "is not what MegaScale expects"),
            (wrapped, "is not what MegaScale expects"),
            (lambda original: None, "is not what MegaScale expects"),
            (of_another_release, r"takes \(self, surprise\), MegaScale knows it with \(.*config"),
        ],
        ids=["replaced", "wrapped", "gone", "other-release"],
    )
    def test_it_is_named_and_nothing_stays(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: object,
        name: str,
        change: Callable[[Any], object],
        message: str,
    ) -> None:
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
        before = stock_state()
        with pytest.raises(RuntimeError, match=message):
            megatron_ext.enable()
        assert not megatron_ext.is_enabled()
        assert differences(before, stock_state()) == []

    def test_a_runtime_that_cannot_be_made_leaves_no_patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object, **__: object) -> None:
            raise MemoryError("no device")

        monkeypatch.setattr(patches.Runtime, "create", fails)
        before = stock_state()
        with pytest.raises(MemoryError):
            megatron_ext.enable()
        assert differences(before, stock_state()) == []
        assert not megatron_ext.is_enabled()


class Stock:
    def __init__(self, first: int, second: int = 2) -> None:
        self.sum = first + second


class Users(Stock):
    def __init__(self) -> None:
        super().__init__(10)


class Ours(Stock):
    def __init__(self, first: int, second: int = 2) -> None:
        super().__init__(first, second)
        self.ours = True


class TestMakeSubclass:
    @pytest.fixture
    def patch(self) -> Any:
        patch = MakeSubclass("name", Stock, Ours)
        patch.apply()
        yield patch
        if "__wrapped__" in vars(vars(Stock)["__init__"]):
            patch.undo()

    def test_the_stock_name_makes_ours(self, patch: MakeSubclass) -> None:
        made = Stock(1, second=3)
        assert type(made) is Ours
        assert isinstance(made, Stock)
        assert (made.sum, made.ours) == (4, True)

    def test_what_others_derived_stays_theirs(self, patch: MakeSubclass) -> None:
        made = Users()
        assert type(made) is Users
        assert made.sum == 12
        assert not hasattr(made, "ours")

    def test_objects_of_stock_stay_stock_when_copied(self) -> None:
        old = Stock(1)
        patch = MakeSubclass("name", Stock, Ours)
        patch.apply()
        try:
            copies = [copy.copy(old), copy.deepcopy(old), pickle.loads(pickle.dumps(old))]
            assert [type(c) for c in copies] == [Stock] * 3
        finally:
            patch.undo()

    def test_stock_can_be_made_again_afterwards(self, patch: MakeSubclass) -> None:
        ours = Stock(1)
        patch.undo()
        made = Stock(1, second=5)
        assert type(made) is Stock
        assert made.sum == 6
        assert type(ours) is Ours, "what was made stays"
        assert Users().sum == 12

    def test_wrong_arguments_are_a_type_error(self, patch: MakeSubclass) -> None:
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
            Stock()  # type: ignore[call-arg]


class TestWrapFunction:
    def test_a_module_without_the_function(self) -> None:
        patch = WrapFunction("name", __name__, "missing", lambda original: None)
        with pytest.raises(RuntimeError, match=r"name: .*:missing is not what MegaScale expects"):
            patch.apply()
