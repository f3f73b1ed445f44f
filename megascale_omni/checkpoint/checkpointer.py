"""Saves and loads the state of a run: whole, in increments, beside training, on all of its ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megascale_omni.checkpoint import pages
from megascale_omni.checkpoint.dense import DENSE_KEY
from megascale_omni.checkpoint.filesystem import FileSystem, LocalFileSystem
from megascale_omni.checkpoint.manifest import FileRecord
from megascale_omni.checkpoint.opening import Opened, load_state, open_newest
from megascale_omni.checkpoint.pages import ExpertsPiece
from megascale_omni.checkpoint.request import DENSE_MPU, EXPERTS_MPU, RankState, SaveError, SaveRequest, mpu_folder
from megascale_omni.checkpoint.snapshot import Snapshot
from megascale_omni.checkpoint.store import Found, Store
from megascale_omni.checkpoint.writing import (
    Base,
    Part,
    Pending,
    RankFiles,
    WriterThread,
    as_seen_later,
    at_once,
    binding_of,
    commit,
    needs_of,
    plan_files,
)
from megascale_omni.ranks import Ranks, SingleRank, described, first_of

__all__ = ["Checkpointer", "Opened", "RankState", "SaveError", "SaveRequest", "writes_announced"]

logger = logging.getLogger(__name__)


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
        self._writer = WriterThread(cpus)
        self._pending: Pending | None = None
        self._base: Base | None = None
        self._mark = object()
        """In page tables whose ``changed`` is since this object's last save or load."""
        self.last_stall_seconds = 0.0
        self.last_staged_bytes = 0

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, state: RankState, request: SaveRequest) -> Path:
        """Writes a checkpoint and returns its folder when it is whole and on disk.

        Raises:
            SaveError: on every rank alike; what was there before is still there, and no draft is left.
        """
        self.finish()
        self._pending = self._begin(state, request, beside=False)
        error = self.finish()
        if error is not None:
            raise SaveError(error)
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
    def has_base(self) -> bool:
        """Whether this rank knows a checkpoint that the next one may be an increment on."""
        return self._base is not None

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None

    def poll(self) -> str | None:
        """To be called between steps: a save goes on where no rank must wait for it; what went wrong, or None."""
        pending = self._pending
        if pending is None or not self.ranks.all(pending.current.done()):
            return None
        if pending.settled is None:
            self._settle(pending)
            return None
        return self._end(pending)

    def finish(self) -> str | None:
        """Waits for the save under way; what went wrong, or None. No exception: training goes on without it."""
        pending = self._pending
        if pending is None:
            return None
        if pending.settled is None:
            self._settle(pending)
        return self._end(pending)

    def close(self) -> None:
        """Gives up what is under way and ends the writer. Not a collective."""
        pending, self._pending = self._pending, None
        self._writer.close()
        if pending is not None and pending.snapshot is not None:
            pending.snapshot.end()
        self.store.release()

    def _begin(self, state: RankState, request: SaveRequest, *, beside: bool) -> Pending:
        draft, base = self._draft(request, state.experts)
        self._mark_tables(state.experts)
        snapshot = Snapshot(limit_bytes=self.staging_bytes) if beside else None
        submit = self._writer.submit if beside else at_once
        files = RankFiles()
        try:
            files = plan_files(self.store, draft, state, request, rank=self.ranks.rank, base=base, snapshot=snapshot)
        except Exception as error:  # told when the others are asked for their files
            written: Future[list[FileRecord]] = Future()
            written.set_exception(error)
            if snapshot is not None:
                snapshot.end()
        else:
            written = submit(lambda: files.write(snapshot))
        return Pending(request, draft, written, files, state.experts, base, submit, snapshot)

    def _draft(self, request: SaveRequest, experts: Sequence[ExpertsPiece]) -> tuple[Path, Base | None]:
        """Makes the draft; with it the base that all ranks have, where the checkpoint may be an increment."""
        draft, error, base = self.store.draft_of(request.tag), None, None
        try:
            if self.ranks.rank == 0:
                self.store.draft(request.tag, [mpu_folder(DENSE_MPU), mpu_folder(EXPERTS_MPU)])
            base = None if request.full else self._base_for(request.tag, experts)
        except (OSError, ValueError) as failed:
            error = described(failed)
            self.store.release()
        known = None if base is None else base.found.checksum
        answers = self.ranks.gather((error, known))
        problem = first_of([error for error, _ in answers])
        if problem is not None:
            raise SaveError(self._sentence(request, problem))
        bases = {known for _, known in answers}
        return draft, base if len(bases) == 1 else None

    def _base_for(self, tag: str, experts: Sequence[ExpertsPiece]) -> Base | None:
        """What this rank knows of a checkpoint that the one of ``tag`` may be an increment on."""
        base = self._base
        if base is None or tag in (base.found.manifest.tag, *base.found.manifest.needs):
            return None  # it takes the place of what it would refer to
        if any(piece.experts.manager.table.changed_since is not self._mark for piece in experts):
            return None  # another folder's save or load came after it
        if self.ranks.rank == 0 and not self.store.holds(base.found):
            logger.warning(
                "%s no longer has what this run saved or loaded there: %s is saved whole", self.store.root, tag
            )
            return None
        return base

    def _mark_tables(self, experts: Iterable[ExpertsPiece]) -> None:
        for piece in experts:
            piece.experts.manager.table.changed_since = self._mark

    def _sentence(self, request: SaveRequest, problem: str) -> str:
        return f"the checkpoint {self.store.root / request.tag} could not be written: {problem}"

    def _settle(self, pending: Pending) -> None:
        """Waits for all ranks' files, and lets rank 0 make the draft count, or remove it."""
        part = Part([], binding_of(self.ranks.rank, pending.request, pending.experts), {})
        error: str | None = None
        try:
            part.records.extend(pending.written.result())
            part.needs.update({} if pending.base is None else needs_of(pending.files.pages, pending.base.found))
        except Exception as failed:
            error = described(failed)
        if pending.snapshot is not None:
            self.last_stall_seconds = pending.snapshot.stall_seconds
            self.last_staged_bytes = pending.snapshot.peak_staged_bytes
        answers = self.ranks.gather((error, part))
        pending.problem = first_of([error for error, _ in answers])
        store, request, draft = self.store, pending.request, pending.draft
        if self.ranks.rank != 0:
            pending.settled = at_once(lambda: None)
        elif pending.problem is not None:
            pending.settled = pending.submit(lambda: store.discard_draft(draft))
        else:
            parts = [part for _, part in answers]
            pending.settled = pending.submit(lambda: commit(store, request, draft, parts))

    def _end(self, pending: Pending) -> str | None:
        """Waits for rank 0; what went wrong with the save anywhere."""
        self._pending = None
        assert pending.settled is not None
        found, error = None, None
        try:
            found = pending.settled.result()
        except Exception as failed:
            error = described(failed)
        self.store.release()
        error, found = self.ranks.gather((error, found))[0]
        problem = pending.problem or (None if error is None else f"{error} (rank 0)")
        if problem is not None:
            pages.mark_saved(pending.experts, changed=True)
            self._base = None
            return self._sentence(pending.request, problem)
        assert found is not None
        self._base = Base(found, as_seen_later(pending.files.pages, found.manifest.tag))
        return None

    # -- loading -------------------------------------------------------------------------------------------------------

    def open(self, tag: str | None = None) -> Opened | None:
        """See :func:`megascale_omni.checkpoint.opening.open_newest`."""
        return open_newest(self.store.root, self.ranks, tag=tag)

    def load(
        self, opened: Opened, state: RankState, *, with_optimizer: bool = True, ignored: Sequence[str] = ()
    ) -> None:
        """See :func:`megascale_omni.checkpoint.opening.load_state`. A save under way is waited for.

        The next checkpoint may be an increment on one that was loaded whole from this folder: see [Note: what is not
        stored].
        """
        problem = self.finish()  # it is of the state that this would replace
        if problem is not None and self.ranks.rank == 0:
            logger.error("%s", problem)
        self._base = None
        self._mark_tables(state.experts)
        load_state(opened, state, self.ranks, with_optimizer=with_optimizer, ignored=ignored)
        tag = opened.manifest.tag
        if with_optimizer and opened.folder == self.store.root / tag:
            mine = {piece.at(name) for piece in state.experts for name in piece.share.owned(piece.experts)}
            stored = {page.at: page for pages in opened.pages.pages.values() for page in pages if page.at in mine}
            self._base = Base(Found(opened.folder, opened.manifest, opened.checksum), as_seen_later(stored, tag))


@contextmanager
def writes_announced(checkpointer: Checkpointer, experts: Iterable[ExpertsPiece]) -> Iterator[Checkpointer]:
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
