"""``python -m megatron_ext SCRIPT``: what it runs, and what it says to mistakes, each once and on every rank."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from megascale_omni.config import MegaScaleConfig
from megatron_ext.megatron_lm.arguments import check_spelling, known_flags
from megatron_ext.megatron_lm.hooks import MisuseError, mistakes_we_find
from megatron_ext.megatron_lm.install import HOOKS
from megatron_ext.megatron_lm.launcher import _speaks, check_script
from tests.unit.megatron_ext.toy_checkout import FILES, toy_module, write_checkout

ROOT = Path(__file__).resolve().parents[3]
MOE = ("--num-experts", "4")
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def launch(*words: object, rank: int = 0, local_rank: int | None = None, module: bool = True) -> tuple[int, str]:
    """Runs it, or a script alone; the status, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "PYTHONWARNINGS": "ignore"}
    environment.pop("LOCAL_RANK", None)  # another framework's tests leave one behind
    if local_rank is not None:
        environment["LOCAL_RANK"] = str(local_rank)
    command = [sys.executable, *(["-m", "megatron_ext"] if module else []), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    status, output = launch(write_checkout(tmp_path), *MOE)
    assert status == 0, output
    assert "stock validates ['megascale']" in output, "the flag is there, and off"
    assert "enabled False" in output
    assert "stock logs 3" in output
    assert "the script's device cpu" in output
    assert "stock saves" in output


def test_the_first_line_of_a_script_is_as_good_and_the_model_is_built_with_megascale(tmp_path: Path) -> None:
    script = write_checkout(tmp_path)
    script.write_text("import megatron_ext\n" + script.read_text())
    status, output = launch(script, *MOE, "--megascale", module=False)
    assert status == 0, output
    assert "enabled True" in output
    assert "the script's device cpu" in output, "though it was compiled before the plug-in was imported"
    assert "stock saves" in output
    assert "at the end False" in output, "what was changed is undone when training is over"


@pytest.mark.parametrize(("rank", "module"), [(0, True), (1, True), (0, False)])
def test_a_mistake_is_told_once_and_ends_every_rank(tmp_path: Path, rank: int, module: bool) -> None:
    script = write_checkout(tmp_path)
    if not module:
        script.write_text("import megatron_ext\n" + script.read_text())
    status, output = launch(script, "--megascale", rank=rank, module=module)
    assert status == 2, output
    said = "megatron_ext: error: --megascale needs a mixture-of-experts model: give --num-experts, or leave"
    assert output.startswith(said) if rank == 0 else output == "", output  # others leave the word to the first


def test_a_mistake_that_the_first_of_another_node_sees_is_told_there(tmp_path: Path) -> None:
    status, output = launch(write_checkout(tmp_path), *MOE, "--megascale-config", "x", rank=4, local_rank=0)
    assert status == 2, output
    assert output.startswith("megatron_ext: error: --megascale-config=x has no effect")
    assert output.rstrip().endswith("(on rank 4)")


def test_once_ranks_have_met_the_first_that_comes_to_a_mistake_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not _speaks("1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert [_speaks("1"), _speaks("0"), _speaks("1")] == [True, False, False]
    finally:
        torch.distributed.destroy_process_group()


def test_what_we_refuse_while_stock_builds_the_model_is_a_mistake_and_what_stock_refuses_is_not() -> None:
    def built(make: Callable[[], object], *levels: str) -> None:
        try:
            built(make, *levels[1:]) if levels else make()
        except ValueError as error:
            where = f" when instantiating {levels[0]}" if levels else ""
            raise ValueError(f"{error}{where}").with_traceback(error.__traceback__)  # noqa: B904 - as stock's builder

    with (
        pytest.raises(MisuseError, match=r"^configuration file /no/such/file.json cannot be read(?!.*when)"),
        mistakes_we_find(),
    ):
        built(lambda: MegaScaleConfig.from_file("/no/such/file.json"), "Experts", "Layer")
    with pytest.raises(ValueError, match="invalid literal") as stocks, mistakes_we_find():
        built(lambda: int("stock"), "Experts", "Layer")
    assert not isinstance(stocks.value, MisuseError)


def test_any_other_error_has_a_traceback_that_begins_in_the_script(tmp_path: Path) -> None:
    script = write_checkout(tmp_path, pretrain_toy="import megatron.training\nraise KeyError('of the script')\n")
    status, output = launch(script, rank=1)
    assert status == 1
    assert "KeyError: 'of the script'" in output
    assert "launcher.py" not in output


def test_an_error_after_ranks_have_met_neither_waits_for_them_nor_leaves_a_process_behind(tmp_path: Path) -> None:
    lines = (
        "import megatron_ext, atexit, megatron.training, multiprocessing, torch.distributed as dist",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "atexit.register(print, 'a normal exit')",
        # As stock's writer of checkpoints has one. While it lives it keeps this output open, and launch() waiting.
        "manager = multiprocessing.get_context('fork').Manager()",
        "raise KeyError('of the script')",
    )
    status, output = launch(write_checkout(tmp_path, pretrain_toy="\n".join(lines)), module=False)
    assert status == 1
    assert output.endswith("KeyError: 'of the script'\n"), output


def test_a_script_that_builds_no_model_is_not_called_a_success(tmp_path: Path) -> None:
    status, output = launch(write_checkout(tmp_path, pretrain_toy="import megatron.training\n"), "--megascale")
    assert status == 2
    assert "--megascale had no effect" in output


def test_importing_the_plug_in_too_late_is_an_error(tmp_path: Path) -> None:
    script = write_checkout(tmp_path, pretrain_toy="import megatron.training\nimport megatron_ext\n")
    status, output = launch(script, module=False)
    assert status == 1
    assert "megatron_ext must be imported before Megatron-LM" in output


def test_importing_the_plug_in_imports_nothing_of_stock() -> None:
    code = "import megatron_ext, sys; print([m for m in sys.modules if m.startswith('megatron.')])"
    status, output = launch("-c", code, module=False)
    assert (status, output.strip()) == (0, "[]"), "else Megatron-LM's scripts would run on another megatron.core"


def test_a_script_outside_of_a_checkout(tmp_path: Path) -> None:
    script = written(tmp_path, "from megatron.training import pretrain\n")
    status, output = launch(script, "--megascale")
    assert status == 2
    assert "Megatron-LM is not importable: there is no megatron/training beside" in output
    assert "Traceback" not in output


# -- hooks


def hooked(module: ModuleType) -> ModuleType:
    """As it is after its import."""
    for hook in HOOKS[module.__name__]:
        hook(module)
    return module


def test_every_hook_fits_the_functions_it_is_made_for() -> None:
    for name in HOOKS:
        hooked(toy_module(name))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("training", "setup_model_and_optimizer"),
        ("training", "training_log"),
        ("training", "calc_params_l2_norm"),
        ("training", "pretrain"),
        ("checkpointing", "save_checkpoint"),
        ("checkpointing", "load_checkpoint"),
        ("arguments", "validate_args"),
        ("arguments", "add_megatron_arguments"),
        ("yaml_arguments", "load_yaml"),
    ],
)
def test_a_missing_hook_is_named(module: str, name: str) -> None:
    full = f"megatron.training.{module}"
    changed = toy_module(full)
    delattr(changed, name)
    with pytest.raises(RuntimeError, match=re.escape(f"{full} has no '{name}', which MegaScale hooks into")):
        hooked(changed)


@pytest.mark.parametrize(
    ("module", "name", "other"),
    [
        ("training", "training_log", lambda losses, step: None),
        ("checkpointing", "load_checkpoint", lambda ddp_model, optimizer: None),
        ("arguments", "validate_args", lambda options: None),
    ],
)
def test_a_hook_with_other_parameters_is_named(module: str, name: str, other: Callable[..., None]) -> None:
    full = f"megatron.training.{module}"
    changed = toy_module(full)
    setattr(changed, name, other)
    with pytest.raises(RuntimeError, match=re.escape(f"{full} has {name}(")):
        hooked(changed)


# -- flags


@pytest.fixture
def arguments() -> ModuleType:
    return hooked(toy_module("megatron.training.arguments"))


def validated(arguments: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    """What a command line comes to."""
    monkeypatch.setattr(sys, "argv", ["pretrain_toy.py", *words])
    found: argparse.Namespace = arguments.validate_args(arguments.parse_args())
    return found


def test_flags_stand_among_stocks(arguments: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = validated(arguments, monkeypatch, *MOE, "--megascale", "--megascale-page-size", "1MiB")
    assert found.megascale
    assert found.megascale_page_size == "1MiB"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--megascale",), "--megascale needs a mixture-of-experts model"),
        ((*MOE, "--megascale", "--megascale-page-sise", "1MiB"), "did you mean --megascale-page-size?"),
        ((*MOE, "--megascal"), "--megascal is no flag of MegaScale; did you mean --megascale?"),
        ((*MOE, "--megascale-page-size", "1MiB"), "has no effect without --megascale"),
        ((*MOE, "--megascale", "--megascale-page-size", "1GiB"), "64"),
        ((*MOE, "--megascale", "--save", "x", "--ckpt-format", "torch"), "--ckpt-format torch_dist"),
    ],
    ids=["dense", "misspelt", "misspelt switch", "without megascale", "bad value", "format"],
)
def test_mistakes(arguments: ModuleType, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(MisuseError, match=re.escape(said)):
        validated(arguments, monkeypatch, *flags)


def test_a_checkpoint_in_place_of_its_folder(
    arguments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / "metadata.json").touch()
    flags = (*MOE, "--load", str(tmp_path / "iter_0000004"))
    validated(arguments, monkeypatch, *flags)  # as stock, where it is stock
    with pytest.raises(MisuseError, match=f"give --load {re.escape(str(tmp_path))} --ckpt-step 4"):
        validated(arguments, monkeypatch, *flags, "--megascale")


@pytest.mark.parametrize("name", ["prepare_write_data", "write_preloaded_data"])
def test_a_writer_without_what_is_hooked_is_named(name: str) -> None:
    changed = toy_module(WRITER)
    delattr(changed.FileSystemWriterAsync, name)
    with pytest.raises(RuntimeError, match=f"FileSystemWriterAsync has no '{name}', which MegaScale hooks into"):
        hooked(changed)
    with pytest.raises(RuntimeError, match="has no 'FileSystemWriterAsync', which MegaScale hooks into"):
        hooked(ModuleType(WRITER))


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--distributed-backend", "nccl"), "add --distributed-backend gloo"),
        (("--async-save", "--use-persistent-ckpt-worker"), "worker needs an accelerator: .* leave it out"),
    ],
    ids=["nccl", "worker"],
)
def test_what_needs_an_accelerator(
    arguments: ModuleType, monkeypatch: pytest.MonkeyPatch, cuda: bool, flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    if cuda:
        validated(arguments, monkeypatch, *MOE, *flags)
        return
    with pytest.raises(MisuseError, match=said):
        validated(arguments, monkeypatch, *MOE, *flags)


@pytest.mark.parametrize("megascale", [False, True])
def test_a_file_of_arguments_would_drop_ours(monkeypatch: pytest.MonkeyPatch, megascale: bool) -> None:
    module = hooked(toy_module("megatron.training.yaml_arguments"))
    monkeypatch.setattr(sys, "argv", ["script", "--yaml-cfg", "x", *["--megascale"] * megascale])
    expected = pytest.raises(MisuseError, match="--yaml-cfg") if megascale else pytest.raises(SystemExit)
    with expected:
        module.load_yaml("x")


# -- the script's name


def written(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: [], "no script is named"),
        (lambda folder: ["--megascale"], "no script is named"),
        (lambda folder: [str(folder / "pretrain_gtp.py")], "pretrain_gtp.py does not exist"),
        (lambda folder: [str(folder)], "is a folder"),
        (lambda folder: [written(folder, "not ( python")], "is no Python script"),
        (lambda folder: [written(folder, "import torch, megatronic\n")], "is no script of Megatron-LM"),
        (lambda folder: [written(folder, "from . import megatron\n")], "is no script of Megatron-LM"),
    ],
)
def test_scripts_that_are_none(tmp_path: Path, make: Callable[[Path], list[str]], said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        check_script(make(tmp_path))


@pytest.mark.parametrize(
    "text", ["import megatron.training", "from megatron.core import mpu", "if 1:\n import megatron"]
)
def test_scripts_that_are_some(tmp_path: Path, text: str) -> None:
    assert check_script([written(tmp_path, text)]) == tmp_path / "script.py"


def test_a_script_of_a_checkout_that_imports_its_neighbour(tmp_path: Path) -> None:
    write_checkout(tmp_path)
    assert check_script([written(tmp_path, "import pretrain_toy")]) == tmp_path / "script.py"


# -- spelling


def test_all_flags_are_known() -> None:
    assert "--megascale" in known_flags()
    check_spelling([f"{flag}=x" for flag in known_flags()])
    check_spelling(["--num-experts", "4", "megascale", "--mega", "--mscale", "--scale", "--save", "--megascale"])


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--megascale-dispatchr", "--megascale-dispatcher"),
        ("--megascale-device-buget=50%", "--megascale-device-budget"),
        ("--megascale_page_size", "--megascale-page-size"),
        ("--mega-scale", "--megascale"),
        ("--meagscale", "--megascale"),
        ("--megscale-dispatcher", "--megascale-dispatcher"),
    ],
)
def test_what_was_meant(flag: str, meant: str) -> None:
    with pytest.raises(MisuseError, match=f"did you mean {meant}"):
        check_spelling(["--num-layers", "2", flag])


def test_the_toy_has_what_is_hooked() -> None:
    assert {f"{name.replace('.', '/')}.py" for name in HOOKS} <= FILES.keys()
