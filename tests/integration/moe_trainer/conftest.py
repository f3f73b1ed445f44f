from pathlib import Path

import pytest

TEXT = "the quick brown fox jumps over a lazy dog and then sleeps under an old oak tree"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of 20,000 words in a fixed order that is not quite periodic."""
    words = TEXT.split()
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(" ".join(words[(i * i + i // 7) % len(words)] for i in range(20_000)))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Where checkpoints go."""
    return str(tmp_path / "checkpoints")
