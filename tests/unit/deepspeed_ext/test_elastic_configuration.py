"""What a manifest says of a model: Hugging Face's configuration, any other that is plain, or the class."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.elastic import _configuration


@dataclass
class Sizes:
    hidden: int = 8
    kind: type = torch.nn.Linear


class HfSizes:
    def to_dict(self) -> dict[str, Any]:
        return {"hidden_size": 8}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (HfSizes(), {"hidden_size": 8}),
        (Sizes(), {"hidden": 8, "kind": "torch.nn.modules.linear.Linear"}),
        ({"hidden": 8}, {"hidden": 8}),
        (object(), "torch.nn.modules.linear.Linear"),
        (None, "torch.nn.modules.linear.Linear"),
    ],
)
def test_models_have_configurations_of_any_kind(config: object, said: object) -> None:
    model = torch.nn.Linear(1, 1)
    model.config = config  # type: ignore[assignment]
    run = SimpleNamespace(section=SimpleNamespace(config=None))
    engine = SimpleNamespace(module=model, run=run, _config=SimpleNamespace(_param_dict={}))
    assert _configuration(engine)["model"] == said
