"""Text as bytes: reading it, splitting it, and drawing samples from it in an order that a resumed run continues.

Shapes: S samples of a micro-batch, L sequence length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import UsageError

VOCABULARY_SIZE = 256
"""One token a byte."""

END_OF_DOCUMENT = 0
"""Stands between the files of a folder; files that contain this byte are not text and are left out."""

_LOOKED_AT = 1 << 16
_MOST_CONTROLS = 0.05
"""Share of control characters from which a file is not taken for text; of random bytes 11 % are."""

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """All tokens of a corpus, in order."""

    tokens: ByteArray
    """[n], a byte each; mapped from disk where the corpus is one file."""

    files: int
    """How many files it was read from."""


def read_corpus(path: str | Path) -> Corpus:
    """Read a file, or every text file of a folder in the order of their names.

    Raises:
        UsageError: nothing there, not readable, or no text.
    """
    path = Path(path)
    try:
        if path.is_dir():
            corpus = _read_folder(path)
        elif path.stat().st_size == 0:
            raise UsageError(f"--data-path {path} is empty")
        else:
            corpus = Corpus(np.memmap(path, dtype=np.uint8, mode="r"), files=1)
            _refuse_binary(path, corpus.tokens[:_LOOKED_AT])
    except OSError as error:
        raise UsageError(f"--data-path {path} cannot be read: {error.strerror or error}") from error
    return corpus


def _refuse_binary(path: Path, start: ByteArray) -> None:
    """Random bytes would train, to no end: a file of tokens or an archive is taken for what it is."""
    strange = (start < ord(" ")) & ~np.isin(start, np.frombuffer(b"\t\n\v\f\r", dtype=np.uint8))
    if strange.mean() > _MOST_CONTROLS:
        raise UsageError(
            f"--data-path {path} is not text: {100 * strange.mean():.0f} % of its first {len(start)} bytes are control "
            "characters; give a text file, or a folder of them (tokens are made here, one a byte)"
        )


def _read_folder(folder: Path) -> Corpus:
    documents: list[bytes] = []
    for file in sorted(item for item in folder.rglob("*") if item.is_file()):
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        content = file.read_bytes()
        if content and END_OF_DOCUMENT not in content:
            documents.append(content)
    if not documents:
        raise UsageError(f"--data-path {folder} holds no text: every file is empty, hidden or binary")
    text = bytes([END_OF_DOCUMENT]).join(documents)
    return Corpus(np.frombuffer(text, dtype=np.uint8), files=len(documents))


def parse_split(text: str) -> tuple[float, float]:
    """Return the fractions for training and validation of `90,10` or `969,30,1` (what follows is kept for testing).

    Raises:
        UsageError: not one to three non-negative numbers, or nothing for training.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--split {text} must be numbers such as 90,10") from error
    if not 1 <= len(weights) <= 3 or any(not weight >= 0 for weight in weights) or not weights[0] > 0:
        raise UsageError(f"--split {text} must be one to three numbers, the first above 0, such as 90,10")
    total = sum(weights)
    return weights[0] / total, (weights[1] / total if len(weights) > 1 else 0.0)


def split_corpus(
    corpus: Corpus, split: str, *, sequence_length: int, validate: bool
) -> tuple["Samples", "Samples | None"]:
    """Cut the corpus into contiguous ranges and return their training and validation samples.

    Raises:
        UsageError: a range that is needed does not hold one sample of `sequence_length` + 1 tokens.
    """
    training, validation = parse_split(split)
    first = round(training * len(corpus.tokens))
    second = round((training + validation) * len(corpus.tokens))
    ranges = {"training": corpus.tokens[:first], "validation": corpus.tokens[first:second]}
    for name, tokens in ranges.items():
        if len(tokens) <= sequence_length and (name == "training" or validate):
            raise UsageError(
                f"the corpus is too short: its {name} range has {len(tokens)} of {len(corpus.tokens)} tokens "
                f"(--split {split}), and one sample needs {sequence_length + 1}. Give more text, a shorter "
                "--seq-length, another --split" + (", or no --eval-interval" if name == "validation" else "")
            )
    return (
        Samples(ranges["training"], sequence_length),
        Samples(ranges["validation"], sequence_length) if validate else None,
    )


class Samples:
    """A range of tokens as overlapping-by-one windows of `sequence_length` + 1."""

    def __init__(self, tokens: ByteArray, sequence_length: int) -> None:
        self._tokens, self._sequence_length = tokens, sequence_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._sequence_length

    def windows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the tokens [S, L + 1] of these windows."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self._sequence_length
        return self._tokens[starts + np.arange(self._sequence_length + 1)].astype(np.int64)


class ShuffledOrder:
    """The order in which training draws windows: a new permutation an epoch, a function of seed and position alone."""

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> int:
        """Return the window of the `position`-th sample of the run."""
        epoch, offset = divmod(position, self._length)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng((self._seed, epoch)).permutation(self._length)
        return int(self._permutation[offset])


def micro_batch_positions(
    *, consumed: int, micro_batch: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> range:
    """Return the run's sample positions of one micro-batch of one rank.

    A step takes the next `global_batch_size` positions whatever the number of ranks: micro-batch after micro-batch, in
    each rank after rank.
    """
    start = consumed + (micro_batch * data_parallel_size + data_parallel_rank) * micro_batch_size
    return range(start, start + micro_batch_size)
