"""Needs DeepSpeed and transformers."""

import pytest

from tests.distributed import pool

pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
pytest.importorskip("transformers", reason="needs the extra `hf`")

# Seconds of importing in every rank, and in those that come after ranks that raised.
pool.PRELOADED.append("tests.distributed.deepspeed_preload")
