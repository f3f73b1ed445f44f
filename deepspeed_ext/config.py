"""The ``"megascale"`` section of a DeepSpeed configuration.

DeepSpeed accepts unknown top-level keys, so that the section is checked here: an unknown key is an error that suggests
the nearest known one. Options stand flat in the section (``"device_budget": "25%"``), or in the core's own sections
(``"paging": {"device_budget": "25%"}``).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from deepspeed_ext.messages import said_in_json
from megascale_omni.config import CheckpointConfig, DistributedConfig, MegaScaleConfig
from megascale_omni.effects import refuse_ineffective

SECTION = "megascale"
_OWN = ("enabled", "expert_parallel_size")
_UNSUPPORTED = (
    ("heat", "frozen"),
    ("paging", "prefetch"),
    ("observe", "routing"),
    *(("distributed", item.name) for item in fields(DistributedConfig)),
    *(("checkpoint", item.name) for item in fields(CheckpointConfig)),
)
"""Options, with their sections, that nothing carries out under DeepSpeed; of prefetch, one value."""


@dataclass(frozen=True)
class Section:
    """What the section says.

    Attributes:
        config: options of the core.
        expert_parallel_size: ranks among which the experts of a Hugging Face model are divided; 1: all on each.
    """

    config: MegaScaleConfig
    expert_parallel_size: int = 1


def section_of(ds_config: Mapping[str, object]) -> Section | None:
    """The section of a DeepSpeed configuration; None where there is none, or ``"enabled"`` is false.

    Raises:
        ValueError: an unknown key, a bad value, one without effect beside the others, a section without ``"enabled"``.
    """
    if SECTION not in ds_config:
        near = [str(key) for key in ds_config if _is_near(str(key))]
        if near:
            raise ValueError(f"unknown DeepSpeed configuration key {near[0]!r}; did you mean {SECTION!r}?")
        return None
    values = ds_config[SECTION]
    if not isinstance(values, Mapping):
        raise ValueError(f'"{SECTION}": {values!r} must be a section of options, e.g. "{SECTION}": {{"enabled": true}}')
    sections = _sorted_into_sections(values)
    enabled = values.get("enabled")
    if not isinstance(enabled, bool):
        raise ValueError(f'"{SECTION}" needs "enabled": true or false, not {enabled!r}')
    ranks = values.get("expert_parallel_size", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"{SECTION}.expert_parallel_size={ranks!r} must be a number of ranks, 1 or more")
    try:
        with said_in_json():
            config = MegaScaleConfig.from_mapping(sections)
    except ValueError as error:
        raise ValueError(f'"{SECTION}" section: {error}') from error
    _refuse_unsupported(config)
    try:
        with said_in_json():
            refuse_ineffective(config)
    except ValueError as error:
        raise ValueError(f'"{SECTION}" section: {error}') from error
    return Section(config=config, expert_parallel_size=ranks) if enabled else None


def _is_near(key: str) -> bool:
    """Whether a key, which DeepSpeed would pass over, was meant to be the section."""
    plain = key.lower().replace("_", "").replace("-", "")
    return bool(difflib.get_close_matches(plain, [SECTION], n=1, cutoff=0.8))


def _refuse_unsupported(config: MegaScaleConfig) -> None:
    """Raises ValueError for an option that only another adapter carries out."""
    default = MegaScaleConfig()
    for section, option in _UNSUPPORTED:
        value = getattr(getattr(config, section), option)
        if value not in (getattr(getattr(default, section), option), "none"):
            raise ValueError(
                f'"{SECTION}": "{option}": {json.dumps(value)} is not supported with DeepSpeed; leave it out'
            )


def _sorted_into_sections(values: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The core's sections with the options that stand flat put where they belong."""
    homes = _homes()
    names = {item.name for item in fields(MegaScaleConfig)}
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        if key in names:
            if not isinstance(value, Mapping):
                raise ValueError(f"{SECTION}.{key}={value!r} must be a section of options, e.g. {{...}}")
            _put(sections, key, value)
        elif key in homes:
            _put(sections, homes[key], {key: value})
        elif key not in _OWN:
            known = [*_OWN, *homes, *names]
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"unknown key {SECTION}.{key}; {hint}")
    return sections


def _put(sections: dict[str, dict[str, object]], name: str, options: Mapping[str, object]) -> None:
    """Adds options to a section. Raises ValueError for one that is there already."""
    section = sections.setdefault(name, {})
    for option, value in options.items():
        if option in section:
            raise ValueError(
                f"{SECTION}.{option} is given twice, {json.dumps(section[option])} and {json.dumps(value)}: flat and "
                f'in "{name}"; leave one of them out'
            )
        section[option] = value


def _homes() -> dict[str, str]:
    """Options that may stand flat, with their sections: those whose name is in one section only."""
    default = MegaScaleConfig()
    found: dict[str, list[str]] = {}
    for section in fields(default):
        value = getattr(default, section.name)
        if dataclasses.is_dataclass(value) and section.name != "clip":  # `mode` and `base` say nothing without it
            for option in fields(value):
                found.setdefault(option.name, []).append(section.name)
    return {name: homes[0] for name, homes in found.items() if len(homes) == 1}
