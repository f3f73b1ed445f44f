"""Wheel, editable install and the bare source tree hold the same packages, and `triton_kernels` stays free for others.

All on a copy of the sources with one kernel added, in interpreters that see no other install of the project.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import megascale_omni

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = sysconfig.get_path("purelib")
PARTS = ("megascale_omni", "megatron_ext", "deepspeed_ext", "triton_kernels", "tests", "scripts", "configs")
FILES = ("setup.cfg", "pyproject.toml", "README.md")

# What the core must do without: the frameworks it is plugged into, and what comes only with an extra.
FRAMEWORKS = ("megatron", "deepspeed", "transformers", "apex", "triton", "transformer_engine")
ABSENT = (*FRAMEWORKS, "yaml", "rich", "psutil", "matplotlib", "tensorboard", "hypothesis", "pytest")

PROBE = """
import importlib.util, json, site, sys
for folder in json.loads(sys.argv[1]):
    sys.path.append(folder)
    site.addsitedir(folder)  # reads .pth files, as at the start of an interpreter
from megascale_omni import __version__
from megascale_omni.kernels import probe_kernel
import megascale_omni.cli, triton_kernels
print(json.dumps({
    "adapters": [name for name in ("megatron_ext", "deepspeed_ext") if importlib.util.find_spec(name)],
    "version": __version__,
    "kernel": probe_kernel.__name__,
    "answer": probe_kernel.ANSWER,
    "triton_kernels": getattr(triton_kernels, "OWNER", "ours"),
}))
"""

BLOCKED_IMPORT = """
import importlib, json, pkgutil, sys
absent = json.loads(sys.argv[1])
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not here", name=name)
sys.meta_path.insert(0, Absent())
import megascale_omni
names = [m.name for m in pkgutil.walk_packages(megascale_omni.__path__, "megascale_omni.")
         if not m.name.startswith("megascale_omni.kernels")]
for name in names:
    importlib.import_module(name)
assert not set(absent) & set(sys.modules), set(absent) & set(sys.modules)
print(json.dumps(names))
"""


def python(*arguments: str | Path, cwd: Path) -> str:
    """Output of an interpreter that sees neither this environment's packages nor the project, unless told to."""
    command = [sys.executable, "-S", "-E", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of the sources, where a build leaves nothing behind that matters."""
    copy = tmp_path_factory.mktemp("sources")
    for part in PARTS:
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, copy / file)
    (copy / "triton_kernels" / "probe_kernel.py").write_text("ANSWER = 42\n")
    return copy


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """A folder with another project's package of the name `triton_kernels`."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "triton_kernels").mkdir()
    (folder / "triton_kernels" / "__init__.py").write_text('OWNER = "foreign"\n')
    return folder


def build(sources: Path, hook: str) -> Path:
    """The wheel that a hook of the build backend makes, as pip calls it."""
    folder = sources / hook
    code = f"import sys; sys.path.append({SITE_PACKAGES!r}); from setuptools import build_meta; "
    python("-c", code + f"build_meta.{hook}({str(folder)!r})", cwd=sources)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path) -> Path:
    """A folder with what `pip install` makes of the wheel."""
    target = wheel.parent / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def wheel(sources) -> Path:
    folder = sources / "wheels"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed_wheel(wheel) -> Path:
    return install(wheel)


@pytest.fixture(scope="module")
def installed_editable(sources) -> Path:
    return install(build(sources, "build_editable"))


def probe(way: str, request: pytest.FixtureRequest, *more_folders: Path) -> dict[str, object]:
    """What an interpreter sees where the project came there by ``way``, and before the folders of others."""
    folder: Path = request.getfixturevalue({"wheel": "installed_wheel", "editable": "installed_editable"}.get(way, way))
    empty = folder.parent / "elsewhere"
    empty.mkdir(exist_ok=True)
    cwd = folder if way == "sources" else empty
    folders = [] if way == "sources" else [folder]
    return json.loads(python("-c", PROBE, json.dumps([str(path) for path in [*folders, *more_folders]]), cwd=cwd))


@pytest.mark.parametrize("way", ["wheel", "editable", "sources"])
def test_kernels_are_imported_by_our_name_and_a_foreign_package_keeps_its_own(way, request, foreign):
    assert probe(way, request, foreign) == {
        "adapters": ["megatron_ext", "deepspeed_ext"],
        "version": megascale_omni.__version__,
        "kernel": "megascale_omni.kernels.probe_kernel",
        "answer": 42,
        "triton_kernels": "foreign",
    }


def test_a_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "megascale_omni",
        "megatron_ext",
        "deepspeed_ext",
    }
    assert {"megascale_omni/kernels/probe_kernel.py", "megascale_omni/kernels/README.md"} <= set(names)


def test_every_source_file_is_in_the_wheel(wheel, sources):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = ("megascale_omni", "megatron_ext", "deepspeed_ext")
    files = {str(path.relative_to(sources)) for part in packed for path in (sources / part).rglob("*.py")}
    assert files <= names


def test_an_installation_without_extras_needs_torch_and_numpy_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    requirements = metadata.get_all("Requires-Dist", [])
    always = {line.partition(">")[0] for line in requirements if "extra ==" not in line}
    assert always == {"torch", "numpy"}
    extras = {"megatron", "deepspeed", "hf", "dev", "paging", "pictures", "kernels"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    assert metadata["Version"] == megascale_omni.__version__
    assert "megascale = megascale_omni.cli:main" in entry_points


def test_the_pins_are_exact_and_fit_what_the_metadata_asks_for(wheel):
    lines = [line for line in (ROOT / "scripts/requirements-cpu.txt").read_text().splitlines() if line[:1] != "#"]
    pins = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(Version(version) for version in pins.values())
    assert lines[0].startswith("torch==")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        asked = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    for requirement in map(Requirement, asked):
        for extra in ("", "megatron", "deepspeed", "hf", "dev"):
            marker = requirement.marker
            if marker is None or marker.evaluate({"python_version": "3.11", "extra": extra}):
                assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_the_core_is_imported_without_any_framework(tmp_path):
    code = f"import sys; sys.path += [{str(ROOT)!r}, {SITE_PACKAGES!r}]\n" + BLOCKED_IMPORT
    imported = json.loads(python("-c", code, json.dumps(ABSENT), cwd=tmp_path))
    assert "megascale_omni.cli.env" in imported


def test_the_link_to_the_kernels_is_relative_and_their_folder_no_package():
    link = ROOT / "megascale_omni" / "kernels"
    assert link.is_symlink()
    assert str(link.readlink()) == "../triton_kernels"
    assert not list((ROOT / "triton_kernels").rglob("__init__.py"))
