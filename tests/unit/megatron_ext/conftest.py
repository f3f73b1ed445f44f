"""Needs Megatron-Core; leaves no patch in force."""

from collections.abc import Iterator

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")


@pytest.fixture(autouse=True)
def not_enabled() -> Iterator[None]:
    """Each test starts and ends without MegaScale's patches."""
    import megatron_ext

    megatron_ext.disable()
    yield
    megatron_ext.disable()
