"""The demonstration of clipping by module, small: what it claims of itself holds."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("sklearn", reason="needs the extra `dev`")


def test_the_demonstration_compares_all_methods_from_the_same_start(tmp_path, capsys):
    from scripts.cmsa_demo.clippers import METHODS
    from scripts.cmsa_demo.main import main

    assert main(["--seeds", "1", "--steps", "45", "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "cmsa.json").read_text())
    assert (tmp_path / "cmsa.png").read_bytes().startswith(b"\x89PNG")
    assert list(found["methods"]) == list(METHODS)
    assert all(f"| {method} |" in text for method in METHODS)
    first = {run["method"]: run["losses"][0] for run in found["runs"]}
    assert len(set(first.values())) == 1, "the same weights and batches"
    for run in found["runs"]:
        assert run["losses"][-1] < 0.5 * run["losses"][0], run["method"]
    assert found["methods"]["global"]["ratio_at_start"] == pytest.approx(1e4, rel=0.9)
    assert found["methods"]["CMSA, alpha 0.35"]["spread"] < 0.5 * found["methods"]["global"]["spread"]
