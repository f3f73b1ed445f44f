"""The script for a machine with an accelerator: what it runs, what it keeps, what it says. A stand-in does the work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STAND_IN = """#!{python}
import json, pathlib, subprocess, sys, time
folder, words = pathlib.Path({folder!r}), sys.argv[1:]
with open(folder / "calls", "a") as calls:
    print(*words[:4], file=calls)
if words[0] == "-c":
    print((folder / "accelerator").read_text())
elif words == ["-"]:
    print((folder / "missing").read_text())
elif words[0] == "-":
    sys.exit(subprocess.run([sys.executable, *words], input=sys.stdin.read(), text=True).returncode)
else:
    plan = json.loads((folder / "plan").read_text())
    what = next(name for name in plan if any(name in word for word in words))
    if what == "measure.py":
        environment = {{"gpus": [{{"name": "A 1"}}], "packages": {{"torch": "9", "x": None}}, "date": "today"}}
        row = {{"id": "K5", "what": "w", "unit": "x", "at_least": 1.0, "met": False, "value": None, "error": "lost"}}
        found = {{"environment": environment, "rows": [row]}}
        pathlib.Path(words[words.index("--json") + 1]).write_text(json.dumps(found))
    time.sleep(60 if plan[what] == "hangs" else 0)
    sys.exit(0 if plan[what] == "hangs" else plan[what])
"""


@pytest.fixture
def check(tmp_path):
    """Runs the script with a stand-in for Python; (exit status, output, what the stand-in was asked for)."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, folder=str(tmp_path)))
    stand_in.chmod(0o755)

    def run(plan, *words, accelerator="A 1", missing=""):
        for name, content in (("accelerator", accelerator), ("missing", missing), ("calls", "")):
            (tmp_path / name).write_text(content)
        (tmp_path / "plan").write_text(json.dumps(plan | {"measure.py": 0, "pytest": 0}))
        done = subprocess.run(
            ["bash", "scripts/gpu_check.sh", "--out", str(tmp_path / "out"), *words],
            cwd=ROOT, env=os.environ | {"PYTHON": str(stand_in)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        calls = (tmp_path / "calls").read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, [call for call in calls if call[:2] not in ("-c", "-", "- ")]

    return run


def test_help_says_what_it_does_and_runs_nothing(check):
    status, said, calls = check({}, "--help")
    assert (status, calls) == (0, [])
    assert "bash scripts/gpu_check.sh [--seconds 540]" in said


def test_without_an_accelerator_or_a_package_nothing_is_run(check):
    status, said, calls = check({}, accelerator="")
    assert (status, calls) == (2, [])
    assert "no accelerator found by torch; nothing was tested or measured" in said
    status, said, calls = check({}, missing="triton hypothesis")
    assert (status, calls) == (2, [])
    assert "has no triton hypothesis" in said


def test_what_passed_is_kept_and_what_failed_is_run_again(check):
    files = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
    status, said, calls = check({"test_kernels": 1})
    assert status == 1
    assert [Path(call.split()[-1]).name for call in calls[:-1]] == files
    assert "gpu_check FAILED: tests/gpu/test_kernels.py" in said
    assert "A 1; torch 9; today" in said
    assert "| K5 | w | lost | >= 1.0 | no |" in said
    status, said, calls = check({}, "--row", "K5")
    assert status == 0
    assert [call.split()[-1] for call in calls] == ["tests/gpu/test_kernels.py", "K5"]
    status, _, calls = check({}, "--tests")
    assert (status, calls) == (0, [])
    status, _, calls = check({}, "--tests", "--again")
    assert (status, len(calls)) == (0, len(files))


def test_where_the_time_is_up_it_says_so_and_how_to_go_on(check):
    status, said, calls = check({"test_kernels": "hangs"}, "--seconds", "3")
    assert status == 3
    assert "the 3 s were up at tests/gpu/test_" in said
    assert "run it again to go on" in said
    assert not any("measure.py" in call for call in calls)


def test_a_test_that_passed_is_not_run_again(tmp_path):
    """Those that are left are run; where none is, all are, since pytest takes a file without tests for a mistake."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests/gpu/conftest.py").read_text())
    (folder / "test_two.py").write_text(
        "import os\n\ndef test_one():\n    pass\n\ndef test_other():\n    assert os.environ.get('FIXED')\n"
    )
    passed = tmp_path / "passed"
    environment = os.environ | {"MEGASCALE_GPU_PASSED": str(passed), "PYTHONPATH": str(tmp_path)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: True)\n")

    def run(**more: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "gpu/test_two.py"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=60
        ).stdout

    assert "1 failed, 1 passed" in run()
    assert "1 passed, 1 deselected" in run(FIXED="1")
    assert passed.read_text().split() == ["gpu/test_two.py::test_one", "gpu/test_two.py::test_other"]


def test_every_timed_row_is_there_with_its_bar():
    from scripts.measurements.kernels import ROWS

    bars = {row.id: row.bound for row in ROWS if row.id[:2] in ("K5", "K6", "K7", "K8", "K9")}
    assert all(row.kind == "at_least" for row in ROWS if row.id in bars)
    products = {
        f"K5-{n}-{other}": b for n in (64, 256, 1024, 8192) for other, b in (("grouped_mm", 0.95), ("roofline", 0.8))
    }
    assert bars == products | {"K6": 0.95, "K7": 0.9, "K8": 0.85, "K9-speed": 1.0, "K9-step": 1.0, "K9-memory": 2.0}


def test_the_table_has_what_was_measured_and_whether_it_is_enough(check, tmp_path):
    row = {"what": "w", "unit": "x", "at_least": 0.95, "value": 0.9712, "met": True}
    rows = [{"id": "K6", **row}, {"id": "K5-64-roofline", **row, "at_least": 0.8, "value": 0.7, "met": False}]
    environment = {"gpus": [{"name": "A 1"}], "packages": {"torch": "9"}, "date": "today"}
    (tmp_path / "out").mkdir()
    check({"test_kernels": 0}, "--tests")
    (tmp_path / "out" / "A-1.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    _, said, _ = check({}, "--tests")
    assert "| K6 | w | 0.971 x | >= 0.95 | yes |" in said
    assert "| K5-64-roofline | w | 0.7 x | >= 0.8 | no |" in said
    assert int((tmp_path / "out" / "A-1.seconds").read_text()) >= 0


def test_an_argument_that_it_does_not_know_is_refused(check):
    for words in (("--fast",), ("--seconds",), ("--seconds", "soon")):
        status, said, calls = check({}, *words)
        assert (status, calls) == (1, [])
        assert "--seconds 540" in said


def test_the_model_that_no_gpu_holds_fits_one_and_its_host_memory(capsys):
    """As docs/MEASURING.md says it is run: within the device's memory, nothing on disk."""
    from megascale_omni.cli import main

    words = re.search(r"^megascale (plan .*one-gpu-12b.*)$", (ROOT / "docs/MEASURING.md").read_text(), flags=re.M)
    assert words is not None
    assert main([*words[1].split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 12e9 < plan["parameters"] < 12.5e9
    state = plan["total_page_bytes"] + plan["dense_bytes"]
    assert state > 216e9
    assert state > 141 * 2**30, "no GPU of that size holds it"
    assert plan["tier_bytes"]["device"] + plan["dense_bytes"] + plan["activation_bytes"] < 0.9 * 141 * 2**30
    assert plan["tier_bytes"]["host"] <= 96 * 2**30
    assert plan["tier_bytes"]["disk"] == 0
