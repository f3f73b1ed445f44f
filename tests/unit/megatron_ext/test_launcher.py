"""``python -m megatron_ext SCRIPT``: what it runs, and what it says to mistakes, each once and on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from megatron_ext.megatron_lm.arguments import check_spelling, known_flags
from megatron_ext.megatron_lm.hooks import MisuseError
from megatron_ext.megatron_lm.launcher import check_script
from tests.unit.megatron_ext.toy_checkout import FILES, write_checkout

ROOT = Path(__file__).resolve().parents[3]
MOE = ("--num-experts", "4")


def launch(*words: object, rank: int = 0) -> tuple[int, str]:
    """Runs it; the status, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "megatron_ext", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    status, output = launch(write_checkout(tmp_path), *MOE)
    assert status == 0, output
    assert "stock validates ['megascale']" in output, "the flag is there, and off"
    assert "stock logs 3" in output
    assert "stock saves" in output
    assert not list(tmp_path.rglob("*.py.*"))


def test_megascale_is_enabled_before_the_model_is_built_and_ends_with_the_script(tmp_path: Path) -> None:
    told = FILES["training"] if "training" in FILES else FILES["megatron/training/training.py"]
    told = told.replace(
        "return [], None, None", "import megatron_ext; print('on', megatron_ext.is_enabled()); return [], None, None"
    )
    script = write_checkout(tmp_path, training=told)
    status, output = launch(script, *MOE, "--megascale")
    assert status == 0, output
    assert "on True" in output
    status, output = launch(script, *MOE)
    assert "on False" in output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--megascale",), "--megascale needs a mixture-of-experts model"),
        ((*MOE, "--megascale", "--megascale-page-sise", "1MiB"), "did you mean --megascale-page-size?"),
        ((*MOE, "--megascal"), "--megascal is no flag of MegaScale; did you mean --megascale?"),
        ((*MOE, "--megascale-page-size", "1MiB"), "has no effect without --megascale"),
        ((*MOE, "--megascale", "--megascale-page-size", "1GiB"), "64MiB"),
        ((*MOE, "--megascale", "--yaml-cfg", "x.yaml"), "--yaml-cfg is not supported with --megascale"),
        ((*MOE, "--distributed-backend", "nccl"), "--distributed-backend gloo"),
    ],
    ids=["dense", "misspelt", "misspelt switch", "without megascale", "bad value", "yaml", "nccl"],
)
def test_mistakes_are_told_once_and_end_every_rank(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    script = write_checkout(tmp_path)
    status, output = launch(script, *flags)
    assert status == 2, output
    assert "megatron_ext: error: " in output
    assert said in output
    assert "Traceback" not in output
    if "--megascal" in flags:
        assert launch(script, *flags, rank=1) == (2, ""), "another rank ends, too, and leaves the word to the first"


def test_any_other_error_has_a_traceback_that_begins_in_the_script(tmp_path: Path) -> None:
    script = write_checkout(tmp_path, pretrain_toy="import megatron.training\nraise KeyError('of the script')\n")
    status, output = launch(script, rank=1)
    assert status == 1
    assert "KeyError: 'of the script'" in output
    assert "launcher.py" not in output


def test_a_script_that_builds_no_model_is_not_called_a_success(tmp_path: Path) -> None:
    script = write_checkout(tmp_path, pretrain_toy="import megatron.training\n")
    status, output = launch(script, "--megascale")
    assert status == 2
    assert "--megascale had no effect" in output
    assert launch(script)[0] == 0


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("training", "setup_model_and_optimizer"),
        ("training", "training_log"),
        ("checkpointing", "load_checkpoint"),
        ("arguments", "validate_args"),
    ],
)
def test_a_missing_hook_is_named(tmp_path: Path, module: str, name: str) -> None:
    text = FILES[f"megatron/training/{module}.py"].replace(f"def {name}(", f"def renamed_{name}(")
    status, output = launch(write_checkout(tmp_path, **{module: text}), *MOE)
    assert status == 1
    assert f"megatron.training.{module} has no '{name}', which MegaScale hooks into" in output


def test_a_hook_with_other_parameters_is_named(tmp_path: Path) -> None:
    text = FILES["megatron/training/training.py"].replace("losses, iteration", "losses, step")
    status, output = launch(write_checkout(tmp_path, training=text), *MOE)
    assert status == 1
    assert "megatron.training.training has training_log(losses, step)" in output


def test_importing_the_plug_in_first_is_as_good(tmp_path: Path) -> None:
    script = write_checkout(tmp_path)
    script.write_text("import megatron_ext\n" + script.read_text())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *MOE, "--megascale"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "stock validates ['megascale']" in done.stdout


def test_importing_it_too_late_is_an_error(tmp_path: Path) -> None:
    script = write_checkout(tmp_path, pretrain_toy="import megatron.training\nimport megatron_ext\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "megatron_ext must be imported before Megatron-LM" in done.stderr


# -- the script's name


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
def test_scripts_that_are_none(tmp_path: Path, make, said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        check_script(make(tmp_path))


def written(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def test_a_script_outside_of_a_checkout(tmp_path: Path) -> None:
    script = written(tmp_path, "from megatron.training import pretrain\n")
    status, output = launch(script, "--megascale")
    assert status == 2
    assert "Megatron-LM is not importable: there is no megatron/training beside" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "text", ["import megatron.training", "from megatron.core import mpu", "if 1:\n import megatron"]
)
def test_scripts_that_are_some(tmp_path: Path, text: str) -> None:
    assert check_script([written(tmp_path, text)]) == tmp_path / "script.py"


# -- spelling


def test_all_flags_are_known() -> None:
    assert "--megascale" in known_flags()
    check_spelling([f"{flag}=x" for flag in known_flags()])
    check_spelling(["--num-experts", "4", "megascale", "--mega", "--save", "--megascale"])


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--megascale-dispatchr", "--megascale-dispatcher"),
        ("--megascale-device-buget=50%", "--megascale-device-budget"),
        ("--megascale_page_size", "--megascale-page-size"),
        ("--mega-scale", "--megascale"),
    ],
)
def test_what_was_meant(flag: str, meant: str) -> None:
    with pytest.raises(MisuseError, match=f"did you mean {meant}"):
        check_spelling(["--num-layers", "2", flag])
