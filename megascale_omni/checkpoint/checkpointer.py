"""Saves and loads the state of a run: whole, in increments, beside training, on all of its ranks."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale_omni import __version__
from megascale_omni.checkpoint import datafile, dense, pages, pages_load
from megascale_omni.checkpoint.dense import DENSE_KEY, DenseIndex, TensorPiece
from megascale_omni.checkpoint.filesystem import FileSystem, LocalFileSystem
from megascale_omni.checkpoint.manifest import CheckpointError, FileRecord, Manifest, read_manifest, verify
from megascale_omni.checkpoint.pages import ExpertsPiece, PageAt, StoredPage
from megascale_omni.checkpoint.pages_load import PagesIndex
from megascale_omni.checkpoint.ranks import Ranks, SingleRank, agreed_error
from megascale_omni.checkpoint.snapshot import Snapshot, in_order
from megascale_omni.checkpoint.store import Found, Store, list_checkpoints
from megascale_omni.optimizer.paged_adam import PagedAdam

logger = logging.getLogger(__name__)

DENSE_MPU, EXPERTS_MPU = "dense", "experts"
MSRP_VECTOR_BYTES = 128
"""A device's profile; all zeros as long as nothing has been profiled."""
MOST_PASSED_OVER = 16
"""Broken checkpoints that a load passes over before it gives up."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; what was there before is still there."""


@dataclass(frozen=True)
class RankState:
    """What one rank has of a run's state.

    Attributes:
        tensors: dense tensors, those of the optimizer among them where its state is wanted. experts: modules of paged
            experts. adam: their optimizer, None where they have none.
    """

    tensors: Sequence[TensorPiece]
    experts: Sequence[ExpertsPiece] = ()
    adam: PagedAdam | None = None


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved, beside the state.

    Attributes:
        tag, step: name and step of the checkpoint. values: plain values of the run (rank 0's count). layout: parallel
        sizes. configuration: of the run. full: store unchanged pages too. include_optimizer: the experts' optimizer
        state; without it their weights are caught up first. coordinates: this rank's place, for
        ``resource_binding.json``.
    """

    tag: str
    step: int
    values: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    full: bool = True
    include_optimizer: bool = True
    coordinates: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Pending:
    """A save that is being written."""

    request: SaveRequest
    draft: Path
    sequence: int
    written: Future[list[FileRecord]]
    pages: dict[PageAt, StoredPage]
    experts: Sequence[ExpertsPiece]
    needs: dict[str, str]
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class _Base:
    """The last checkpoint that this run saved or loaded: what increments refer to."""

    found: Found
    pages: Mapping[PageAt, StoredPage]


class Checkpointer:
    """The checkpoints of a run in one folder. Unless it says otherwise, every method is a collective of its ranks.

    Args:
        root: the folder. ranks: that save and load together. keep: newest checkpoints that stay (None: all).
        staging_bytes: memory that an asynchronous save may take for copies. cpus: cores its writer is bound to.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        ranks: Ranks | None = None,
        files: FileSystem | None = None,
        keep: int | None = None,
        staging_bytes: int = 64 << 20,
        cpus: Iterable[int] | None = None,
    ) -> None:
        self.ranks = ranks or SingleRank()
        self.store = Store(Path(root), files=files or LocalFileSystem(), keep=keep)
        self.staging_bytes = staging_bytes
        self._cpus = None if cpus is None else frozenset(cpus)
        self._pending: _Pending | None = None
        self._base: _Base | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.last_stall_seconds = 0.0
        self.last_staged_bytes = 0

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, state: RankState, request: SaveRequest) -> Path:
        """Writes a checkpoint and returns its folder when it is whole and on disk.

        Raises:
            SaveError: on every rank alike; what was there before is still there, and no draft is left.
        """
        self.finish()
        pending = self._begin(state, request, beside=False)
        error = self._complete(pending)
        if error is not None:
            raise SaveError(f"the checkpoint {self.store.root / request.tag} could not be written: {error}")
        return self.store.root / request.tag

    def save_beside(self, state: RankState, request: SaveRequest) -> str | None:
        """Starts a checkpoint of the state as it is now. It counts once a later :meth:`poll` or :meth:`finish` says so.

        A save that is still being written is waited for: there is never a second one. Returns what went wrong with it,
        or with this one at its start.
        """
        error = self.finish()
        try:
            self._pending = self._begin(state, request, beside=True)
        except SaveError as failed:
            return error or str(failed)
        return error

    def before_write(self, page_ids: np.ndarray) -> None:
        """For managers: pages are about to change. Not a collective."""
        if self._pending is not None and self._pending.snapshot is not None:
            self._pending.snapshot.before_write(page_ids.tolist())

    def before_step(self) -> None:
        """To be called before dense parameters or their optimizer state change. Not a collective."""
        if self._pending is not None and self._pending.snapshot is not None:
            self._pending.snapshot.before_write([DENSE_KEY])

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None

    def poll(self) -> str | None:
        """To be called between steps: makes a save count that all ranks have written; what went wrong, or None."""
        if self._pending is None:
            return None
        if not self.ranks.all(self._pending.written.done()):
            return None
        return self.finish()

    def finish(self) -> str | None:
        """Waits for the save under way; what went wrong, or None. No exception: training goes on without it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        error = self._complete(pending)
        if error is not None:
            return f"the checkpoint {self.store.root / pending.request.tag} could not be written: {error}"
        return None

    def close(self) -> None:
        """Gives up what is under way and ends the writer. Not a collective."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _begin(self, state: RankState, request: SaveRequest, *, beside: bool) -> _Pending:
        draft, sequence = self._draft(request)
        base = None if request.full or not self._all_have_base() else self._base
        snapshot = Snapshot(limit_bytes=self.staging_bytes) if beside else None
        paged_away = any(piece.experts.manager.pager.can_evict for piece in state.experts)
        register = in_order if snapshot is None else snapshot.register
        error: Exception | None = None
        jobs: list[Callable[[], FileRecord]] = []
        stored: dict[PageAt, StoredPage] = {}
        written: list[FileRecord] = []
        rank = self.ranks.rank
        try:
            path = f"mpu_001_{DENSE_MPU}_state/{rank:05d}.safetensors"
            entries, index = dense.plan(state.tensors, path=path, register=register)
            jobs += self._jobs(draft, path, entries, index, snapshot)
            if state.experts:
                path = f"mpu_002_{EXPERTS_MPU}_state/{rank:05d}.safetensors"
                plan = pages.plan(
                    state.experts,
                    state.adam if request.include_optimizer else None,
                    path=path,
                    register=in_order if paged_away else register,
                    base=None if base is None else base.pages,
                )
                stored = plan.pages
                of_pages = self._jobs(draft, path, plan.entries, plan.index, None if paged_away else snapshot)
                if paged_away:  # their bytes move: another thread could not read them
                    written += [job() for job in of_pages]
                else:
                    jobs += of_pages
            pages.mark_saved(state.experts)
        except Exception as failed:
            error = failed
        future: Future[list[FileRecord]] = Future()
        if error is not None:
            future.set_exception(error)
        elif beside:
            future = self._writer().submit(_run, jobs, written, snapshot)
        else:
            _set(future, lambda: _run(jobs, written, None))
        needs = {} if base is None else _needs(stored, base.found)
        return _Pending(request, draft, sequence, future, stored, state.experts, needs, snapshot)

    def _draft(self, request: SaveRequest) -> tuple[Path, int]:
        made: tuple[Path, int] | None = None
        error: Exception | None = None
        if self.ranks.rank == 0:
            folders = [f"mpu_001_{DENSE_MPU}_state", f"mpu_002_{EXPERTS_MPU}_state"]
            try:
                made = self.store.draft(request.tag, folders)
            except (OSError, ValueError) as failed:
                error = failed
        problem = agreed_error(self.ranks, error)
        if problem is not None:
            raise SaveError(f"the checkpoint {self.store.root / request.tag} could not be written: {problem}")
        result = self.ranks.gather(made)[0]
        assert result is not None
        return result

    def _all_have_base(self) -> bool:
        found = self.ranks.gather(None if self._base is None else self._base.found.checksum)
        return found[0] is not None and len(set(found)) == 1

    def _jobs(
        self, draft: Path, path: str, entries: Sequence[datafile.Entry], index: bytes, snapshot: Snapshot | None
    ) -> list[Callable[[], FileRecord]]:
        """What writes a data file and its index."""
        store, release = self.store, (lambda: None) if snapshot is None else snapshot.release
        name = path.removesuffix(".safetensors") + ".json"

        def data() -> FileRecord:
            return datafile.write(store.files, draft, path, entries, digest_name=store.digest, release=release)

        return [data, lambda: store.write(draft, name, index)]

    def _writer(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="megascale-checkpoint", initializer=self._bind)
        return self._thread

    def _bind(self) -> None:
        if self._cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cpus)  # of this thread alone

    def _complete(self, pending: _Pending) -> str | None:
        """Waits for all ranks' files and makes the draft count; what went wrong on any rank. A collective."""
        records: list[FileRecord] = []
        error: Exception | None = None
        try:
            records = pending.written.result()
        except Exception as failed:
            error = failed
        if pending.snapshot is not None:
            self.last_stall_seconds = pending.snapshot.stall_seconds
            self.last_staged_bytes = pending.snapshot.peak_staged_bytes
        problem = agreed_error(self.ranks, error)
        parts = self.ranks.gather((records, _binding(self.ranks.rank, pending), pending.needs))
        found: Found | None = None
        error = None
        if problem is None and self.ranks.rank == 0:
            try:
                found = self._commit(pending, parts)
            except Exception as failed:
                error = failed
        problem = problem or agreed_error(self.ranks, error)
        if problem is not None:
            if self.ranks.rank == 0:
                self.store.discard_draft(pending.draft)
            pages.mark_saved(pending.experts, changed=True)
            self._base = None
            return problem
        found = self.ranks.gather(found)[0]
        assert found is not None
        self._base = _Base(found, _as_seen_later(pending.pages, found.manifest.tag))
        return None

    def _commit(self, pending: _Pending, parts: Sequence[tuple[list[FileRecord], Any, dict[str, str]]]) -> Found:
        request, draft = pending.request, pending.draft
        files = [record for records, _, _ in parts for record in records]
        binding = {"ranks": [binding for _, binding, _ in parts]}
        files.append(self.store.write(draft, "resource_binding.json", json.dumps(binding, indent=1).encode()))
        files.append(self.store.write(draft, "msrp_snapshot.bin", bytes(MSRP_VECTOR_BYTES)))
        needs = {tag: checksum for _, _, part in parts for tag, checksum in part.items()}
        manifest = Manifest(
            tag=request.tag,
            step=request.step,
            sequence=pending.sequence,
            kind="increment" if needs else "full",
            files=tuple(sorted(files, key=lambda record: record.path)),
            mpus=(DENSE_MPU, EXPERTS_MPU),
            layout={"world_size": self.ranks.size, **request.layout},
            versions={"megascale": __version__, "torch": torch.__version__, **request.versions},
            configuration=request.configuration,
            values=request.values,
            needs=needs,
        )
        found = self.store.commit(draft, manifest)
        try:
            self.store.tidy(request.tag)
        except OSError as error:  # the checkpoint is there all the same
            logger.warning("checkpoint %s is whole, but older ones could not be removed: %s", found.folder, error)
        return found

    # -- loading -------------------------------------------------------------------------------------------------------

    def open(self, tag: str | None = None) -> Opened | None:
        """The newest whole checkpoint, or the one named ``tag``, checked to the last byte; None where there is none.

        Newer ones that are damaged are passed over, with an error in the log that names every file.

        Raises:
            CheckpointError: the one that was asked for is damaged, or every one that there is; the same on all ranks.
            ValueError: there is none of that tag.
        """
        root = self.store.root
        names: list[str] = []
        problems: list[str] = []
        if self.ranks.rank == 0:
            found, broken = list_checkpoints(root)
            names = [f.folder.name for f in found if tag is None or f.manifest.tag == tag]
            problems = [str(error) for error in broken if tag is None or error.folder.name == tag]
        names, problems = self.ranks.gather((names, problems))[0]
        for problem in problems if self.ranks.rank == 0 else ():
            logger.error("passed over: %s", problem)
        for name in names[:MOST_PASSED_OVER]:
            wrong = self._check(root / name)
            if not wrong:
                return Opened.read(root / name)
            text = f"checkpoint {root / name}: {'; '.join(wrong)}"
            problems.append(text)
            if self.ranks.rank == 0 and tag is None:
                logger.error("passed over: %s", text)
        if problems:
            raise CheckpointError(root, problems)
        if tag is not None:
            raise ValueError(f"{root} has no checkpoint {tag}")
        return None

    def _check(self, folder: Path) -> list[str]:
        try:
            wrong = verify(folder, share=(self.ranks.rank, self.ranks.size))
        except CheckpointError as error:
            wrong = error.problems
        except (OSError, ValueError) as error:
            wrong = [str(error)]
        return list(dict.fromkeys(line for lines in self.ranks.gather(wrong) for line in lines))

    def load(
        self, opened: Opened, state: RankState, *, with_optimizer: bool = True, ignored: Sequence[str] = ()
    ) -> None:
        """Fills the state of every rank.

        ``with_optimizer``: the experts' optimizer state too; without it their masters are made from the weights.
        A stored tensor that no rank asks for is an error, unless its name begins with one of ``ignored``.

        Raises:
            ValueError: the checkpoint does not fit; the same on all ranks, and nothing has been loaded.
        """
        with_state = with_optimizer and state.adam is not None
        wrong = opened.dense.problems(state.tensors) + opened.pages.problems(state.experts, with_state=with_state)
        asked = {piece.name for piece in state.tensors}, {piece.path for piece in state.experts}
        gathered = self.ranks.gather((wrong[:5], asked))
        problems = list(dict.fromkeys(line for lines, _ in gathered for line in lines))
        names = set().union(*(tensors for _, (tensors, _) in gathered))
        paths = set().union(*(modules for _, (_, modules) in gathered))
        left = sorted(set(opened.dense.tensors) - names) + sorted(set(opened.pages.modules) - paths)
        left = [name for name in left if not name.startswith(tuple(ignored))]
        problems += [f"has {name}, which matches nothing in this run" for name in left[:5]]
        if problems:
            raise ValueError(f"checkpoint {opened.folder} {'; '.join(problems)}")
        opened.dense.load(state.tensors)
        pages_load.load_pages(opened.pages, state.experts, state.adam, with_state=with_state)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was checked: its manifest and indices."""

    folder: Path
    manifest: Manifest
    dense: DenseIndex
    pages: PagesIndex

    @classmethod
    def read(cls, folder: Path) -> Opened:
        """Reads manifest and indices. Raises CheckpointError or ValueError where they cannot be read."""
        manifest, _ = read_manifest(folder)

        def indices(mpu: int, name: str) -> list[bytes]:
            prefix = f"mpu_{mpu:03d}_{name}_state/"
            paths = [r.path for r in manifest.files if r.path.startswith(prefix) and r.path.endswith(".json")]
            return [(folder / path).read_bytes() for path in paths]

        return cls(
            folder,
            manifest,
            DenseIndex(folder, indices(1, DENSE_MPU)),
            PagesIndex.read(folder, indices(2, EXPERTS_MPU)),
        )


def _run(
    jobs: Sequence[Callable[[], FileRecord]], written: Sequence[FileRecord], snapshot: Snapshot | None
) -> list[FileRecord]:
    try:
        return [*written, *(job() for job in jobs)]
    finally:
        if snapshot is not None:
            snapshot.end()


def _set(future: Future[list[FileRecord]], work: Callable[[], list[FileRecord]]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def _needs(stored: Mapping[PageAt, StoredPage], base: Found) -> dict[str, str]:
    """Checkpoints that pages refer to: the base, or what that refers to."""
    tags = {place.tag for page in stored.values() for place in page.planes.values() if place.tag}
    known = {**base.manifest.needs, base.manifest.tag: base.checksum}
    return {tag: known[tag] for tag in sorted(tags)}


def _as_seen_later(stored: Mapping[PageAt, StoredPage], tag: str) -> dict[PageAt, StoredPage]:
    """Pages with the places that the next checkpoint refers to."""
    return {
        at: StoredPage(
            at,
            page.stop,
            page.last_step,
            {
                label: place if place.tag else datafile.Place(tag, place.path, place.begin, place.end, place.dtype)
                for label, place in page.planes.items()
            },
        )
        for at, page in stored.items()
    }


def _binding(rank: int, pending: _Pending) -> dict[str, object]:
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "device": str(pending.experts[0].experts.manager.arena.device) if pending.experts else "cpu",
        "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "coordinates": dict(pending.request.coordinates),
        "experts": {p.path: p.numbers_here for p in pending.experts},
    }


@contextmanager
def writes_announced(checkpointer: Checkpointer, experts: Iterable[ExpertsPiece]) -> Any:  # noqa: ANN401 - a context
    """While it is open, the pages' managers tell the checkpointer before they change a page."""
    managers = {piece.experts.manager for piece in experts}
    before = {manager: manager.before_write for manager in managers}
    for manager in managers:
        manager.before_write = checkpointer.before_write
    try:
        yield checkpointer
    finally:
        for manager, hook in before.items():
            manager.before_write = hook
