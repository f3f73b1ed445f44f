"""An increment made whole: the same checkpoint, bit for bit, with all of its pages in its own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint import datafile
from megascale_omni.checkpoint.datafile import CHUNK_BYTES, NAMES, Entry, Place, bytes_of, places, read_into
from megascale_omni.checkpoint.digests import Data
from megascale_omni.checkpoint.filesystem import FileSystem, LocalFileSystem
from megascale_omni.checkpoint.manifest import FileRecord, Manifest
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.checkpoint.request import DENSE_MPU, EXPERTS_MPU, mpu_folder
from megascale_omni.checkpoint.store import Store, list_checkpoints

_EXPERTS = mpu_folder(EXPERTS_MPU) + "/"


def make_whole(opened: Opened, root: Path, tag: str | None = None, *, files: FileSystem | None = None) -> Path:
    """Writes an opened checkpoint, which was checked, into the folder ``root`` so that it needs no other.

    In its own folder and under its own tag it takes its own place, at once, in the same order of the folder's
    checkpoints; steps that pages have missed stay missed.

    Raises:
        ValueError: another checkpoint is there, or needs this one as it is. OSError: of the file system.
    """
    tag = tag or opened.manifest.tag
    final, store = root / tag, Store(root, files=files or LocalFileSystem())
    in_place = final.exists() and final.resolve() == opened.folder.resolve()
    if final.exists() and not in_place:
        raise ValueError(f"{final} is there already; give another folder, or a name with --tag")
    store.draft(tag, [mpu_folder(DENSE_MPU), mpu_folder(EXPERTS_MPU)])
    draft = store.draft_of(tag)
    try:
        _refuse_what_has_changed(opened, root, tag, in_place=in_place)
        manifest = replace(
            opened.manifest,
            tag=tag,
            kind="full",
            needs={},
            sequence=opened.manifest.sequence if in_place else store.next_sequence(),
            files=tuple(sorted(_files(opened, store, draft), key=lambda record: record.path)),
        )
        store.commit(draft, manifest)
    except BaseException:
        store.discard_draft(draft)
        store.release()
        raise
    try:
        _tidy(store, manifest, in_place=in_place)
    finally:
        store.release()
    return final


def _refuse_what_has_changed(opened: Opened, root: Path, tag: str, *, in_place: bool) -> None:
    """Now that no run saves there: what one may have done since the checkpoint was opened."""
    found = list_checkpoints(root)[0]
    needing = [f.folder.name for f in found if tag in f.manifest.needs]
    if needing:
        raise ValueError(
            f"{root / tag} is needed as it is by {', '.join(needing)}; make the newest of these whole instead"
        )
    if in_place and opened.checksum not in [f.checksum for f in found if f.folder.name == tag]:
        raise ValueError(f"{root / tag} is another checkpoint by now: a run has saved to the folder; try again")


def _tidy(store: Store, manifest: Manifest, *, in_place: bool) -> None:
    if in_place:
        store.collect()  # what it has taken the place of; the newest one is the same as before
    else:
        store.tidy(manifest.tag)


def _files(opened: Opened, store: Store, draft: Path) -> Iterator[FileRecord]:
    """Writes every file, those of pages anew."""
    for record in opened.manifest.files:
        if record.path.startswith(_EXPERTS):
            if record.path.endswith(".safetensors"):
                yield from _pages(opened, store, draft, record.path)  # and its index
            continue
        parts = [partial(_part, opened.folder / record.path, at) for at in range(0, record.size, CHUNK_BYTES)]
        yield _copied(store, draft / record.path, record, parts)


def _part(path: Path, at: int) -> Data:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(CHUNK_BYTES)


def _copied(store: Store, path: Path, record: FileRecord, parts: Sequence[Callable[[], Data]]) -> FileRecord:
    file = store.files.create(path)
    try:
        for part in parts:
            file.write(part())
        file.sync()
    finally:
        file.close()
    return record


def _pages(opened: Opened, store: Store, draft: Path, path: str) -> Iterator[FileRecord]:
    """One rank's pages, wherever they are, and its index."""
    index_path = path.removesuffix(".safetensors") + ".json"
    index = json.loads((opened.folder / index_path).read_bytes())
    rows: list[list[Any]] = index["pages"]
    entries = [
        _entry(f"{row[0]}|{row[1]}|{row[2]}|{label}", opened.folder, Place(*place))
        for row in rows
        for label, place in row[5].items()
    ]
    yield datafile.write(store.files, draft, path, entries, digest_name=store.digest)
    where = iter(places(path, entries))
    for row in rows:
        row[5] = {label: next(where).as_list() for label in row[5]}
    yield store.write(draft, index_path, json.dumps(index).encode())


def _entry(name: str, folder: Path, place: Place) -> Entry:
    dtype = NAMES[place.dtype]
    numel = (place.end - place.begin) // dtype.itemsize

    def read() -> Data:
        tensor = torch.empty(numel, dtype=dtype)
        read_into(folder, place, tensor)
        return bytes_of(tensor)

    return Entry(name, dtype, (numel,), [read])
