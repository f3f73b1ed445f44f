"""MegaScale's configuration: one frozen dataclass a concern, filled from arguments, JSON or YAML.

Every error names the key, the value and what would work. Adding an option means adding a field here; adapters only
parse.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from megascale_omni.clipping.settings import ClipConfig
from megascale_omni.paging.budget import Budget, parse_percent
from megascale_omni.paging.layout import DEFAULT_PAGE_BYTES, MAX_PAGE_BYTES, MIN_PAGE_BYTES

ProductsChoice = Literal["auto", "blas", "onednn"]
CheckpointFormat = Literal["stock", "paged"]
BackendChoice = Literal["auto", "torch", "triton"]
OptimizerDevice = Literal["auto", "host", "device"]
Dispatcher = Literal["stock", "groups"]
Move = Literal["auto", "tokens", "pages"]
Discovery = Literal["allgather", "gossip"]
GradWire = Literal["fp32", "bf16"]
Fetch = Literal["step", "demand"]
Checksum = Literal["auto", "xxh3", "crc32", "off"]
Prefetch = Literal["none", "history", "early-router"]
Frozen = Literal["wake", "reroute"]

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(value: object, *, key: str) -> int:
    """``16MiB``, ``1.5 GiB``, ``65536`` or an int, as bytes.

    Raises:
        ValueError: not a size; says what is.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        also = ", or a part of all pages, e.g. 25%" if "budget" in key else ""
        raise ValueError(f"{key}={value!r} is not a size; write bytes or a unit, e.g. 16MiB, 8GiB, 1048576{also}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_budget(value: object, *, key: str) -> Budget:
    """``25%`` or a size as a budget.

    Raises:
        ValueError: neither, negative, or more than 100%.
    """
    fraction = parse_percent(value) if isinstance(value, str) else None
    if fraction is not None:
        if fraction > 1:
            raise ValueError(f"{key}={value} is more than all pages; give at most 100%")
        return Budget(fraction=fraction)
    nbytes = parse_bytes(value, key=key)
    if nbytes < 0:
        raise ValueError(f"{key}={value} is negative; give a size, e.g. 8GiB, or a percentage of all pages, e.g. 25%")
    return Budget(nbytes=nbytes)


@dataclass(frozen=True)
class PagingConfig:
    """How experts are cut into pages, and where pages may be.

    Attributes:
        page_size_bytes: weight bytes of a page, 64 KiB to 64 MiB (an expert smaller than that is one page).
        device_budget: device memory for pages of all planes: bytes, ``8GiB``, ``25%`` of all pages, ``auto`` (what is
            available), or None: everything stays in device memory.
        host_budget: host memory behind it, in the same terms; 0 for none.
        disk_path: folder for the scratch file that holds what fits in neither; needed with a device budget.
        checksum: of every page read from disk: ``xxh3``, ``crc32``, ``off``, or ``auto`` (xxh3 where it is installed).
        prefetch: which pages are fetched before they are needed: ``none``; those that the schedule and the past tell
            (``history``); and, with ``early-router``, those that a layer's router chooses for the layer before it.
        step_in_backward: whether gradients are completed, and pages stepped where no clipping waits for all of them, in
            the backward that is their last; off for loops that compute more backwards than they announce.
        max_lag_steps: most optimizer steps that a page of an unused expert may wait; 0 steps every page at every step.
        emergency_percent: where less of device memory is free, pages give some back; 0 never looks.
        compact_percent: where more of the device arena's memory holds no page at a step's end, pages move together and
            memory returns to the system; 100: never. compact_seconds: and after so much time; 0: never.
    """

    page_size_bytes: int = DEFAULT_PAGE_BYTES
    device_budget: str | int | None = None
    host_budget: str | int = 0
    disk_path: str | None = None
    checksum: Checksum = "auto"
    prefetch: Prefetch = "history"
    step_in_backward: bool = True
    max_lag_steps: int = 100
    emergency_percent: float = 5.0
    compact_percent: float = 100.0
    compact_seconds: float = 0.0

    def __post_init__(self) -> None:
        size = parse_bytes(self.page_size_bytes, key="paging.page_size_bytes")
        if not MIN_PAGE_BYTES <= size <= MAX_PAGE_BYTES:
            raise ValueError(
                f"paging.page_size_bytes={self.page_size_bytes} is outside {MIN_PAGE_BYTES} (64KiB) to "
                f"{MAX_PAGE_BYTES} (64MiB); choose a size in between, e.g. 16MiB"
            )
        if self.checksum is False:  # what YAML makes of an unquoted `off`
            object.__setattr__(self, "checksum", "off")
        if self.checksum not in get_args(Checksum):
            known = ", ".join(get_args(Checksum))
            raise ValueError(f"paging.checksum={self.checksum!r} is unknown; choose one of {known}")
        if isinstance(self.max_lag_steps, bool) or not isinstance(self.max_lag_steps, int) or self.max_lag_steps < 0:
            raise ValueError(f"paging.max_lag_steps={self.max_lag_steps!r} must be a whole number of steps, 0 or more")
        _check_number("paging", self, "emergency_percent", most=40.0, what="between 0 and 40: it is doubled")
        _check_number("paging", self, "compact_percent", most=100.0, what="a percentage between 0 and 100")
        _check_number("paging", self, "compact_seconds", most=float("inf"), what="0 or more")
        if self.prefetch not in get_args(Prefetch):
            known = ", ".join(get_args(Prefetch))
            raise ValueError(f"paging.prefetch={self.prefetch!r} is unknown; choose one of {known}")
        if not isinstance(self.step_in_backward, bool):
            raise ValueError(f"paging.step_in_backward={self.step_in_backward!r} must be true or false")
        for key in ("device_budget", "host_budget"):
            if getattr(self, key) not in (None, "auto"):
                parse_budget(getattr(self, key), key=f"paging.{key}")
        if self.disk_path is not None:
            if not isinstance(self.disk_path, str | os.PathLike) or not os.fspath(self.disk_path):
                raise ValueError(f"paging.disk_path={self.disk_path!r} must be the path of a folder")
            object.__setattr__(self, "disk_path", os.fspath(self.disk_path))
        if self.device_budget is not None and self.disk_path is None:
            raise ValueError(
                f"paging.device_budget={self.device_budget} needs a folder on a disk for the pages that do not fit; "
                "give paging.disk_path (--megascale-disk-path)"
            )
        object.__setattr__(self, "page_size_bytes", size)


@dataclass(frozen=True)
class ComputeConfig:
    """What the products run on.

    Attributes:
        cpu_products: library of fp32 products on a CPU; ``auto`` chooses oneDNN where the processor is not Intel's.
        backend: who computes experts: ``torch``, ``triton`` (kernels that read pages through a table), or ``auto``:
            kernels on an accelerator where Triton is installed, torch elsewhere.
        optimizer_device: where pages are stepped whose moments lie in host memory: there (``host``), on the device that
            they are brought to (``device``), or where it takes less time (``auto``). Changes no bit.
    """

    cpu_products: ProductsChoice = "auto"
    backend: BackendChoice = "auto"
    optimizer_device: OptimizerDevice = "auto"

    def __post_init__(self) -> None:
        choices = {"backend": BackendChoice, "cpu_products": ProductsChoice, "optimizer_device": OptimizerDevice}
        for key, kind in choices.items():
            if getattr(self, key) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"compute.{key}={getattr(self, key)!r} is unknown; choose one of {known}")


@dataclass(frozen=True)
class DistributedConfig:
    """How tokens reach experts on other ranks.

    Attributes:
        dispatcher: ``stock`` (the one that the framework is configured with), or ``groups``: each token once to each
            rank, partial results summed there.
        move: what travels to meet, with ``groups``: ``tokens``, ``pages`` of experts, or ``auto``, for each expert what
            costs less.
        discovery: how ranks tell each other their counts: ``allgather``, or ``gossip`` in ceil(log2 ranks) rounds.
        group_cache: groups (sets of ranks) that are remembered.
        topology: file that says where ranks are and what links carry; ``auto`` moves decide by it. None: bytes decide.
        placement: file that says which rank keeps which expert; None: experts by number, as stock.
        grad_wire: what expert gradients travel in between the ranks that have copies of an expert: ``fp32`` (as they
            are), or ``bf16``, once, summed in fp32.
        fetch: when updated pages go to ranks that do not keep their optimizer state: all of them at each ``step``, or
            on ``demand``, those that tokens are about to need.
    """

    dispatcher: Dispatcher = "stock"
    move: Move = "auto"
    discovery: Discovery = "allgather"
    group_cache: int = 1024
    topology: str | None = None
    placement: str | None = None
    grad_wire: GradWire = "fp32"
    fetch: Fetch = "step"

    def __post_init__(self) -> None:
        known_choices = {"dispatcher": Dispatcher, "move": Move, "discovery": Discovery, "grad_wire": GradWire}
        for key, choices in {**known_choices, "fetch": Fetch}.items():
            if getattr(self, key) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise ValueError(f"distributed.{key}={getattr(self, key)!r} is unknown; choose one of {known}")
        size = self.group_cache
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"distributed.group_cache={size!r} must be a whole number of entries, 1 or more")
        for key in ("topology", "placement"):
            if getattr(self, key) is not None and self.dispatcher != "groups":
                raise ValueError(
                    f"distributed.{key}={getattr(self, key)} has no effect with the framework's own dispatcher; add "
                    "distributed.dispatcher: groups (--megascale-dispatcher groups)"
                )


@dataclass(frozen=True)
class HeatConfig:
    """How used experts are told from unused ones, and what happens to these. Only ``frozen: reroute`` changes results.

    Attributes:
        enabled: whether heat is kept at all. window_steps: steps that count. refresh_steps: steps between two looks.
        compute_weight, memory_weight, communication_weight: what a score is made of; they add up to 1.
        hot_percentile, cold_percentile: of a module's scores; cold experts have also had no token for cold_steps.
        freeze: whether cold experts' pages leave the device at once. frozen: what a frozen expert's tokens do: ``wake``
            it, or go to the next-best expert (``reroute``, which changes the mathematics).
        probe_share: share of the frozen experts that are tried out when the cold threshold rises.
        probe_seconds: how fast one must answer to wake.
        alarm_percentile, alarm_hours: an expert that is below it for so long is warned of.
    """

    enabled: bool = True
    window_steps: int = 100
    refresh_steps: int = 10
    compute_weight: float = 0.5
    memory_weight: float = 0.3
    communication_weight: float = 0.2
    hot_percentile: float = 90.0
    cold_percentile: float = 30.0
    cold_steps: int = 5
    freeze: bool = True
    frozen: Frozen = "wake"
    probe_share: float = 0.05
    probe_seconds: float = 0.5
    alarm_percentile: float = 10.0
    alarm_hours: float = 24.0

    def __post_init__(self) -> None:
        for key in ("enabled", "freeze"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"heat.{key}={getattr(self, key)!r} must be true or false")
        if self.frozen not in get_args(Frozen):
            known = ", ".join(get_args(Frozen))
            raise ValueError(f"heat.frozen={self.frozen!r} is unknown; choose one of {known}")
        if self.frozen == "reroute" and not (self.enabled and self.freeze):
            raise ValueError("heat.frozen=reroute freezes nothing where heat.enabled or heat.freeze is false; set both")
        for key in ("window_steps", "refresh_steps", "cold_steps"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"heat.{key}={value!r} must be a whole number of steps, 1 or more")
        for key in ("compute_weight", "memory_weight", "communication_weight", "probe_share"):
            _check_number("heat", self, key, most=1.0, what="between 0 and 1")
        for key in ("hot_percentile", "cold_percentile", "alarm_percentile"):
            _check_number("heat", self, key, most=100.0, what="a percentile between 0 and 100")
        for key in ("probe_seconds", "alarm_hours"):
            _check_number("heat", self, key, most=float("inf"), what="0 or more")
        self._check_together()

    def _check_together(self) -> None:
        total = self.compute_weight + self.memory_weight + self.communication_weight
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"heat: compute_weight {self.compute_weight:g}, memory_weight {self.memory_weight:g} and "
                f"communication_weight {self.communication_weight:g} add up to {total:g}; they must add up to 1"
            )
        if self.cold_percentile >= self.hot_percentile:
            raise ValueError(
                f"heat.cold_percentile={self.cold_percentile:g} is not below hot_percentile={self.hot_percentile:g}: "
                "an expert would be hot and cold at once; lower the one or raise the other"
            )
        if self.alarm_percentile > self.cold_percentile:
            raise ValueError(
                f"heat.alarm_percentile={self.alarm_percentile:g} is above cold_percentile={self.cold_percentile:g}: "
                "the alarm would ring for experts that are not cold; lower it"
            )
        if self.window_steps < self.refresh_steps:
            raise ValueError(
                f"heat.window_steps={self.window_steps} is shorter than refresh_steps={self.refresh_steps}; "
                "lengthen the one or shorten the other"
            )


def _check_number(section: str, config: object, key: str, *, most: float, what: str) -> None:
    value = getattr(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{section}.{key}={value!r} must be {what}")


@dataclass(frozen=True)
class CheckpointConfig:
    """What checkpoints are like.

    Attributes:
        format: ``stock``, the training framework's own, or ``paged``, the project's.
        beside: whether a save goes on beside training. full_every: every n-th save stores all pages, those between only
            what changed. keep: newest checkpoints that stay, at least 2; None keeps all.
        staging_bytes: memory that a save beside training may take for copies.
        cpus: cores that its thread is bound to, as in ``0,2-4``; None for all.
    """

    format: CheckpointFormat = "stock"
    beside: bool = False
    full_every: int = 1
    keep: int | None = None
    staging_bytes: int = 64 * 2**20
    cpus: str | None = None

    def __post_init__(self) -> None:
        if self.format not in get_args(CheckpointFormat):
            known = ", ".join(get_args(CheckpointFormat))
            raise ValueError(f"checkpoint.format={self.format!r} is unknown; choose one of {known}")
        if not isinstance(self.beside, bool):
            raise ValueError(f"checkpoint.beside={self.beside!r} must be true or false")
        for key, least in (("full_every", 1), ("keep", 2)):
            value = getattr(self, key)
            if (value is None and key == "keep") or (type(value) is int and value >= least):
                continue
            raise ValueError(f"checkpoint.{key}={value!r} must be a whole number, {least} or more")
        object.__setattr__(self, "staging_bytes", parse_bytes(self.staging_bytes, key="checkpoint.staging_bytes"))
        self.cpu_set()
        changed = [f.name for f in fields(self) if f.name != "format" and getattr(self, f.name) != f.default]
        if changed and self.format == "stock":
            raise ValueError(
                f"checkpoint.{changed[0]}={getattr(self, changed[0])} has no effect on stock's format; "
                "add checkpoint.format: paged (--megascale-checkpoint-format paged)"
            )

    def cpu_set(self) -> frozenset[int] | None:
        """``cpus`` as numbers. ValueError where it is no list of them."""
        if self.cpus is None:
            return None
        found: set[int] = set()
        for part in str(self.cpus).split(","):
            match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise ValueError(f"checkpoint.cpus={self.cpus!r} is not a list of cores; write e.g. 0,2-4")
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
        return frozenset(found)


@dataclass(frozen=True)
class ObserveConfig:
    """What a run writes down about its pages. Nothing of it changes a result.

    Attributes:
        trace: file for a trace of every use of a page, to be replayed under other policies and budgets.
        report: folder for what happened to pages over time, with pictures at the end.
        routing: folder for what every router chose, for `megascale topology plan` and `simulate`.
    """

    trace: str | None = None
    report: str | None = None
    routing: str | None = None


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
