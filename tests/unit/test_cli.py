"""The ``megascale`` command: its frame, and ``megascale env``."""

import json
import sys
from types import ModuleType

import pytest
import torch

import megascale_omni
from megascale_omni import cli
from megascale_omni.cli import env


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"megascale {megascale_omni.__version__}\n"


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_that_of_misuse(capsys):
    assert cli.main([]) == 2
    assert "env" in capsys.readouterr().err


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["environment"])
    assert left.value.code == 2
    assert "env" in capsys.readouterr().err


def test_a_command_gets_its_arguments_and_its_value_errors_become_messages(monkeypatch, capsys):
    def run(args):
        if args.pages < 2:
            raise ValueError(f"--pages {args.pages} is too few: give at least 2")
        return 5

    def add_arguments(parser):
        parser.add_argument("--pages", type=int, default=2)

    module = ModuleType("tests_cli_pages")
    vars(module).update(NAME="pages", HELP="count pages", add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, module.__name__))

    assert cli.main(["pages"]) == 5
    assert cli.main(["pages", "--pages", "1"]) == 1
    assert capsys.readouterr().err == "megascale: error: --pages 1 is too few: give at least 2\n"


def test_env_names_packages_and_hardware(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for line in (torch.__version__, "cpu.cores", "memory.total", "gpus"):
        assert line in text


def test_env_as_json_is_the_environment(capsys):
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__
    assert found["cpu"]["cores"] >= 1
    assert found["memory"]["total_bytes"] >= found["memory"]["available_bytes"] > 0
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_env_says_what_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(env, "PACKAGES", ("torch", "no-such-package-at-all"))
    monkeypatch.setattr(env, "_read_lines", lambda path: [])
    found = env.environment()
    assert found["packages"] == {"torch": torch.__version__, "no-such-package-at-all": None}
    assert found["memory"] == {"total_bytes": None, "available_bytes": None, "limit_bytes": None}
    cli.main(["env"])
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "expected"), [("max", None), ("1024", 1024), (str(2**63), None)])
def test_env_reports_a_memory_limit_of_the_control_group(monkeypatch, limit, expected):
    files = {"/proc/meminfo": ["MemTotal: 8 kB", "MemAvailable: 4 kB"], "/sys/fs/cgroup/memory.max": [limit]}
    monkeypatch.setattr(env, "_read_lines", lambda path: files.get(path, []))
    assert env.environment()["memory"] == {"total_bytes": 8192, "available_bytes": 4096, "limit_bytes": expected}
