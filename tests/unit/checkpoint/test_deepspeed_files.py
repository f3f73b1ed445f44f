"""DeepSpeed's flat partitions, written slowly as ZeRO 1, 2 and 3 lay them out, are read back tensor by tensor.

That DeepSpeed lays them out so is shown with its own files in tests/integration/deepspeed_ext/test_convert.py.
"""

from __future__ import annotations

import math
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni import cli
from megascale_omni.checkpoint.deepspeed_files import MASTER, MOMENTS, DeepSpeedFiles

KINDS = (MASTER, *MOMENTS)
Parameters = dict[str, torch.Tensor]
SHAPES = st.lists(st.sampled_from([(1,), (5,), (3, 4), (2, 3, 2)]), min_size=1, max_size=4)


def zero12(groups: list[Parameters], ranks: int, padding: int) -> list[list[torch.Tensor]]:
    """By rank and group: parameters behind each other, each with its padding, cut into equal parts."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        flat = torch.cat([torch.cat([p.reshape(-1), torch.zeros(padding)]) for p in group.values()])
        size = -(-len(flat) // ranks)
        flat = torch.cat([flat, torch.zeros(size * ranks - len(flat))])
        for rank in range(ranks):
            parts[rank].append(flat[rank * size : (rank + 1) * size].clone())
    return parts


def zero3(groups: list[Parameters], ranks: int) -> list[list[torch.Tensor]]:
    """By rank and group: every parameter cut into equal parts, a rank's parts behind each other."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        for rank in range(ranks):
            mine = []
            for parameter in group.values():
                size = -(-parameter.numel() // ranks)
                flat = torch.cat([parameter.reshape(-1), torch.zeros(size * ranks - parameter.numel())])
                mine.append(flat[rank * size : (rank + 1) * size])
            parts[rank].append(torch.cat(mine))
    return parts


def write(folder: Path, groups: list[Parameters], *, stage: int, ranks: int, padding: int = 0, **more: Any) -> None:
    """The files of a run whose three kinds of state are its parameters, and these plus one and two."""

    def cut(number: int) -> list[list[torch.Tensor]]:
        shifted = [{name: tensor + number for name, tensor in group.items()} for group in groups]
        return zero3(shifted, ranks) if stage == 3 else zero12(shifted, ranks, padding)

    kinds = [cut(number) for number in range(3)]
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups]
    module = {name: tensor if stage < 3 else torch.empty(0) for group in groups for name, tensor in group.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": shapes, "global_steps": 4, **more}
    for rank in range(ranks):
        prefix = f"zero_pp_rank_{rank}_"
        state = {
            index: {"step": torch.tensor(4.0), MOMENTS[0]: kinds[1][rank][index], MOMENTS[1]: kinds[2][rank][index]}
            for index in range(len(groups))
        }
        inner = {"state": state, "param_groups": [{"lr": 0.1, "params": [index]} for index in range(len(groups))]}
        outer: dict[str, Any]
        if stage == 3:
            outer = {"fp32_flat_groups": kinds[0][rank], "optimizer_state_dict": inner}
        else:
            lean = [
                part[: max(0, sum(p.numel() + padding for p in group.values()) - rank * len(part))]
                for part, group in zip(kinds[0][rank], groups, strict=True)
            ]
            paddings = [[padding] * len(group) for group in groups]
            outer = {"single_partition_of_fp32_groups": lean, "base_optimizer_state": inner}
            outer["param_alignment_paddings"] = paddings
        outer |= {"zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks] * len(groups)}
        torch.save({"optimizer_state_dict": outer}, folder / f"{prefix}mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            torch.save(model, folder / f"{prefix if stage == 3 else ''}mp_rank_00_model_states.pt")


def parameters(shapes: list[tuple[int, ...]], first: int = 0) -> Parameters:
    found = {}
    for number, shape in enumerate(shapes):
        found[f"p{first}.{number}"] = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 100 * number
    return found


@settings(max_examples=25)
@given(st.lists(SHAPES, min_size=1, max_size=2), st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(0, 2))
def test_every_element_is_found(shapes, ranks, stage, padding):
    groups = [parameters(of_group, first) for first, of_group in enumerate(shapes)]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), groups, stage=stage, ranks=ranks, padding=padding)
        files = DeepSpeedFiles(Path(folder))
        assert (files.stage, files.num_ranks, files.steps, files.has_moments) == (stage, ranks, 4, True)
        for number, group in enumerate(groups):
            for name, tensor in group.items():
                assert files.shapes[name] == tensor.shape
                assert files.group_of[name] == number
                for shift, kind in enumerate(KINDS):
                    assert torch.equal(files.read(name, kind).view(tensor.shape), tensor + shift)
                half = tensor.numel() // 2
                assert torch.equal(files.read(name, MASTER, half), tensor.reshape(-1)[half:])


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        DeepSpeedFiles(folder)
    return str(error.value)


class Unsafe:
    """What a script might have put into its client state."""


@pytest.fixture
def groups() -> list[Parameters]:
    return [parameters([(3, 4), (5,)])]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_missing_or_another_kind_is_named(tmp_path, groups, stage):
    write(tmp_path, groups, stage=stage, ranks=3)
    last = tmp_path / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    last.rename(tmp_path / "zero_pp_rank_2_mp_rank_01_optim_states.pt")
    assert "is of tensor-parallel rank 1" in refusal(tmp_path)
    (tmp_path / "zero_pp_rank_2_mp_rank_01_optim_states.pt").unlink()
    assert "was saved by" in refusal(tmp_path)
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "has files of ranks [1] only" in refusal(tmp_path)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "has no files of ZeRO 1, 2 or 3" in refusal(tmp_path)
    write(tmp_path, groups, stage=stage, ranks=3)
    (tmp_path / "offloaded_tensors").mkdir()
    assert "offloaded_tensors, of an optimizer on NVMe" in refusal(tmp_path)


def test_damage_and_classes_that_would_run_code_are_named(tmp_path, groups, capsys):
    write(tmp_path, groups, stage=2, ranks=1, mine=Unsafe())
    assert "mp_rank_00_model_states.pt cannot be read: UnpicklingError" in refusal(tmp_path)
    assert "Unsafe" in refusal(tmp_path)
    write(tmp_path, groups, stage=2, ranks=1)
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:300])
    assert f"{path} cannot be read" in refusal(tmp_path)
    assert cli.main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "out"), "--to", "paged"]) == 1
    assert "optim_states.pt cannot be read" in capsys.readouterr().err


def test_another_optimizer_is_named(tmp_path, groups):
    write(tmp_path, groups, stage=2, ranks=1)
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0] = {"momentum_buffer": torch.zeros(1)}
    torch.save(content, path)
    assert "the optimizer keeps momentum_buffer, which is not Adam's" in refusal(tmp_path)
