"""The models that are compared: `configs/<preset>.yaml`, with what a measurement adds."""

from pathlib import Path

from scripts.measuring.processes import ROOT

PRESETS = ("quickstart", "coarse", "fine")


_FOUR_PAGES_AN_EXPERT_BYTES = {"coarse": 2 * 2**20}
"""In fp32; presets that are not here have the default page size, by which each of their experts is one page."""


def page_size_bytes(name: str, *, bf16: bool = False) -> int | None:
    """Weight bytes of a page in a preset; None: the default. In bf16 half of it holds as many neurons."""
    size = _FOUR_PAGES_AN_EXPERT_BYTES.get(name)
    return size if size is None or not bf16 else size // 2


def megascale_flags(name: str, *, bf16: bool = False) -> tuple[str, ...]:
    """What `--megascale` is given besides."""
    size = page_size_bytes(name, bf16=bf16)
    return () if size is None else ("--megascale-page-size", str(size))


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
