"""The models that are compared: `configs/<preset>.yaml`, with what a measurement adds."""

from pathlib import Path

from scripts.measuring.processes import ROOT

PRESETS = ("quickstart", "coarse", "fine")


def preset_path(name: str) -> Path:
    """The configuration of a preset. Raises ValueError when there is none of that name."""
    path = ROOT / "configs" / f"{name}.yaml"
    if name not in PRESETS or not path.is_file():
        raise ValueError(f"preset {name!r} is unknown; there are {', '.join(PRESETS)}")
    return path


def preset_flags(name: str, *, data_path: Path, train_iters: int, bf16: bool = False) -> tuple[str, ...]:
    """Flags of `pretrain_moe.py` for a preset on a corpus."""
    flags = ["--yaml-cfg", str(preset_path(name)), "--data-path", str(data_path), "--train-iters", str(train_iters)]
    return (*flags, "--bf16") if bf16 else tuple(flags)
