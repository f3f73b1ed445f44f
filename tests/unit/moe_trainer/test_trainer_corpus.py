"""Reading, splitting and drawing from a corpus."""

import random
from pathlib import Path

import numpy as np
import pytest

from scripts import build_corpus
from scripts.moe_trainer.corpus import (
    Samples,
    ShuffledOrder,
    micro_batch_positions,
    parse_split,
    read_corpus,
    split_corpus,
)
from scripts.moe_trainer.errors import UsageError


class TestReading:
    def test_a_file_is_its_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        path.write_bytes(b"ab\xc3\xa4\n")
        assert bytes(read_corpus(path).tokens) == b"ab\xc3\xa4\n"

    def test_a_folder_is_its_text_files_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        for name, content in {
            "b/x": b"3",
            "a": b"1",
            "b.txt": b"2",
            "empty": b"",
            "binary": b"a\0b",
            ".hidden": b"h",
        }.items():
            (tmp_path / name).write_bytes(content)
        corpus = read_corpus(tmp_path)
        assert bytes(corpus.tokens) == b"\0".join([b"1", b"3", b"2"])  # as paths are sorted: folder b before b.txt
        assert corpus.files == 3

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda path: None, "cannot be read: No such file"),
            (lambda path: path.write_bytes(b""), "is empty"),
            (lambda path: path.write_bytes(random.Random(1).randbytes(4096)), r"is not text: 1\d % of its first 4096"),
            (lambda path: path.write_text("UTF-16 has a zero for every letter", encoding="utf-16"), "is not text: 4"),
            (lambda path: path.mkdir(), "holds no text"),
        ],
        ids=["missing", "empty", "random bytes", "UTF-16", "folder without text"],
    )
    def test_nothing_to_read_is_one_clear_error(self, tmp_path: Path, make, message: str) -> None:
        make(tmp_path / "corpus")
        with pytest.raises(UsageError, match=message):
            read_corpus(tmp_path / "corpus")

    def test_a_file_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "corpus"
        path.write_bytes(b"text")

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(np, "memmap", refuse)
        with pytest.raises(UsageError, match=r"corpus cannot be read: Permission denied"):
            read_corpus(path)


class TestSplit:
    @pytest.mark.parametrize(
        ("text", "fractions"),
        [("90,10", (0.9, 0.1)), ("969,30,1", (0.969, 0.03)), ("1", (1.0, 0.0)), ("1,1", (0.5, 0.5))],
    )
    def test_weights(self, text: str, fractions: tuple[float, float]) -> None:
        assert parse_split(text) == pytest.approx(fractions)

    @pytest.mark.parametrize("text", ["", "a,b", "0,1", "-1,2", "1,2,3,4", "nan,1", "1,-1"])
    def test_bad_weights(self, text: str) -> None:
        with pytest.raises(UsageError, match="--split"):
            parse_split(text)

    def test_ranges_are_contiguous_and_disjoint(self, tmp_path: Path) -> None:
        path = tmp_path / "corpus"
        path.write_bytes(bytes(range(101, 201)))
        train, valid = split_corpus(read_corpus(path), "80,20", sequence_length=4, validate=True)
        assert valid is not None
        assert train.windows([0]).tolist() == [[101, 102, 103, 104, 105]]
        assert train.windows([len(train) - 1]).max() == 177
        assert valid.windows([0]).tolist() == [[181, 182, 183, 184, 185]]
        assert (len(train), len(valid)) == (19, 4)

    @pytest.mark.parametrize(("length", "validate", "name"), [(90, False, "training"), (12, True, "validation")])
    def test_too_short(self, tmp_path: Path, length: int, validate: bool, name: str) -> None:
        path = tmp_path / "corpus"
        path.write_bytes(b"x" * 100)
        with pytest.raises(UsageError, match=rf"too short: its {name} range .* one sample needs {length + 1}"):
            split_corpus(read_corpus(path), "90,10", sequence_length=length, validate=validate)

    def test_validation_may_be_short_where_none_is_wanted(self, tmp_path: Path) -> None:
        path = tmp_path / "corpus"
        path.write_bytes(b"x" * 100)
        _, valid = split_corpus(read_corpus(path), "100", sequence_length=12, validate=False)
        assert valid is None


class TestOrder:
    def test_each_epoch_draws_every_window_once_and_differently(self) -> None:
        order = ShuffledOrder(50, seed=7)
        epochs = [[order[epoch * 50 + index] for index in range(50)] for epoch in range(3)]
        assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    def test_depends_on_seed_and_position_alone(self) -> None:
        straight = [ShuffledOrder(10, seed=3)[position] for position in range(40)]
        reused = ShuffledOrder(10, seed=3)
        assert [reused[position] for position in reversed(range(40))] == straight[::-1]
        assert [ShuffledOrder(10, seed=4)[position] for position in range(40)] != straight

    @pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, 8), (1, 2), (2, 2), (4, 2), (4, 1)])
    def test_a_step_takes_the_same_samples_on_any_number_of_ranks(self, ranks: int, micro_batch_size: int) -> None:
        micro_batches = 8 // (ranks * micro_batch_size)
        positions = [
            position
            for micro_batch in range(micro_batches)
            for rank in range(ranks)
            for position in micro_batch_positions(
                consumed=16,
                micro_batch=micro_batch,
                micro_batch_size=micro_batch_size,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
            )
        ]
        assert positions == list(range(16, 24))

    def test_windows_overlap_by_the_token_to_predict(self) -> None:
        samples = Samples(np.arange(10, dtype=np.uint8), 3)
        assert samples.windows([0, 2]).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


class TestBuildCorpus:
    @pytest.fixture
    def library(self, tmp_path: Path) -> Path:
        library = tmp_path / "library"
        for name, content in {
            "b.py": "b = 1\n",
            "a/c.py": "c = 1\n",
            "test/t.py": "no",
            "site-packages/p.py": "no",
            "empty.py": "\n",
            "notes.txt": "no",
        }.items():
            path = library / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return library

    def test_sources_in_the_order_of_their_names(self, library: Path, tmp_path: Path) -> None:
        output = tmp_path / "new" / "corpus.txt"
        assert build_corpus.build(output, library=library, max_bytes=1000) == (2, 13)
        assert output.read_bytes() == b"c = 1\n\0b = 1\n"
        assert list(output.parent.iterdir()) == [output]

    def test_cap(self, library: Path, tmp_path: Path) -> None:
        output = tmp_path / "corpus.txt"
        build_corpus.build(output, library=library, max_bytes=8)
        assert output.read_bytes() == b"c = 1\n\0b"

    def test_no_sources(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert build_corpus.main([str(tmp_path / "c"), "--library", str(tmp_path)]) == 1
        assert "no Python sources" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_the_standard_library_gives_the_same_bytes_twice(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            assert build_corpus.main([str(tmp_path / name), "--max-bytes", "300000"]) == 0
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
        assert (tmp_path / "one").stat().st_size == 300000
