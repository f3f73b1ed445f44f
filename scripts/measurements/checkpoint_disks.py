"""A file system that remembers every operation, and the disks that a crash after any of them may leave.

What a crash leaves of operations that were not synced is not defined, so three disks are made for each moment:
``all`` has every change so far; ``least`` only what was synced (names by their folder's sync, bytes by their file's);
``torn`` has every name so far, and of files that were not synced half the bytes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

DISKS = ("all", "least", "torn")


@dataclass
class Node:
    """A file (bytes written, bytes synced) or a folder (names, names synced)."""

    data: bytearray | None = None
    synced: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    synced_names: dict[str, Node] = field(default_factory=dict)

    @property
    def is_file(self) -> bool:
        return self.data is not None


class Crash(BaseException):
    """The machine has lost its power: nothing that cleans up after errors may catch this."""


class RecordingFiles:
    """A file system in memory beside a real folder, which sees the same operations until the crash.

    The ``crash_after``-th operation is the last one. ``operations`` are the names of all so far.
    """

    def __init__(self, root: Path, crash_after: int | None = None) -> None:
        self.root = root
        self.tree = _read(root)
        self.crash_after = crash_after
        self.operations: list[str] = []

    def done(self, what: str) -> None:
        self.operations.append(what)
        if self.crash_after is not None and len(self.operations) >= self.crash_after:
            self.crash_after = 0  # whatever is tried now fails too
            raise Crash(what)

    def check(self) -> None:
        if self.crash_after == 0:
            raise Crash("after the crash")

    def node(self, path: Path) -> Node:
        found = self.tree
        for name in path.relative_to(self.root).parts:
            found = found.names[name]
        return found

    def make_folder(self, path: Path) -> None:
        self.check()
        path.mkdir()
        self.node(path.parent).names[path.name] = Node()
        self.done(f"mkdir {path.name}")

    def create(self, path: Path) -> RecordingFile:
        self.check()
        with path.open("xb"):
            pass
        node = Node(data=bytearray())
        self.node(path.parent).names[path.name] = node
        self.done(f"create {path.name}")
        return RecordingFile(self, path, node)

    def sync_folder(self, path: Path) -> None:
        self.check()
        node = self.node(path)
        node.synced_names = dict(node.names)
        self.done(f"sync folder {path.name}")

    def rename(self, source: Path, target: Path) -> None:
        self.check()
        if target.is_dir():
            raise FileExistsError(target)
        source.rename(target)
        node = self.node(source.parent).names.pop(source.name)
        self.node(target.parent).names[target.name] = node
        self.done(f"rename {source.name} {target.name}")

    def remove(self, path: Path) -> None:
        """Every file and folder of a tree is an operation of its own."""
        self.check()
        if path.is_dir():
            for inner in sorted(path.iterdir()):
                self.remove(inner)
            path.rmdir()
        else:
            path.unlink()
        del self.node(path.parent).names[path.name]
        self.done(f"remove {path.name}")

    def leave(self, kind: str, folder: Path) -> None:
        """Makes ``folder`` the disk that the crash left."""
        shutil.rmtree(folder, ignore_errors=True)
        _write(self.tree, folder, kind)


@dataclass
class RecordingFile:
    files: RecordingFiles
    path: Path
    node: Node

    def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Every part is an operation of its own."""
        for data in parts:
            self.files.check()
            assert self.node.data is not None
            with self.path.open("ab") as file:
                file.write(data)
            self.node.data += data
            self.files.done(f"write {self.path.name}")

    def sync(self) -> None:
        self.files.check()
        assert self.node.data is not None
        self.node.synced = bytes(self.node.data)
        self.files.done(f"sync {self.path.name}")

    def close(self) -> None:
        """Changes nothing on a disk."""


def _read(path: Path) -> Node:
    if path.is_file():
        data = path.read_bytes()
        return Node(data=bytearray(data), synced=data)
    names = {inner.name: _read(inner) for inner in path.iterdir()}
    return Node(names=names, synced_names=dict(names))


def _write(node: Node, path: Path, kind: str) -> None:
    if node.data is not None:
        whole = bytes(node.data)
        torn = whole if node.synced == whole else whole[: len(whole) // 2]
        path.write_bytes({"all": whole, "least": node.synced, "torn": torn}[kind])
        return
    path.mkdir()
    for name, inner in (node.synced_names if kind == "least" else node.names).items():
        _write(inner, path / name, kind)
