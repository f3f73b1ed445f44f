"""Needs DeepSpeed and transformers."""

import pytest

pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
pytest.importorskip("transformers", reason="needs the extra `hf`")
