"""`megascale clip`: what a run wrote down, read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megascale_omni import cli
from megascale_omni.clipping.record import read_clip_record


def step(iteration: int, *, bad: bool = False) -> dict[str, Any]:
    mpus = {
        "encoder": {"norm": "nan" if bad else 10.0 ** (iteration % 3), "gvc": 2.0, "threshold": 1.5, "clip_ratio": 0.5},
        "generator": {"norm": 0.5, "gvc": 1.3, "threshold": None if iteration < 3 else 1.2, "clip_ratio": 1.0},
    }
    where = "encoder (rank 0: encoder.weight)" if bad else None
    clip = {"alpha": None if iteration < 3 else 0.35, "stage": "x", "skipped_steps": int(bad), "non_finite": where}
    return {"event": "step", "iteration": iteration, "loss": 1.0 / iteration, "clip": {**clip, "mpus": mpus}}


def write(path: Path, records: list[dict[str, Any]], end: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in [{"event": "start"}, *records]) + end)
    return path


def test_the_record_of_a_run_that_was_killed_and_went_on(tmp_path):
    steps = [step(1), step(2), step(3), step(2), step(3), step(4, bad=True)]
    record = read_clip_record(write(tmp_path / "run.jsonl", steps, end='{"event": "st'))
    assert record.steps == (1, 2, 3, 4)
    assert record.non_finite == ((4, "encoder (rank 0: encoder.weight)"),)
    assert record.skipped_steps == 1
    encoder, generator = record.modules
    assert encoder.norms[:3] == (10.0, 100.0, 1.0)
    assert math.isnan(encoder.norms[3])
    assert encoder.log_spread == pytest.approx((2 / 3) ** 0.5)
    assert (encoder.clipped_share, generator.clipped_share) == (1.0, 0.0)
    assert [math.isnan(t) for t in generator.thresholds] == [True, True, False, False]


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path, capsys):
    write(tmp_path / "run.jsonl", [step(i, bad=i == 4) for i in range(1, 9)])
    picture = tmp_path / "clip.png"
    assert cli.main(["clip", str(tmp_path), "--png", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "steps 1 to 8, alpha 0.3500" in text
    assert "encoder" in text
    assert "step 4 left out: encoder (rank 0: encoder.weight)" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_whose_last_step_was_left_out_has_an_alpha(tmp_path, capsys):
    last = step(9, bad=True)
    last["clip"]["alpha"] = None
    write(tmp_path / "run.jsonl", [*(step(i) for i in range(1, 9)), last])
    assert cli.main(["clip", str(tmp_path)]) == 0
    assert "steps 1 to 9, alpha 0.3500, 1 steps left out" in capsys.readouterr().out


def test_modules_that_a_restart_has_changed_are_all_shown(tmp_path, capsys):
    late = [step(i) for i in (3, 4)]
    for line in late:
        line["clip"]["mpus"] = {"decoder": line["clip"]["mpus"]["encoder"]}
    record = read_clip_record(write(tmp_path / "run.jsonl", [step(1), step(2), *late]))
    assert [module.name for module in record.modules] == ["encoder", "generator", "decoder"]
    encoder, _, decoder = record.modules
    assert [math.isnan(norm) for norm in encoder.norms] == [False, False, True, True]
    assert (encoder.clipped_share, decoder.clipped_share) == (1.0, 1.0)
    assert cli.main(["clip", str(tmp_path), "--png", str(tmp_path / "clip.png")]) == 0
    assert "decoder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ('{"event": "step", "iteration": 1, "loss": 1.0}\n', "no step with clipping by module; train with"),
        ('nonsense\n{"event": "end"}\n', "line 1 is not JSON"),
    ],
)
def test_what_is_no_record_is_said(tmp_path, capsys, content, message):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    assert cli.main(["clip", str(path)]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_must_hold_one_run(tmp_path):
    with pytest.raises(ValueError, match=r"holds not one file of JSON lines \(none\)"):
        read_clip_record(tmp_path)
