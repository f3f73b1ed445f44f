"""Which module may import which: adapters -> core -> torch, and policy knows of no process group."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"

# Pure functions over what they are given: neither they nor what they import may talk to other ranks.
# Names of modules that are still to come stand here already; each is checked from the day it exists.
POLICY_MODULES = (
    "megascale_omni.config",
    "megascale_omni.schedule",
    "megascale_omni.paging.layout",
    "megascale_omni.paging.names",
    "megascale_omni.paging.planes",
    "megascale_omni.paging.residency",
    "megascale_omni.groups.plan",
    "megascale_omni.groups.gossip",
    "megascale_omni.topology.levels",
    "megascale_omni.topology.placement",
    "megascale_omni.topology.routing",
    "megascale_omni.topology.simulate",
)


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT_IMPORTS, "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)


def source_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


def uses_of_torch_distributed(code: str) -> Iterator[int]:
    """Lines that import torch.distributed or reach it through ``torch``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        else:
            continue
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            yield node.lineno


@pytest.fixture
def copied_tree(tmp_path) -> Path:
    """The packages and their contracts, to be broken."""
    for package in ("megascale_omni", "megatron_ext", "deepspeed_ext", "triton_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def test_the_contracts_of_setup_cfg_hold():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "code", "contract"),
    [
        ("megascale_omni/late.py", "def f():\n    import megatron.core\n", "The core imports no training framework"),
        ("megascale_omni/late.py", "import megatron_ext\n", "The core imports no training framework"),
        ("megascale_omni/late.py", "import triton.language\n", "Only kernels import Triton"),
        ("megatron_ext/late.py", "import deepspeed\n", "The Megatron adapter knows no other framework"),
        ("deepspeed_ext/late.py", "from megatron import core\n", "The DeepSpeed adapter does not know Megatron"),
        ("deepspeed_ext/late.py", "import megatron_ext\n", "Adapters stand on the core, not on each other"),
    ],
)
def test_a_broken_contract_is_seen(copied_tree, file, code, contract):
    (copied_tree / file).write_text(code)
    done = lint_imports(copied_tree)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout


def test_kernels_may_import_triton_and_the_core_may_import_kernels(copied_tree):
    (copied_tree / "triton_kernels" / "late.py").write_text("import triton\nimport triton.language as tl\n")
    (copied_tree / "megascale_omni" / "late.py").write_text("def f():\n    from megascale_omni.kernels import late\n")
    done = lint_imports(copied_tree)
    assert done.returncode == 0, done.stdout + done.stderr


def test_policy_and_all_it_imports_know_no_process_group():
    graph = grimp.build_graph("megascale_omni", cache_dir=None)
    present = [module for module in POLICY_MODULES if module in graph.modules]
    assert {"megascale_omni.schedule", "megascale_omni.paging.layout"} <= set(present)
    wrong = []
    for policy in present:
        for module in sorted({policy} | graph.find_upstream_modules(policy)):
            file = source_of(module)
            assert file is not None, f"{module} has no source"
            wrong += [f"{policy}: {file.name}:{line}" for line in uses_of_torch_distributed(file.read_text())]
    assert not wrong


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import torch\nimport torch.distributed as dist\n", [2]),
        ("from torch import distributed\n", [1]),
        ("from torch.distributed import all_reduce\n", [1]),
        ("import torch\nx = torch.distributed.get_rank()\n", [2]),
        ("import torch\nfrom torch import nn\nx = torch.distributions\n", []),
    ],
)
def test_every_way_to_torch_distributed_is_seen(code, lines):
    assert list(uses_of_torch_distributed(code)) == lines
