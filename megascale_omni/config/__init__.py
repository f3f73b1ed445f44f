"""MegaScale's configuration: one frozen dataclass a concern, filled from arguments, JSON or YAML.

Every error names the key, the value and what would work. Adding an option means adding a field to its section; adapters
only parse.
"""

from megascale_omni.clipping.settings import ClipConfig
from megascale_omni.config.checkpoint import CheckpointConfig, CheckpointFormat
from megascale_omni.config.compute import BackendChoice, ComputeConfig, OptimizerDevice, ProductsChoice
from megascale_omni.config.distributed import Discovery, Dispatcher, DistributedConfig, Fetch, GradWire, Move
from megascale_omni.config.heat import Frozen, HeatConfig
from megascale_omni.config.observe import ObserveConfig
from megascale_omni.config.paging import Checksum, PagingConfig, Prefetch
from megascale_omni.config.sections import MegaScaleConfig
from megascale_omni.config.sizes import parse_budget, parse_bytes

__all__ = [
    "BackendChoice",
    "CheckpointConfig",
    "CheckpointFormat",
    "Checksum",
    "ClipConfig",
    "ComputeConfig",
    "Discovery",
    "Dispatcher",
    "DistributedConfig",
    "Fetch",
    "Frozen",
    "GradWire",
    "HeatConfig",
    "MegaScaleConfig",
    "Move",
    "ObserveConfig",
    "OptimizerDevice",
    "PagingConfig",
    "Prefetch",
    "ProductsChoice",
    "parse_budget",
    "parse_bytes",
]
