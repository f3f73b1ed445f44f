"""Settings from a YAML file, in Megatron-LM's way: argument names as keys, optionally under `language_model:` and
`model_parallel:`.
"""

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .errors import UsageError

SECTIONS = ("language_model", "model_parallel")


def read_yaml(path: str, actions: Sequence[argparse.Action]) -> dict[str, object]:
    """Return the file's settings as parser defaults, each converted and checked as its flag would be.

    A key is an argument's name (`add_bias_linear: false`) or a flag with underscores (`disable_bias_linear: true`). A
    list or a single value stand for a flag that takes several.

    Raises:
        UsageError: no such file, not YAML, an unknown key (with the nearest one), a value that does not fit its flag.
    """
    actions = [action for action in actions if action.dest not in ("help", "yaml_cfg")]
    by_destination = {action.dest: action for action in actions}
    by_flag = {flag.lstrip("-").replace("-", "_"): action for action in actions for flag in action.option_strings}
    settings: dict[str, object] = {}
    for key, value in _flatten(_load(path), path).items():
        name = key.replace("-", "_")
        action = by_flag.get(name) or by_destination.get(name)
        if action is None:
            nearest = difflib.get_close_matches(name, [*by_flag, *by_destination, *SECTIONS], n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise UsageError(f"{path}: unknown key {key!r}{hint}")
        if action.dest in settings:
            raise UsageError(f"{path}: {key!r} sets {action.dest!r} a second time; keep one of the two")
        settings[action.dest] = _convert(value, action, named_by_flag=name in by_flag, where=f"{path}: {key}")
    return settings


def _load(path: str) -> Mapping[object, object]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("--yaml-cfg needs PyYAML: install the extra 'megatron' of this project") from error
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--yaml-cfg {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--yaml-cfg {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--yaml-cfg {path} must hold 'name: value' settings, not a {type(content).__name__}")
    return content


def _flatten(content: Mapping[object, object], path: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in content.items():
        inner = value if isinstance(value, dict) and key in SECTIONS else {key: value}
        for name, item in inner.items():
            if str(name) in flat:
                raise UsageError(f"{path}: key {name!r} stands there twice")
            flat[str(name)] = item
    return flat


def _convert(value: object, action: argparse.Action, *, named_by_flag: bool, where: str) -> object:
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} must be true or false")
        if named_by_flag:
            return action.const if value else not action.const
        return value
    if value is None:
        return action.default
    several = action.nargs in ("*", "+") or isinstance(action.nargs, int)
    items = value if isinstance(value, list) and several else [value]
    converted = [_convert_item(item, action, where) for item in items]
    return converted if isinstance(value, list) and several else converted[0]


def _convert_item(value: object, action: argparse.Action, where: str) -> object:
    if isinstance(value, (bool, dict)) or (isinstance(value, list) and action.type in (int, float, None)):
        raise UsageError(f"{where}: {value!r} is not a value of {action.option_strings[-1]}")
    convert: Callable[[str], object] = action.type if callable(action.type) else str
    try:
        converted = convert(str(value))  # as text, as on a command line: 2.5 must not become the integer 2
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{where}: {value!r} is not a value of {action.option_strings[-1]} ({error})") from error
    if action.choices is not None and converted not in action.choices:
        raise UsageError(f"{where}: {value!r} is not one of {', '.join(map(str, action.choices))}")
    return converted
