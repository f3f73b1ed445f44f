"""All sections together, filled from arguments, JSON or YAML. Unknown keys are errors that suggest the nearest one."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from megascale_omni.clipping.settings import ClipConfig
from megascale_omni.config.checkpoint import CheckpointConfig
from megascale_omni.config.compute import ComputeConfig
from megascale_omni.config.distributed import DistributedConfig
from megascale_omni.config.heat import HeatConfig
from megascale_omni.config.observe import ObserveConfig
from megascale_omni.config.paging import PagingConfig


@dataclass(frozen=True)
class MegaScaleConfig:
    """Everything a run of MegaScale can be told. By default the run computes what stock computes."""

    paging: PagingConfig = field(default_factory=PagingConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    heat: HeatConfig = field(default_factory=HeatConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> MegaScaleConfig:
        """From nested mappings ``{"paging": {"page_size_bytes": "16MiB"}}``.

        Raises:
            ValueError: an unknown key (the nearest known one is suggested), a section that is no mapping, a bad value.
        """
        _refuse_unknown(values, cls, where="")
        sections = {}
        for item in fields(cls):
            if item.name in values:
                section = values[item.name]
                if not isinstance(section, Mapping):
                    raise ValueError(f"{item.name}={section!r} must be a section of options, e.g. {item.name}: {{...}}")
                kind = type(getattr(cls(), item.name))
                _refuse_unknown(section, kind, where=f"{item.name}.")
                sections[item.name] = kind(**section)
        return cls(**sections)

    @classmethod
    def from_file(cls, path: str | Path) -> MegaScaleConfig:
        """From a JSON or YAML file (YAML needs PyYAML).

        Raises:
            ValueError: the file is not there, not readable as JSON or YAML, or has a bad key or value.
        """
        path = Path(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"configuration file {path} cannot be read: {error}; give a JSON or YAML file") from error
        try:
            values = json.loads(text) if path.suffix == ".json" else _yaml(text)
        except ValueError as error:
            raise ValueError(f"configuration file {path} is not valid: {error}") from error
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise ValueError(f"configuration file {path} must hold a mapping of sections, not {type(values).__name__}")
        try:
            return cls.from_mapping(values)
        except ValueError as error:
            raise ValueError(f"configuration file {path}: {error}") from error

    def replace(self, section: str, **options: object) -> MegaScaleConfig:
        """A copy with options of one section replaced."""
        changed = dataclasses.replace(getattr(self, section), **options)
        return dataclasses.replace(self, **{section: changed})

    def as_dict(self) -> dict[str, object]:
        """Nested plain values, as :meth:`from_mapping` reads them."""
        return dataclasses.asdict(self)


def _yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("YAML configuration needs PyYAML: pip install 'megascale[megatron]', or use JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _refuse_unknown(values: Mapping[str, object], kind: type, *, where: str) -> None:
    known = {item.name: where + item.name for item in fields(kind)}
    for key in values:
        if key not in known:
            # An option's name is known wherever it was put: in no section, or in another one.
            candidates = {**_options(), **known}
            near = difflib.get_close_matches(str(key), candidates, n=1, cutoff=0.4)
            hint = f"did you mean {candidates[near[0]]}?" if near else f"known: {', '.join(known.values())}"
            raise ValueError(f"unknown configuration key {where}{key}; {hint}")


def _options() -> dict[str, str]:
    """Every option's name, with its section."""
    default = MegaScaleConfig()
    return {item.name: f"{s.name}.{item.name}" for s in fields(default) for item in fields(getattr(default, s.name))}
