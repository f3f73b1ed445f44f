"""The patches that let stock megatron-core train on CPU: complete, reversible, narrow, loud when stock has changed."""

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType

import pytest
import torch

from megatron_ext import cpu
from megatron_ext.cpu_patches.edits import Bind, Keep, NewBody, Reword, Uncompile, Wrap
from megatron_ext.cpu_patches.registry import PATCHES

Snapshot = dict[tuple[str, str], object]


@pytest.fixture(autouse=True)
def stock_as_it_is() -> Iterator[None]:
    """Each test starts without patches and leaves them as it found them."""
    before = cpu.enabled()
    cpu.disable()
    yield
    cpu.disable()
    cpu.enable(before)


def import_all_targets() -> None:
    cpu.enable()
    cpu.disable()


def stock_state() -> Snapshot:
    """Every attribute of every loaded stock module and class, and the code object of every function."""
    state: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core") or module is None:
            continue
        for attribute, value in vars(module).items():
            if not attribute.startswith("__"):
                state[name, attribute] = value
            if inspect.isclass(value) and value.__module__ == name:
                for member, inner in vars(value).items():
                    state[name, f"{attribute}.{member}"] = inner
    for key, value in list(state.items()):
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if isinstance(function, FunctionType):
            state[key[0], f"{key[1]}.__code__"] = function.__code__
    return state


def differences(before: Snapshot, after: Snapshot) -> list[tuple[str, str]]:
    missing = object()
    return [key for key in before.keys() | after.keys() if before.get(key, missing) is not after.get(key, missing)]


class TestEnableAndDisable:
    def test_disable_restores_every_object(self) -> None:
        import_all_targets()
        before = stock_state()
        cpu.enable()
        assert len(differences(before, stock_state())) > len(PATCHES)
        cpu.disable()
        assert differences(before, stock_state()) == []

    def test_each_patch_alone_is_reversible_and_changes_something(self) -> None:
        import_all_targets()
        before = stock_state()
        silent = []
        for name in PATCHES:
            cpu.enable([name])
            assert cpu.enabled() == (name,)
            if not differences(before, stock_state()):
                silent.append(name)
            cpu.disable()
            assert differences(before, stock_state()) == [], name
        assert silent == []

    def test_twice_is_once(self) -> None:
        cpu.enable()
        once = stock_state()
        cpu.enable()
        cpu.enable(["schedules"])
        assert differences(once, stock_state()) == []
        cpu.disable()
        cpu.disable()
        assert cpu.enabled() == ()

    def test_torch_itself_is_untouched(self) -> None:
        import_all_targets()
        owners = (torch, torch.cuda, torch.Tensor, torch.nn.Module, torch.distributed, torch.random, torch.cpu)
        before = [dict(vars(owner)) for owner in owners]
        cpu.enable()
        assert [dict(vars(owner)) for owner in owners] == before
        assert not torch.cuda.is_available()

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"no CPU patch is named \['schedule'\]"):
            cpu.enable(["schedule"])

    def test_refused_where_there_is_an_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
        with pytest.raises(RuntimeError, match=r"without an accelerator, and this one has H200"):
            cpu.enable()
        assert cpu.enabled() == ()

    def test_every_patch_says_why(self) -> None:
        for name, function in PATCHES.items():
            assert function.__doc__, name
            assert ".py" in function.__doc__, f"{name} names no stock line"


class TestChangedStock:
    def test_a_changed_function_is_named_and_nothing_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import_all_targets()
        from megatron.core.optimizer import clip_grads

        def count_zeros_fp32(parameters: object) -> float:
            return 0.0

        monkeypatch.setattr(clip_grads, "count_zeros_fp32", count_zeros_fp32)
        before = stock_state()
        with pytest.raises(RuntimeError, match=r"clip_grads:count_zeros_fp32 is not what it expects.*\['cuda'\]"):
            cpu.enable()
        assert cpu.enabled() == ()
        assert differences(before, stock_state()) == []

    def test_a_missing_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import_all_targets()
        from megatron.core.pipeline_parallel import schedules

        monkeypatch.delattr(schedules, "forward_backward_no_pipelining")
        with pytest.raises(RuntimeError, match=r"schedules:forward_backward_no_pipelining is not what it expects"):
            cpu.enable(["schedules"])

    @pytest.mark.parametrize(
        "edit",
        [
            Reword(__name__, "target", names={"cuda": "cpu"}),
            Reword(__name__, "target", constants={"cuda": "cpu"}),
            Reword(__name__, "missing", names={"cuda": "cpu"}),
            Reword(__name__, "Owner.inherited", names={"upper": "lower"}),
            Reword(__name__, "VALUE", names={"cuda": "cpu"}),
            NewBody(__name__, "target", lambda other: other),
            Bind(__name__, "VALUE", 2),
            Keep(__name__, "missing"),
            Wrap(__name__, "missing", lambda original: original),
            Uncompile(__name__, "missing"),
        ],
        ids=lambda edit: f"{type(edit).__name__}-{edit.target.split(':')[1]}",
    )
    def test_every_kind_of_edit_refuses_what_it_does_not_expect(self, edit: Reword) -> None:
        with pytest.raises(RuntimeError, match=f"{__name__}:.* is not what it expects"):
            edit.apply()
        edit.undo()  # nothing was done
        assert (target("a"), VALUE) == ("A", 1)


VALUE = 1


def target(text: str) -> str:
    return text.upper()


class Parent:
    def inherited(self) -> str:
        return "a".upper()


class Owner(Parent):
    pass


class TestReword:
    def test_names_and_constants_of_nested_functions(self) -> None:
        edit = Reword(__name__, "nested", names={"upper": "lower"}, constants={"b": "C", "d": "E"})
        function = nested
        edit.apply()
        assert nested() == ["a", "C", ("E",)]
        assert nested is function
        edit.undo()
        assert nested() == ["A", "b", ("d",)]


def nested() -> list[object]:
    def inner() -> list[object]:
        return ["A".lower().upper(), "b", ("d",)]

    return inner()
