"""What a ``"megascale"`` section supports of DeepSpeed. Everything else is refused by name before long work.

``docs/DEEPSPEED.md`` shows this table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """An option of DeepSpeed's JSON that is refused: its place, whether a value is, and what to do instead."""

    key: str
    refused: Callable[[Any], bool]
    remedy: str


def _set(value: object) -> bool:
    return bool(value)


def _more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


REFUSALS: tuple[Refusal, ...] = (
    Refusal("fp16.enabled", _set, "use bf16: paged optimizer state needs no loss scaling"),
    Refusal("torch_autocast.enabled", _set, "use bf16"),
    Refusal("bf16.bf16_master_weights_and_grads", _set, "leave it out: masters are fp32"),
    Refusal("bf16.bf16_optimizer_states", _set, "leave it out: moments are fp32"),
    Refusal("data_types.grad_accum_dtype", lambda v: v not in (None, "fp32", "bf16"), "use fp32 or bf16"),
    Refusal("tensor_parallel.autotp_size", _more_than_one, "leave it out"),
    Refusal("sequence_parallel_size", _more_than_one, "leave it out"),
    Refusal("expert_parallel.enabled", _set, 'use "expert_parallel_size" of the megascale section'),
    Refusal("hybrid_engine.enabled", _set, "leave it out"),
    Refusal("compile.deepcompile", _set, "leave it out"),
    Refusal("zero_optimization.zenflow", _set, "leave it out"),
    Refusal("zero_optimization.zero_quantized_gradients", _set, "leave it out"),
    Refusal("zero_optimization.offload_optimizer.super_offload", _set, "leave it out"),
    Refusal("zero_optimization.mics_shard_size", _more_than_one, "leave it out"),
)


def check(config: Mapping[str, Any], *, mpu: object) -> None:
    """Refuses the first unsupported option of a DeepSpeed configuration.

    Raises:
        ValueError: names the option, its value and the remedy.
    """
    for refusal in REFUSALS:
        value = _value(config, refusal.key)
        if refusal.refused(value):
            raise ValueError(f"{refusal.key}={value!r} is not supported with megascale; {refusal.remedy}")
    if mpu is not None:
        raise ValueError("model parallelism (mpu) is not supported with megascale; leave mpu out")


def _value(config: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - whatever stands in the JSON
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found
