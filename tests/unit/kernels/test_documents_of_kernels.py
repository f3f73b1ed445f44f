"""Every kernel says what it computes, on what, and how it lies in memory; the folder's README names every file."""

import re
from pathlib import Path

from scripts.measurements.kernels import undocumented_kernels

FOLDER = Path(__file__).parents[3] / "triton_kernels"


def test_every_kernel_has_formula_shapes_and_layout():
    assert undocumented_kernels() == []


def test_readme_names_every_file():
    named = set(re.findall(r"^\| `(\w+\.py)` \|", (FOLDER / "README.md").read_text(), flags=re.M))
    assert named == {path.name for path in FOLDER.glob("*.py")}
