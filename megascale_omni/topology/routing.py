"""Routing to plan and simulate with: made up, or recorded by a run (``--megascale-routing DIR``).

[Note: routing records]
Each rank appends to a file of its own, one record a module and forward: a header of five little-endian integers
(magic, layer, step, tokens, experts) and the map's bits, packed row by row. A file that ends in the middle of a record,
as that of a killed process may, is read up to there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

_RECORDS = "routing-*.bin"
_HEADER = struct.Struct("<4sIIII")
_MAGIC = b"MSR1"
Synthetic = Literal["uniform", "zipf", "clusters"]
CLUSTERS = 4
LEAK = 0.1
"""Share of a token's choices that its cluster does not decide, in clustered routing."""
_CLUSTER_SEED = 12345
_ZIPF = 1.1


@dataclass(frozen=True)
class Choices:
    """What a rank's tokens chose, as pairs: ``token_N[i]`` chose ``expert_N[i]``, by token, then expert."""

    tokens: int
    token_N: np.ndarray
    expert_N: np.ndarray

    @classmethod
    def of_map(cls, map_TE: np.ndarray) -> Choices:
        """From a bool matrix."""
        token_N, expert_N = np.nonzero(map_TE)
        return cls(len(map_TE), token_N, expert_N)

    def as_map(self, experts: int) -> np.ndarray:
        """``[T, E]`` bool."""
        result = np.zeros((self.tokens, experts), dtype=bool)
        result[self.token_N, self.expert_N] = True
        return result


def clusters_of(experts: int) -> np.ndarray:
    """``[E]``: the cluster of each expert in clustered routing; members of one are scattered over the numbers."""
    cluster_E = np.empty(experts, dtype=np.int64)
    cluster_E[np.random.default_rng(_CLUSTER_SEED).permutation(experts)] = np.arange(experts) % CLUSTERS
    return cluster_E


def synthetic(kind: Synthetic, *, tokens: int, experts: int, topk: int, seed: int) -> np.ndarray:
    """``[T, E]`` bool, ``topk`` different experts a token.

    ``uniform``: any, alike. ``zipf``: the expert of rank ``r`` weighs ``1 / r^1.1``. ``clusters``: a token belongs to
    one of four clusters and draws each expert from it with probability 1 - ``LEAK``, else from all.
    """
    random = np.random.default_rng(seed)
    scores_TE = random.random((tokens, experts))
    if kind == "clusters":
        own_T = random.integers(CLUSTERS, size=tokens)
        inside_TE = clusters_of(experts)[None, :] == own_T[:, None]
        free_T = random.binomial(topk, LEAK, size=tokens)
        free_TE = _least(random.random((tokens, experts)), free_T)
        return free_TE | _least(np.where(inside_TE & ~free_TE, scores_TE, np.inf), topk - free_T)
    if kind == "zipf":
        # The least of exponentials of rate w is drawn with probability proportional to w, and so on without it.
        scores_TE = -np.log1p(-scores_TE) * np.arange(1, experts + 1) ** _ZIPF
    return _least(scores_TE, np.full(tokens, topk))


def _least(scores_TE: np.ndarray, count_T: np.ndarray) -> np.ndarray:
    """The ``count_T[t]`` columns of least score in each row."""
    order_TE = scores_TE.argsort(1)
    mask = np.zeros(scores_TE.shape, dtype=bool)
    np.put_along_axis(mask, order_TE, np.arange(scores_TE.shape[1])[None, :] < count_T[:, None], 1)
    return mask


@dataclass(frozen=True)
class Recorded:
    """One module's routing on one rank in one forward."""

    layer: int
    step: int
    map_TE: np.ndarray


class RoutingWriter:
    """Writes what a rank's routers choose to ``folder``, anew. Raises ValueError where that cannot be written.

    ``world``: of the job; what ranks beyond it left behind in an earlier one is removed.
    """

    def __init__(self, folder: str | Path, *, rank: int, world: int) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if rank == 0:
                for stale in set(Path(folder).glob(_RECORDS)) - {record_path(folder, r) for r in range(world)}:
                    stale.unlink(missing_ok=True)
            self._file: IO[bytes] = record_path(folder, rank).open("wb")
        except OSError as error:
            raise ValueError(
                f"routing folder {folder} cannot be written: {error.strerror}; give another one"
            ) from error

    def write(self, layer: int, step: int, map_TE: np.ndarray) -> None:
        """One forward of one module."""
        tokens, experts = map_TE.shape
        self._file.write(_HEADER.pack(_MAGIC, layer, step, tokens, experts))
        self._file.write(np.packbits(map_TE, axis=1).tobytes())
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def record_path(folder: str | Path, rank: int) -> Path:
    """Where a rank writes."""
    return Path(folder) / f"routing-{rank:05d}.bin"


def read_record(path: str | Path) -> Iterator[Recorded]:
    """The whole records of a file, in order. Raises ValueError where it is none."""
    with Path(path).open("rb") as file:
        while len(head := file.read(_HEADER.size)) == _HEADER.size:
            magic, layer, step, tokens, experts = _HEADER.unpack(head)
            if magic != _MAGIC:
                raise ValueError(f"{path} is not a record of routing; give a folder that --megascale-routing wrote")
            width = -(-experts // 8)
            body = file.read(tokens * width)
            if len(body) < tokens * width:
                return
            bits = np.frombuffer(body, dtype=np.uint8).reshape(tokens, width)
            yield Recorded(layer, step, np.unpackbits(bits, axis=1, count=experts).astype(bool))


def records_of(folder: str | Path) -> list[Path]:
    """The files of a run, by rank. Raises ValueError where there are none."""
    found = sorted(Path(folder).glob(_RECORDS))
    if not found:
        raise ValueError(f"{folder} has no record of routing; train with --megascale-routing {folder}")
    return found
