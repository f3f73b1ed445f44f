"""The manifest: the last file of a checkpoint. Without it, or with one that does not fit, there is no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megascale_omni.checkpoint import digests

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
REPLACED = ".replaced"
"""What a checkpoint's folder ends in while another of the same tag takes its place."""


class CheckpointError(ValueError):
    """A checkpoint is not whole, or not what its name says. ``problems``: one line each, naming the file."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        super().__init__(f"checkpoint {folder}: {'; '.join(problems)}")
        self.folder = folder
        self.problems = problems


@dataclass(frozen=True)
class FileRecord:
    """One file: path in the checkpoint's folder, size in bytes, ``name:hex`` checksum."""

    path: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        tag: its name, and its folder's. step: optimizer steps or iterations it was made after.
        sequence: counts the checkpoints of a folder; the highest is the newest, whatever its step.
        kind: ``full``, or ``increment``: unchanged pages are in the checkpoints of ``needs`` (tag -> checksum of its
            manifest).
        files: every file but the manifest. mpus: names of the parts, in the order of their folders.
        layout: ranks and parallel sizes it was saved at. versions: of code, and of the configuration (equal for equal
            ones). configuration: of the run.
        values: what the run keeps of its own: iteration, schedule, data position.
    """

    tag: str
    step: int
    sequence: int
    kind: str
    files: tuple[FileRecord, ...]
    mpus: tuple[str, ...]
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self, *, digest: str) -> bytes:
        """JSON text with the format version, and its own checksum in front."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        body = _canonical(content)
        return _canonical({"checksum": digests.of_bytes(body, name=digest), "content": content}) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, *, folder: Path) -> Manifest:
        """The inverse.

        Raises:
            CheckpointError: not JSON, not its own checksum, another format version.
        """
        try:
            document = json.loads(data)
            content, checksum = document["content"], document["checksum"]
            version = content["format_version"]
            found = digests.of_bytes(_canonical(content), name=checksum.partition(":")[0])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(folder, [f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"]) from error
        if found != checksum:
            raise CheckpointError(folder, [f"{MANIFEST} is damaged ({_checksums(found, checksum)})"])
        if version != FORMAT_VERSION:
            raise CheckpointError(
                folder, [f"format version {version} cannot be read, this build reads {FORMAT_VERSION}"]
            )
        fields = {key: value for key, value in content.items() if key != "format_version"}
        fields["files"] = tuple(FileRecord(**record) for record in fields["files"])
        fields["mpus"] = tuple(fields["mpus"])
        return cls(**fields)


def _checksums(found: str, wanted: str) -> str:
    """Both, as short as tells them apart."""
    kind, _, digits = found.partition(":")
    return f"{kind} {digits[:12]} instead of {wanted.partition(':')[2][:12]}"


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint's folder, and the checksum that other checkpoints know it by.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another folder.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(folder, [f"{MANIFEST} cannot be read: {error.strerror or error}"]) from error
    manifest = Manifest.from_bytes(data, folder=folder)
    if folder.name.removesuffix(REPLACED) != manifest.tag:
        raise CheckpointError(folder, [f"{MANIFEST} is that of {manifest.tag}"])
    return manifest, json.loads(data)["checksum"]


def verify(folder: Path, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the files of a checkpoint, one line a file; an empty list where it is whole.

    ``share`` (rank, ranks) checks every ``ranks``-th file only. Checkpoints that an increment needs are checked as
    their own manifests say.

    Raises:
        CheckpointError: as :func:`read_manifest`, of this checkpoint; of one that it needs the list says so.
    """
    manifest, _ = read_manifest(folder)
    problems = _wrong_files(folder, manifest, share)
    for tag, checksum in manifest.needs.items():
        base = folder.parent / tag
        try:
            needed, found = read_manifest(base)
        except CheckpointError as error:
            problems += [f"needs {tag}: {problem}" for problem in error.problems]
            continue
        if found != checksum:
            problems.append(f"needs {tag}, and there is another of that name ({_checksums(found, checksum)})")
        problems += [f"needs {tag}: {problem}" for problem in _wrong_files(base, needed, share)]
    return problems


def _wrong_files(folder: Path, manifest: Manifest, share: tuple[int, int]) -> list[str]:
    problems = []
    for record in manifest.files[share[0] :: share[1]]:
        path = folder / record.path
        try:
            size = path.stat().st_size
            if size != record.size:
                problems.append(f"{record.path} has {size} bytes instead of {record.size}")
                continue
            found = digests.of_file(path, name=record.checksum.partition(":")[0])
        except OSError as error:
            problems.append(f"{record.path} cannot be read: {error.strerror or error}")
            continue
        if found != record.checksum:
            problems.append(f"{record.path} is damaged ({_checksums(found, record.checksum)})")
    if share[0] == 0:
        known = {record.path for record in manifest.files} | {MANIFEST}
        here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        problems += [f"{name} is not in the manifest" for name in sorted(here - known)]
    return problems
