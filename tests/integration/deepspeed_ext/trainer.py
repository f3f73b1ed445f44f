"""What the ranks of test_trainer.py do."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.deepspeed_runs.models import Size, build, configuration
from tests.distributed.deepspeed_state import fresh_deepspeed

SIZE = Size(experts=4, layers=1)
STEPS = 4


class Text(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of random tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, SIZE.vocabulary, (12,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


@dataclass
class Run:
    """What a rank has seen: losses by step, validation losses, losses of a run that went on from step 2's checkpoint,
    and the published model.
    """

    engine: str
    losses: list[float]
    evaluated: list[float]
    resumed: list[float]
    published: dict[str, torch.Tensor]


def train(rank: int, world: int, *, stage: int, client: bool, megascale: bool, folder: str) -> Run:
    """Trains, saves in the middle, publishes; and goes on from the middle in a new Trainer."""
    with fresh_deepspeed(), _Environment(rank, world):
        import deepspeed_ext  # noqa: F401

        config = _config(stage, client=client, megascale=megascale)
        whole, resumed = _Session(config, folder), _Session(config, folder)
        whole.trainer.train()
        whole.trainer.save_model(str(Path(folder) / "published"))
        engine = type(whole.trainer.model_wrapped).__name__
        resumed.trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
        published: dict[str, torch.Tensor] = {}
        for file in (Path(folder) / "published").glob("*.safetensors"):
            published |= load_file(file)
        return Run(engine, whole.seen("loss"), whole.seen("eval_loss"), resumed.seen("loss")[-2:], published)


def _config(stage: int, *, client: bool, megascale: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": None,
    }
    if not client:
        parameters = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": parameters}
        warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    return config | ({"megascale": {"enabled": True}} if megascale else {})


class _Session:
    """A Trainer with a model of its own."""

    def __init__(self, config: dict[str, Any], folder: str) -> None:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
            learning_rate=3e-3,
            weight_decay=0.1,
            adam_epsilon=1e-5,
            warmup_steps=1,
            deepspeed=copy.deepcopy(config),
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
        )
        text = Text()
        self.trainer = Trainer(
            model=build(configuration("mixtral", SIZE), seed=3),  # type: ignore[arg-type]
            args=arguments,
            train_dataset=text,
            eval_dataset=torch.utils.data.Subset(text, range(4)),
        )

    def seen(self, what: str) -> list[float]:
        """Values of the log, by step."""
        return [entry[what] for entry in self.trainer.state.log_history if what in entry]


class _Environment:
    """What a launcher would have said; and nothing is left of Accelerate's state of the process."""

    def __init__(self, rank: int, world: int) -> None:
        names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # of groups that there are already
        self._wanted = {**{name: str(value) for name, value in names.items()}, **address}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._wanted}
        os.environ.update(self._wanted)

    def __exit__(self, *_: object) -> None:
        from accelerate.state import AcceleratorState, PartialState
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        AcceleratorState._reset_state()
        PartialState._reset_state()
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
