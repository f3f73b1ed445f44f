"""fp32 weights of a whole model from a checkpoint's files, experts in pages included."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.checkpoint import tag_of
from megascale_omni.checkpoint.pages_file import FOLDER, PagesReader, has_pages, page_name
from megascale_omni.paging.names import NamedTensors

SCRIPT = "zero_to_fp32.py"
_RECOVERY_SCRIPT = '''#!/usr/bin/env python
"""Makes one fp32 state dict of this checkpoint, experts included: python zero_to_fp32.py . OUTPUT_FOLDER"""

from deepspeed_ext.fp32 import main

if __name__ == "__main__":
    main()
'''


def experts_fp32(folder: Path) -> dict[str, torch.Tensor]:
    """Named tensors of all experts in a checkpoint (the folder of its tag), in fp32: masters where there are any.

    Raises:
        ValueError: files that are damaged or missing.
    """
    reader = PagesReader(folder / FOLDER)
    found: dict[str, torch.Tensor] = {}
    for path, record in reader.modules.items():
        if record.style == "sequential":
            raise ValueError(
                f"{path}: experts of DeepSpeed's own MoE layer have no fp32 form; load the checkpoint and use "
                "engine.module.state_dict()"
            )
        layout = record.layout()
        names = NamedTensors(layout=layout, num_experts=record.num_experts, style=record.style)  # type: ignore[arg-type]
        tensors = {t.name: torch.zeros(t.shape) for t in names.tensors()}
        for expert in range(record.num_experts):
            for slice_ in range(layout.num_slices):
                name = page_name(path, expert, slice_)
                plane = "master" if "master" in reader.planes(name) else "weight"
                names.gather({(expert, slice_): reader.page(name, plane)}, tensors)
        found.update({f"{path}.{name}": tensor for name, tensor in tensors.items()})
    return found


def with_experts(
    stock: Callable[..., dict[str, Any]],
    checkpoint_dir: str,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Stock's ``get_fp32_state_dict_from_zero_checkpoint``, with the experts of a checkpoint that has them in pages."""
    found = tag_of(Path(checkpoint_dir), tag)
    paged = found is not None and has_pages(Path(checkpoint_dir) / found)
    state = stock(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode)
    return {**state, **experts_fp32(Path(checkpoint_dir) / found)} if paged and found is not None else state


def write_recovery_script(folder: Path) -> None:
    """The script that DeepSpeed leaves beside a checkpoint, in a form that knows pages."""
    script = folder / SCRIPT
    script.write_text(_RECOVERY_SCRIPT)
    script.chmod(0o755)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the script beside a checkpoint: stock's options but `--debug`, and always safetensors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument("checkpoint_dir", help="folder with the file `latest`")
    parser.add_argument("output_dir", help="folder for model.safetensors")
    parser.add_argument("-t", "--tag", help="another tag than that of `latest`")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file, e.g. 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="is done anyway")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="experts stay")
    args = parser.parse_args(argv)
    import deepspeed.utils.zero_to_fp32 as stock

    import deepspeed_ext  # noqa: F401 - makes stock's function know pages

    state = stock.get_fp32_state_dict_from_zero_checkpoint(
        args.checkpoint_dir, tag=args.tag, exclude_frozen_parameters=args.exclude_frozen_parameters
    )
    names = _write(Path(args.output_dir), state, max_shard_size=args.max_shard_size)
    print(f"{len(state)} tensors in {', '.join(str(Path(args.output_dir) / name) for name in names)}")


def _write(folder: Path, state: dict[str, torch.Tensor], *, max_shard_size: str) -> list[str]:
    """Files of at most a size, with an index where there are several; their names."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # Tied tensors are one tensor under two names, which the format has no word for.
    own = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    split = split_torch_state_dict_into_shards(
        own, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: own[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return list(split.filename_to_tensors)
