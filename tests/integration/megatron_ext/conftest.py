"""Needs Megatron-Core; offers a corpus."""

import pytest

from tests.integration.megatron_ext.runs import write_corpus

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a small text."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))
