"""Write a text corpus made of the Python standard library's own sources.

    python scripts/build_corpus.py out/corpus.txt [--max-bytes 4000000]

The same Python release gives the same bytes. Files follow one another in the order of their names; the last one is cut
at `--max-bytes`.
"""

import argparse
import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

SEPARATOR = b"\0"
"""Between two files; `moe_trainer.corpus` puts the same byte between the files of a folder."""

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "lib-dynload"}


def library_sources(library: Path) -> list[Path]:
    """Return the `.py` files of the library that are text for a language model, in the order of their names."""
    files = [path for path in library.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(library).parts)]
    return sorted(files, key=lambda path: path.relative_to(library).as_posix())


def build(output: Path, *, library: Path, max_bytes: int) -> tuple[int, int]:
    """Write the corpus, completely or not at all. Returns (files, bytes).

    Raises:
        ValueError: `library` holds no sources.
        OSError: `output` cannot be written.
    """
    parts: list[bytes] = []
    size = 0
    for path in library_sources(library):
        content = path.read_bytes()
        if not content.strip() or SEPARATOR in content:
            continue
        parts.append(content)
        size += len(content) + len(SEPARATOR)
        if size >= max_bytes:
            break
    if not parts:
        raise ValueError(f"no Python sources under {library}")
    text = SEPARATOR.join(parts)[:max_bytes]
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.{os.getpid()}.part")
    temporary.write_bytes(text)
    temporary.replace(output)
    return len(parts), len(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, metavar="FILE", help="where the text goes")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="size at most (default 4000000)")
    standard = Path(sysconfig.get_path("stdlib"))
    parser.add_argument(
        "--library", type=Path, default=standard, help="folder of sources (default: the standard library)"
    )
    args = parser.parse_args(argv)
    if args.max_bytes < 1:
        parser.error(f"--max-bytes {args.max_bytes} must be at least 1")
    try:
        files, size = build(args.output, library=args.library, max_bytes=args.max_bytes)
    except (OSError, ValueError) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    digest = hashlib.sha256(args.output.read_bytes()).hexdigest()
    print(f"{args.output}: {size} bytes of {files} files, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
