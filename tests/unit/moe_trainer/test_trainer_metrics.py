"""What a run writes down."""

import io
import json
from pathlib import Path

import pytest

from scripts.moe_trainer import metrics
from scripts.moe_trainer.metrics import JsonLines, Metrics, PlainLines, ProgressBar, TensorBoard, describe

STEP = {
    "event": "step",
    "iteration": 3,
    "loss": 2.5,
    "grad_norm": 1.25,
    "num_zeros": None,
    "lr": 1e-4,
    "skipped": False,
    "step_seconds": 0.5,
    "tokens_per_second": 2048.0,
}


class TestJsonLines:
    def test_a_line_that_a_killed_run_did_not_finish_is_gone_when_it_goes_on(self, tmp_path):
        path = tmp_path / "run.jsonl"
        path.write_text('{"event": "step", "iteration": 1}\n{"event": "st')
        lines = JsonLines(path, append=True)
        lines.write({"event": "step", "iteration": 2})
        lines.close()
        assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]

    def test_a_record_is_in_the_file_when_it_is_written(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "metrics.jsonl"
        lines = JsonLines(path)
        lines.write(STEP)
        assert json.loads(path.read_text()) == STEP
        lines.close()

    def test_numbers_that_json_lacks_become_text(self, tmp_path: Path) -> None:
        lines = JsonLines(tmp_path / "m")
        lines.write({"event": "step", "loss": float("nan"), "grad_norm": float("inf")})
        lines.close()
        assert json.loads((tmp_path / "m").read_text()) == {"event": "step", "loss": "nan", "grad_norm": "inf"}

    @pytest.mark.parametrize(("append", "lines"), [(True, 2), (False, 1)])
    def test_a_resumed_run_appends(self, tmp_path: Path, append: bool, lines: int) -> None:
        for again in (False, append):
            sink = JsonLines(tmp_path / "m", append=again)
            sink.write(STEP)
            sink.close()
        assert len((tmp_path / "m").read_text().splitlines()) == lines


class TestPlainLines:
    def test_every_interval_and_the_last(self, capsys: pytest.CaptureFixture[str]) -> None:
        sink = PlainLines(interval=4, last=9)
        for iteration in range(1, 10):
            sink.write({**STEP, "iteration": iteration})
        sink.write({"event": "end", "reason": "train_iters"})
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(" | ")[0] for line in lines] == ["iteration 4/9", "iteration 8/9", "iteration 9/9", "end"]

    def test_a_step_reads_well(self) -> None:
        assert (
            describe(STEP, 9) == "iteration 3/9 | loss 2.500000 | grad_norm 1.25 | lr 0.0001 | 0.500 s | 2,048 tokens/s"
        )
        assert describe({**STEP, "grad_norm": None, "skipped": True}, 9).endswith("tokens/s | skipped")

    def test_other_records_read_well(self) -> None:
        counts = {"pages_loaded": 1234, "bytes_loaded": 9 << 20, "page_faults": 5, "pages_evicted": 7}
        counts |= {"bytes_written": 1 << 20, "stall_microseconds": 1_500_000}
        record = {"event": "end", "peak_rss_bytes": 3 << 20, "paging": counts, "left": None, "of": []}
        assert describe(record, 9) == (
            "end | peak_rss_bytes 3.0 MiB | paging 1,234 pages came (9.0 MiB), 5 of them late, "
            "7 left (1.0 MiB written), 1.5 s waited for pages"
        )
        record = {"event": "validation", "of": ["A", "B"], "seconds": 0.123456789}
        assert describe(record, 9) == "validation | of A + B | seconds 0.123457"

    def test_the_start_says_what_a_user_needs_and_no_more(self) -> None:
        record = {
            "event": "start",
            "argv": ["x"],
            "versions": {"torch": "2"},
            "megascale": True,
            "world": 2,
            "params": 9,
        }
        assert describe({**record, "paging": None, "iteration": 0}, 9) == (
            "start | megascale True | world 2 | params 9 | iteration 0"
        )
        pages = {"layers": 2, "experts": 8, "pages": 16, "state_bytes": 64 << 20, "device_bytes": 16 << 20}
        assert describe({**record, "paging": {**pages, "disk_path": "/d"}}, 9).endswith(
            "paging 8 experts of 2 layers in 16 pages, 64.0 MiB with optimizer state: 16.0 MiB of it in device memory, "
            "the rest in /d"
        )


def test_the_progress_bar_shows_loss_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    shown = io.StringIO()
    monkeypatch.setattr("rich.progress.get_console", lambda: Console(file=shown, force_terminal=True, width=100))
    bar = ProgressBar(first=0, last=4)
    bar.write(STEP)
    bar.write({"event": "validation", "iteration": 3, "loss": 2.0})
    bar.close()
    assert "3/4" in shown.getvalue()
    assert "loss 2.5000 | 2,048 tokens/s" in shown.getvalue()
    assert "validation | iteration 3 | loss 2" in shown.getvalue()


def test_tensorboard_gets_numbers_over_iterations(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(str(tmp_path))
    board.write({"event": "start", "world": 1, "iteration": 0})
    for iteration in (1, 2):
        board.write({**STEP, "iteration": iteration, "loss": float(iteration)})
    board.write({"event": "validation", "iteration": 2, "loss": 7.0})
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(1, 1.0), (2, 2.0)]
    assert [event.value for event in events.Scalars("validation/loss")] == [7.0]
    assert "step/num_zeros" not in events.Tags()["scalars"]


class Sink:
    def __init__(self) -> None:
        self.closed = 0
        self.records: list[object] = []

    def write(self, record: object) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


def test_sinks_are_closed_when_training_fails() -> None:
    sinks = [Sink(), Sink()]
    written = Metrics(list(sinks))
    with pytest.raises(KeyError):
        fail_after_a_record(written)
    written.close()
    assert [(sink.closed, len(sink.records)) for sink in sinks] == [(1, 1), (1, 1)]


def fail_after_a_record(written: Metrics) -> None:
    with written:
        written.write(event="start")
        raise KeyError


def test_resident_memory_is_that_of_this_process() -> None:
    before = metrics.resident_bytes()
    block = bytearray(64 << 20)
    assert metrics.resident_bytes() - before > 48 << 20
    assert metrics.peak_resident_bytes() >= metrics.resident_bytes() - (1 << 20)
    del block
