"""Needs DeepSpeed and transformers."""

import pytest

from tests.distributed.deepspeed_state import prepare

pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
pytest.importorskip("transformers", reason="needs the extra `hf`")
prepare()
