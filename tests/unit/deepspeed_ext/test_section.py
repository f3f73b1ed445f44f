"""The megascale section of a DeepSpeed configuration, and what beside it is refused."""

import re
from pathlib import Path

import pytest

from deepspeed_ext import support
from deepspeed_ext.config import section_of

ROOT = Path(__file__).resolve().parents[3]


def test_options_stand_flat_or_in_their_section() -> None:
    flat = section_of({"megascale": {"enabled": True, "page_size_bytes": "2MiB", "cpu_products": "blas"}})
    nested = {"paging": {"page_size_bytes": "2MiB"}, "compute": {"cpu_products": "blas"}}
    assert flat == section_of({"megascale": {"enabled": True, **nested}})
    assert flat is not None
    assert flat.config.paging.page_size_bytes == 2 * 2**20
    assert flat.expert_parallel_size == 1


def test_without_an_enabled_section_nothing_is_asked_for() -> None:
    assert section_of({}) is None
    assert section_of({"megascale": {"enabled": False, "expert_parallel_size": 2}}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"megascale": {"enabled": True, "device_buget": "25%"}}, "megascale.device_buget; did you mean device_budget"),
        ({"megascale": {"enabled": True, "paging": {"page_size": 1}}}, "did you mean paging.page_size_bytes"),
        ({"megascale": {"enabled": True, "paging": 1}}, "must be a section"),
        ({"megascale": {"device_budget": "25%"}}, 'needs "enabled": true or false'),
        ({"megascale": {"enabled": "yes"}}, 'needs "enabled": true or false'),
        ({"megascale": True}, "must be a section of options"),
        ({"mega_scale": {"enabled": True}}, "did you mean 'megascale'"),
        ({"megascael": {"enabled": True}}, "did you mean 'megascale'"),
        ({"megascale": None}, 'megascale": None must be a section of options'),
        (
            {"megascale": {"enabled": True, "cpu_products": "blas", "compute": {"cpu_products": "onednn"}}},
            'megascale.cpu_products is given twice, "blas" and "onednn": flat and in "compute"; leave one',
        ),
        ({"megascale": {"enabled": True, "disk_path": 3}}, "paging.disk_path=3 must be the path of a folder"),
        ({"megascale": {"enabled": True, "expert_parallel_size": 0}}, "expert_parallel_size=0 must be"),
        ({"megascale": {"enabled": True, "device_budget": "25%"}}, 'give paging.disk_path ("disk_path")'),
        ({"megascale": {"enabled": False, "zzz": 1}}, "unknown key megascale.zzz; known: "),
        ({"megascale": {"enabled": True, "frozen": "reroute"}}, '"frozen": "reroute" is not supported with DeepSpeed'),
        ({"megascale": {"enabled": True, "grad_wire": "bf16"}}, '"grad_wire": "bf16" is not supported with DeepSpeed'),
        ({"megascale": {"enabled": True, "distributed": {"dispatcher": "groups"}}}, '"dispatcher": "groups" is not'),
        ({"megascale": {"enabled": True, "checkpoint": {"format": "paged"}}}, '"format": "paged" is not supported'),
        ({"megascale": {"enabled": True, "routing": "r"}}, '"routing": "r" is not supported with DeepSpeed'),
        (
            {"megascale": {"enabled": True, "paging": {"prefetch": "early-router"}}},
            '"prefetch": "early-router" is not supported with DeepSpeed; leave it out',
        ),
    ],
)
def test_mistakes_are_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        section_of(config)


REFUSED = {
    "data_types.grad_accum_dtype": ("fp16", "bf16"),
    "tensor_parallel.autotp_size": (2, 1),
    "sequence_parallel_size": (2, 1),
    "zero_optimization.mics_shard_size": (2, -1),
}


@pytest.mark.parametrize("refusal", support.REFUSALS, ids=lambda refusal: refusal.key)
def test_unsupported_options_are_refused_by_name(refusal: support.Refusal) -> None:
    bad, good = REFUSED.get(refusal.key, (True, False))
    with pytest.raises(ValueError, match=re.escape(refusal.key)):
        support.check(nested(refusal.key, bad), mpu=None)
    support.check(nested(refusal.key, good), mpu=None)


def nested(key: str, value: object) -> dict[str, object]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_model_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match="mpu"):
        support.check({}, mpu=object())


def test_the_document_shows_what_is_refused() -> None:
    text = (ROOT / "docs" / "DEEPSPEED.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text.partition("## Refused")[2], flags=re.M)
    assert rows == [(refusal.key, refusal.remedy) for refusal in support.REFUSALS]
