"""A configuration as manifests have it: plain, and the same text for the same configuration."""

import enum
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megascale_omni.checkpoint.configuration import plain, version_of


class Kind(enum.Enum):
    """Not a text."""

    FULL = 1


class Word(enum.StrEnum):
    """A text."""

    HALF = "half"


@dataclass
class Inner:
    """In another one."""

    size: int = 3
    where: Path = Path("a/b")


@dataclass
class Configured:
    """With everything that frameworks put into theirs."""

    inner: Inner = field(default_factory=Inner)
    kind: Kind = Kind.FULL
    word: Word = Word.HALF
    dtype: torch.dtype = torch.bfloat16
    made_by: object = torch.nn.init.zeros_
    rates: tuple[float, ...] = (0.1, 0.2)
    names: frozenset[str] = frozenset({"b", "a"})
    live: object = field(default_factory=object)
    absent: None = None


def test_everything_becomes_plain_and_objects_are_left_out():
    found = plain(Configured())
    assert found == {
        "inner": {"size": 3, "where": "a/b"},
        "kind": "FULL",
        "word": "half",
        "dtype": "torch.bfloat16",
        "made_by": "torch.nn.init.zeros_",
        "rates": [0.1, 0.2],
        "names": ["a", "b"],
        "absent": None,
    }
    assert json.loads(json.dumps(found)) == found
    assert plain(Configured) == f"{__name__}.Configured"
    assert plain(object()) is None


def test_the_version_is_another_one_for_another_configuration():
    one, same, other = plain(Configured()), plain(Configured()), plain(Configured(Inner(size=4)))
    assert version_of(one) == version_of(same) != version_of(other)
