"""The writing of one checkpoint: what each rank's thread writes, and how rank 0's makes it count.

[Note: phases of a save]
    WRITE    every rank writes its files into the draft, on a thread of its own; training may go on
    SETTLE   all have: rank 0 writes the manifest and makes the draft count, or removes it if one of them failed
    (over)   all ranks learn how it ended
Ranks go from one phase to the next together, between steps, so that no thread but the trainer's ever communicates.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megascale_omni import __version__
from megascale_omni.checkpoint import datafile, dense, pages
from megascale_omni.checkpoint.configuration import version_of
from megascale_omni.checkpoint.manifest import FileRecord, Manifest
from megascale_omni.checkpoint.pages import ExpertsPiece, PageAt, StoredPage
from megascale_omni.checkpoint.request import DENSE_MPU, EXPERTS_MPU, RankState, SaveRequest, mpu_folder
from megascale_omni.checkpoint.snapshot import Snapshot, in_order
from megascale_omni.checkpoint.store import Found, Store

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Job = Callable[[], FileRecord]

MSRP_VECTOR_BYTES = 128
"""A device's profile; all zeros as long as nothing has been profiled."""


class WriterThread:
    """A thread that does one job after the other. ``cpus``: cores that it is bound to, some of the process's own.

    It has the trainer's priority: it sleeps while the disk writes, and a lower one makes it wait for a core at every
    write, so that the trainer, which in the end waits for it, waits longer than the core would have been taken.
    """

    def __init__(self, cpus: Iterable[int] | None = None) -> None:
        self._cpus = None if cpus is None else frozenset(cpus)
        if self._cpus is not None and hasattr(os, "sched_getaffinity") and not self._cpus & os.sched_getaffinity(0):
            raise ValueError(
                f"checkpoint.cpus: the writer is to run on cores {sorted(self._cpus)}, and this process may run on "
                f"{sorted(os.sched_getaffinity(0))} alone; give some of those (--megascale-checkpoint-cpus)"
            )
        self._thread: ThreadPoolExecutor | None = None

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Does a job later; the future is failed with whatever the job raises."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="megascale-checkpoint", initializer=self._bind)
        return self._thread.submit(job)

    def _bind(self) -> None:
        if self._cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cpus)  # of this thread alone

    def close(self) -> None:
        """Gives up jobs that have not begun, and waits for the one that has."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None


def at_once(job: Callable[[], Result]) -> Future[Result]:
    """Does a job now; as :meth:`WriterThread.submit`."""
    future: Future[Result] = Future()
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
    return future


@dataclass(frozen=True)
class Base:
    """The last checkpoint that this run saved: what increments refer to."""

    found: Found
    pages: Mapping[PageAt, StoredPage]


@dataclass
class RankFiles:
    """The files of one rank: jobs that write them, records of those already written, pages as the jobs stored them."""

    jobs: list[Job] = field(default_factory=list)
    written: list[FileRecord] = field(default_factory=list)
    pages: dict[PageAt, StoredPage] = field(default_factory=dict)

    def write(self, snapshot: Snapshot | None) -> list[FileRecord]:
        """Does the jobs; the snapshot is over then, however they end."""
        try:
            self.written += [job() for job in self.jobs]
            return self.written
        finally:
            if snapshot is not None:
                snapshot.end()


@dataclass
class Pending:
    """A save under way (see [Note: phases of a save]); ``settled`` is None in the first phase."""

    request: SaveRequest
    draft: Path
    written: Future[list[FileRecord]]
    files: RankFiles
    experts: Sequence[ExpertsPiece]
    base: Base | None
    submit: Callable[[Callable[[], Any]], Future[Any]]
    snapshot: Snapshot | None = None
    problem: str | None = None
    settled: Future[Found | None] | None = None

    @property
    def current(self) -> Future[Any]:
        """What is to be waited for."""
        return self.written if self.settled is None else self.settled


def plan_files(
    store: Store,
    draft: Path,
    state: RankState,
    request: SaveRequest,
    *,
    rank: int,
    base: Base | None,
    snapshot: Snapshot | None,
) -> RankFiles:
    """Takes the state as it is now; with a ``snapshot`` the bytes are read later, and copied before they change.

    Pages that move to and from an accelerator are written at once: there only the main thread may copy them.
    """
    files = RankFiles()
    managers = [piece.experts.manager for piece in state.experts]
    on_device = any(manager.pager.can_evict and manager.arena.device.type != "cpu" for manager in managers)
    register = in_order if snapshot is None else snapshot.register
    release = (lambda: None) if snapshot is None else snapshot.release
    path = f"{mpu_folder(DENSE_MPU)}/{rank:05d}.safetensors"
    tensors = dense.TensorsPlan(state.tensors, path=path, register=register)
    files.jobs.append(partial(_write_data, store, draft, tensors, release))
    files.jobs.append(lambda: store.write(draft, _index_of(path), tensors.index()))
    if state.experts:
        plan = pages.plan(
            state.experts,
            state.adam if request.include_optimizer else None,
            path=f"{mpu_folder(EXPERTS_MPU)}/{rank:05d}.safetensors",
            register=in_order if on_device else register,
            base=None if base is None else base.pages,
        )

        def write_index() -> FileRecord:
            files.pages = plan.stored()
            return store.write(draft, _index_of(plan.path), plan.index(files.pages))

        data = partial(_write_data, store, draft, plan, (lambda: None) if on_device else release)
        if on_device:
            files.written += [data(), write_index()]
        else:
            files.jobs += [data, write_index]
    pages.mark_saved(state.experts)
    return files


def _index_of(path: str) -> str:
    return path.removesuffix(".safetensors") + ".json"


def _write_data(
    store: Store, draft: Path, plan: dense.TensorsPlan | pages.PagesPlan, release: Callable[[], None]
) -> FileRecord:
    return datafile.write(
        store.files,
        draft,
        plan.path,
        plan.entries,
        digest_name=store.digest,
        release=release,
        header=plan.header,
    )


@dataclass(frozen=True)
class Part:
    """What rank 0 must know of a rank's share to make a checkpoint count."""

    records: list[FileRecord]
    binding: dict[str, object]
    needs: dict[str, str]


def commit(store: Store, request: SaveRequest, draft: Path, parts: Sequence[Part]) -> Found:
    """Makes a draft count to which all ranks have written their files; removes it where that fails.

    Raises:
        OSError: of the file system.
    """
    try:
        found = _commit(store, request, draft, parts)
    except Exception:
        store.discard_draft(draft)
        raise
    try:
        store.tidy(request.tag)
    except OSError as error:  # the checkpoint is there all the same
        logger.warning("checkpoint %s is whole, but older ones could not be removed: %s", found.folder, error)
    return found


def _commit(store: Store, request: SaveRequest, draft: Path, parts: Sequence[Part]) -> Found:
    files = [record for part in parts for record in part.records]
    binding = {"ranks": [part.binding for part in parts]}
    files.append(store.write(draft, "resource_binding.json", json.dumps(binding, indent=1).encode()))
    files.append(store.write(draft, "msrp_snapshot.bin", bytes(MSRP_VECTOR_BYTES)))
    needs = {tag: checksum for part in parts for tag, checksum in part.needs.items()}
    manifest = Manifest(
        tag=request.tag,
        step=request.step,
        sequence=store.next_sequence(),
        kind="increment" if needs else "full",
        files=tuple(sorted(files, key=lambda record: record.path)),
        mpus=(DENSE_MPU, EXPERTS_MPU),
        layout={"world_size": len(parts), **request.layout},
        versions={
            "megascale": __version__,
            "torch": torch.__version__,
            "configuration": version_of(request.configuration),
            **request.versions,
        },
        configuration=request.configuration,
        values=request.values,
        needs=needs,
    )
    return store.commit(draft, manifest)


def needs_of(stored: Mapping[PageAt, StoredPage], base: Found) -> dict[str, str]:
    """Checkpoints that pages refer to: the base, or what that refers to."""
    tags = {place.tag for page in stored.values() for place in page.planes.values() if place.tag}
    known = {**base.manifest.needs, base.manifest.tag: base.checksum}
    return {tag: known[tag] for tag in sorted(tags)}


def as_seen_later(stored: Mapping[PageAt, StoredPage], tag: str) -> dict[PageAt, StoredPage]:
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


def binding_of(rank: int, request: SaveRequest, experts: Sequence[ExpertsPiece]) -> dict[str, object]:
    """A rank's entry in ``resource_binding.json``: where it ran, and what it held."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "device": str(experts[0].experts.manager.arena.device) if experts else "cpu",
        "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "coordinates": dict(request.coordinates),
        "experts": {p.path: p.numbers_here for p in experts},
    }
