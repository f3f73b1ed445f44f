"""Which module (MPU) a parameter belongs to: patterns of names, given or found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

REST = "rest"
"""The module of parameters that no pattern matches."""

MAX_BLOCKS = 4
"""Most layer blocks that a model without other structure is cut into."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)(?:\.|$)")
_EXPERTS = re.compile(r"(?:^|\.)(?:local_experts|experts|deepspeed_experts)(?:\.|$)")
# fmt: off
_ALIGNERS = frozenset(
    (
        "multi_modal_projector", "multimodal_projector", "mm_projector", "vision_projection", "vision_projector",
        "visual_projection", "image_projection", "img_projection", "audio_projection", "image_to_text_projection",
        "projector", "aligner", "connector", "resampler", "merger", "perceiver", "qformer", "q_former", "mlp1",
    )
)
_SENSES = frozenset(
    (
        "vision_model", "vision_tower", "vision_encoder", "visual", "vit", "image_encoder", "image_model",
        "image_tower", "image_embed", "img_processor", "vpm", "apm", "audio_tower", "audio_model", "audio_encoder",
        "audio_embed", "speech_encoder",
    )
)
_GENERATORS = frozenset(
    (
        "language_model", "text_model", "text_decoder", "text_generator", "generator", "llm", "lm_head", "decoder",
    )
)
# fmt: on


@dataclass(frozen=True)
class MpuMap:
    """Modules in a fixed order, and the rules by which parameters find theirs.

    Attributes:
        names: of the modules, in the order of every table and message.
        rules: (pattern, module name), tried in order; shell patterns over whole names (``*`` also matches dots).
        families: whether encoder, aligner and generator are told apart by name instead.
        block_starts: first layers of the blocks, where layer blocks decide instead.
    """

    names: tuple[str, ...]
    rules: tuple[tuple[str, str], ...] = ()
    families: bool = False
    block_starts: tuple[int, ...] = ()
    _known: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def index(self, parameter: str) -> int:
        """The place of a parameter's module in ``names``.

        Raises:
            ValueError: no rule matches and there is no module ``rest``.
        """
        found = self._known.get(parameter)
        if found is None:
            name = self._module(parameter)
            if name not in self.names:
                raise ValueError(f"parameter {parameter} belongs to no module; known modules: {', '.join(self.names)}")
            found = self._known[parameter] = self.names.index(name)
        return found

    def _module(self, parameter: str) -> str:
        if self.families:
            return _family(parameter)
        if self.block_starts:
            return _block(parameter, self.block_starts)
        return next((module for pattern, module in self.rules if fnmatchcase(parameter, pattern)), REST)


def mpus_from_patterns(patterns: Mapping[str, str], parameters: Iterable[str]) -> MpuMap:
    """A map from patterns of parameter names (``"vision_tower.*"``) to modules; the first pattern that matches decides.

    Parameters without a match make up the module ``rest``. ``parameters``: all names of the model, on any rank.

    Raises:
        ValueError: no patterns, one that matches nothing, a module whose parameters all are others' by the patterns
        before its own, or a name that is no text.
    """
    if not patterns:
        raise ValueError("clip.mpus is empty; give at least one pattern, e.g. {'*': model}")
    for pattern, module in patterns.items():
        if not (isinstance(pattern, str) and isinstance(module, str) and pattern and module):
            raise ValueError(f"clip.mpus: {pattern!r}: {module!r} must be a pattern of parameter names and a name")
    names = list(parameters)
    rules = tuple(patterns.items())
    used = {next((i for i, (p, _) in enumerate(rules) if fnmatchcase(name, p)), None) for name in names}
    for number, (pattern, module) in enumerate(rules):
        if number not in used and not any(fnmatchcase(name, pattern) for name in names):
            example = names[0] if names else "none"
            raise ValueError(f"clip.mpus: no parameter matches {pattern!r} ({module}); a parameter's name is {example}")
    taken = {REST if number is None else rules[number][1] for number in used}
    for pattern, module in rules:
        if module not in taken:
            raise ValueError(
                f"clip.mpus: all parameters that {pattern!r} ({module}) matches are taken by patterns before it; the "
                "first that matches decides: move it up, or leave it out"
            )
    modules = list(dict.fromkeys(module for _, module in rules))
    if None in used and REST not in modules:
        modules.append(REST)
    return MpuMap(tuple(modules), rules)


def mpus_from_file(path: str | Path, parameters: Iterable[str]) -> MpuMap:
    """As :func:`mpus_from_patterns`, from a YAML (or JSON) file ``{pattern: module}``.

    Raises:
        ValueError: the file cannot be read or holds something else.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError("a file of modules needs PyYAML: pip install 'megascale[megatron]'") from error
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"clip.mpus={path} cannot be read: {error}; give a YAML file of patterns") from error
    if not isinstance(values, dict):
        raise ValueError(f"clip.mpus={path} must hold a mapping of patterns to modules, not {type(values).__name__}")
    return mpus_from_patterns(values, parameters)


def default_mpus(parameters: Iterable[str]) -> MpuMap:
    """Modules found by name.

    A model with a vision or audio part is cut into ``encoder``, ``aligner``, ``generator`` and, where it has them,
    ``experts``. Any other model is cut into at most four blocks of layers, and each block into ``dense`` and
    ``experts``; what lies outside of layers is ``embedding``. A model without layers is one module, ``model``.
    """
    names = list(parameters)
    families = {_family(name) for name in names}
    if {"encoder", "generator"} <= families and _is_multimodal(names):
        known = ("encoder", "aligner", "generator", "experts")
        return MpuMap(tuple(name for name in known if name in families), families=True)
    layers = sorted({int(match[1]) for name in names if (match := _LAYER.search(name))})
    if not layers:
        return MpuMap(("model",), (("*", "model"),))
    count = layers[-1] + 1
    blocks = min(MAX_BLOCKS, count)
    starts = tuple(block * count // blocks for block in range(blocks))
    found = {_block(name, starts) for name in names}
    order = ["embedding", *(f"{kind}_{start}" for start in starts for kind in ("dense", "experts")), "dense", "experts"]
    return MpuMap(tuple(name for name in order if name in found), block_starts=starts)


def mpus_for(given: str | Mapping[str, str] | None, parameters: Iterable[str]) -> MpuMap:
    """The map that ``clip.mpus`` asks for."""
    if given is None:
        return default_mpus(parameters)
    if isinstance(given, str):
        return mpus_from_file(given, parameters)
    return mpus_from_patterns(given, parameters)


def _outside_layers(parameter: str) -> list[str]:
    """The components of a name up to its first layer: inside of layers the same words mean other things."""
    match = _LAYER.search(parameter)
    return (parameter if match is None else parameter[: match.start() + 1]).split(".")


def _is_multimodal(names: Sequence[str]) -> bool:
    """An encoder and a decoder alone are a translator; a vision or audio part, or an aligner, makes it multimodal."""
    return any((_ALIGNERS | _SENSES).intersection(_outside_layers(name)) for name in names)


def _family(parameter: str) -> str:
    components = _outside_layers(parameter)
    if _ALIGNERS.intersection(components):
        return "aligner"
    # The outermost word decides: a language model may have an `encoder` inside.
    for component in components:
        if component in _GENERATORS:
            break
        if component in _SENSES or component == "encoder":
            return "encoder"
    # Many language models have no name of their own: what is neither of the others is the generator's.
    return "experts" if _EXPERTS.search(parameter) else "generator"


def _block(parameter: str, starts: Sequence[int]) -> str:
    kind = "experts" if _EXPERTS.search(parameter) else "dense"
    match = _LAYER.search(parameter)
    if match is None:
        return "embedding" if kind == "dense" else kind
    return f"{kind}_{max(start for start in starts if start <= int(match[1]))}"
