"""The files that hold pages of experts in a checkpoint: a folder of parts, an index a rank, and a manifest.

    <tag>/megascale/pages-RRRRR-PPPPP.safetensors   tensors "<page>:<plane>", parts of at most 64 MiB or one page
    <tag>/megascale/index-RRRRR.json                what a rank wrote: parts with their checksums, and pages
    <tag>/megascale/manifest.json                   version, modules, applied steps; written last

A page is named by its module's path, its expert's number in the model and its slice, so that it does not matter how
many ranks wrote it, or read it.

[Note: two saves of one tag]
The folder is written as ``megascale.new``. When it is whole, the folder of an earlier save of the same tag goes, then
the framework writes its own files, over those of that save; last the new folder gets its name. A save that ends before
that leaves ``megascale.new`` alone, beside files that may be of either save: such a checkpoint is refused.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megascale_omni.paging.layout import ExpertShape, PageLayout, Part

FOLDER = "megascale"
BUILDING = f"{FOLDER}.new"
VERSION = 1
PART_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ModuleRecord:
    """What is saved of a module: its experts in the model, their shape, and their cut."""

    path: str
    num_experts: int
    hidden: int
    ffn: int
    gated: bool
    bias: bool
    rows: int
    style: str

    def layout(self) -> PageLayout:
        """The cut of its pages in the files."""
        return PageLayout(ExpertShape(self.hidden, self.ffn, self.gated, self.bias), self.rows)


@dataclass
class _Index:
    parts: dict[str, int] = field(default_factory=dict)
    """Part -> crc32 of its bytes."""
    pages: dict[str, dict[str, str]] = field(default_factory=dict)
    """Page -> plane -> part."""


def page_name(path: str, expert: int, slice_: int) -> str:
    """``model.layers.0.mlp.experts/3/0``: module, the expert's number in the model, slice."""
    return f"{path}/{expert}/{slice_}"


class PagesWriter:
    """Writes one rank's pages into ``folder``, a few at a time."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._index = _Index()
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def add(self, name: str, planes: Mapping[str, torch.Tensor]) -> None:
        """A page's planes (copied)."""
        for plane, tensor in planes.items():
            self._pending[f"{name}:{plane}"] = tensor.detach().to("cpu", copy=True)
            self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= PART_BYTES:
            self._flush()

    def close(self) -> None:
        """Writes what is left, and the index."""
        self._flush()
        write_durably(self._folder / f"index-{self._rank:05}.json", json.dumps(asdict(self._index)).encode())

    def _flush(self) -> None:
        if not self._pending:
            return
        from safetensors.torch import save

        part = f"pages-{self._rank:05}-{len(self._index.parts):05}.safetensors"
        content = save(self._pending)
        write_durably(self._folder / part, content)
        self._index.parts[part] = zlib.crc32(content)
        for key in self._pending:
            name, _, plane = key.rpartition(":")
            self._index.pages.setdefault(name, {})[plane] = part
        self._pending, self._bytes = {}, 0


class PagesReader:
    """Reads a folder that :class:`PagesWriter` and :func:`write_manifest` made.

    Raises:
        ValueError: no manifest, another version, or an index that is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        manifest = _read_json(folder / "manifest.json")
        if manifest.get("version") != VERSION:
            version = manifest.get("version")
            raise ValueError(f"{folder}: version {version!r} cannot be read, this build reads {VERSION}")
        self.num_steps = int(manifest["num_steps"])
        self.clip: dict[str, Any] | None = manifest.get("clip")
        self.modules = {m["path"]: ModuleRecord(**m) for m in manifest["modules"]}
        self._pages: dict[str, dict[str, str]] = {}
        self._checksums: dict[str, int] = {}
        for rank in range(int(manifest["ranks"])):
            index = _Index(**_read_json(folder / f"index-{rank:05}.json"))
            self._pages.update(index.pages)
            self._checksums.update(index.parts)
        self._open: dict[str, dict[str, torch.Tensor]] = {}

    def planes(self, name: str) -> set[str]:
        """The planes of a page that are there. Raises ValueError where none are."""
        if name not in self._pages:
            raise ValueError(f"{self._folder}: page {name} is missing")
        return set(self._pages[name])

    def page(self, name: str, plane: str) -> torch.Tensor:
        """A page's elements, flat.

        Raises:
            ValueError: bytes that are not those that were written.
        """
        return self._part(self._pages[name][plane])[f"{name}:{plane}"]

    def _part(self, part: str) -> dict[str, torch.Tensor]:
        if part not in self._open:
            from safetensors.torch import load

            try:
                content = (self._folder / part).read_bytes()
            except OSError as error:
                raise ValueError(f"{self._folder / part} cannot be read: {error}") from error
            if zlib.crc32(content) != self._checksums[part]:
                raise ValueError(f"{self._folder / part}: the checksum does not match, the file is damaged")
            while len(self._open) >= 2:  # pages are read in the order they were written in
                self._open.pop(next(iter(self._open)))
            self._open[part] = load(content)
        return self._open[part]


def has_pages(tag: Path) -> bool:
    """Whether a checkpoint (the folder of its tag) was saved with experts in pages.

    Raises:
        ValueError: a save into it was interrupted; see [Note: two saves of one tag].
    """
    if (tag / FOLDER / "manifest.json").is_file():
        return True
    if (tag / BUILDING).exists():
        raise ValueError(
            f"{tag / BUILDING}: a save of this checkpoint was interrupted, and files of the one before may be beside "
            "its own; load another tag"
        )
    return False


def recut(
    new: PageLayout, slice_: int, *, old: PageLayout, read: Callable[[int], torch.Tensor], out: torch.Tensor
) -> None:
    """Fills page ``slice_`` of an expert from pages of another cut; ``read(s)`` gives the old slice ``s``, flat."""
    wanted = new.neurons(slice_)
    for part in new.parts(slice_):
        target = new.part(out, slice_, part)
        if part is Part.DOWN_BIAS:
            target.copy_(old.part(read(0), 0, part))
            continue
        for other in range(wanted.start // old.rows, (wanted.stop - 1) // old.rows + 1):
            have = old.neurons(other)
            start, stop = max(wanted.start, have.start), min(wanted.stop, have.stop)
            source = old.part(read(other), other, part)[start - have.start : stop - have.start]
            target[start - wanted.start : stop - wanted.start].copy_(source)


def write_manifest(
    folder: Path, *, modules: list[ModuleRecord], ranks: int, num_steps: int, clip: dict[str, Any] | None = None
) -> None:
    """Says that the folder is whole. ``clip``: the state of clipping by module, plain values."""
    content = {
        "version": VERSION,
        "ranks": ranks,
        "num_steps": num_steps,
        "modules": [asdict(module) for module in modules],
    }
    if clip is not None:
        content["clip"] = clip
    write_durably(folder / "manifest.json", json.dumps(content, indent=1).encode())


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file whose bytes are on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; the checkpoint is not whole") from error
    return content
