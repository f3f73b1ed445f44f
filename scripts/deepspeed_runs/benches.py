"""What the processes of ``measure.py deepspeed`` do: one object a rank (see ``scripts.measuring.processes``)."""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scripts.deepspeed_runs.clipping import clipped, numbers_apart, reference
from scripts.deepspeed_runs.models import Size, build, configuration
from scripts.deepspeed_runs.proof import Case, Deviations, Side, batches_of, prove
from scripts.deepspeed_runs.state import State, read_state


class Bench:
    """A process with DeepSpeed and the section at hand. ``memory_limit_bytes``: private memory, from here on."""

    def __init__(self, rank: int, world: int, *, memory_limit_bytes: int | None = None) -> None:
        self.rank, self.world = rank, world
        import deepspeed
        import transformers  # noqa: F401

        import deepspeed_ext  # noqa: F401
        from deepspeed_ext.cpu import without_compiled_ops

        deepspeed.utils.logger.setLevel("WARNING")
        without_compiled_ops()
        if memory_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))

    def prove(self, case: Case) -> Deviations:
        """See :func:`scripts.deepspeed_runs.proof.prove`. A collective."""
        return prove(self.rank, self.world, case=case)

    def clip_apart(self, case: Case) -> float:
        """Numbers of clipping by module, against plain PyTorch in one process. A collective."""
        return numbers_apart(clipped(self.rank, self.world, case=case), reference(self.world, case=case))

    def save(self, case: Case, folder: str) -> State:
        """The state after three steps, which are saved. A collective."""
        side = self._side(case)
        for step in range(3):
            side.step(batches_of(case, self.rank, self.world, step))
        side.engine.save_checkpoint(folder)
        return read_state(side.engine)

    def load(self, case: Case, folder: str) -> State:
        """The state of a run that has loaded them. A collective."""
        side = self._side(case)
        side.engine.load_checkpoint(folder)
        return read_state(side.engine)

    def _side(self, case: Case) -> Side:
        return Side(case, build(configuration(case.family, case.size), seed=7), megascale=True)

    # -- io against ZeRO-3 NVMe

    def time_steps(
        self, config: Mapping[str, Any], size: Size, *, narrow: int | None, warmup: int, steps: int, length: int
    ) -> tuple[list[float], list[int]]:
        """Seconds of each step, and bytes read from and written to disks; ``narrow``: experts the router may use."""
        import deepspeed

        model = build(configuration("mixtral", size), seed=7)
        if narrow is not None:
            for name, module in model.named_modules():
                if name.endswith(".gate"):
                    module.register_forward_hook(_only(narrow))
        engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(dict(config)))
        seconds, moved = [], []
        for step in range(warmup + steps):
            generator = torch.Generator().manual_seed(step)
            shape = (engine.train_micro_batch_size_per_gpu(), length)
            batch = torch.randint(3, size.vocabulary, shape, generator=generator)
            before, start = _disk_bytes(), time.perf_counter()
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            if step >= warmup:
                seconds.append(time.perf_counter() - start)
                moved.append(_disk_bytes() - before)
        return seconds, moved

    # -- a model larger than memory

    def private_bytes(self) -> int:
        """Private memory that this process has asked for."""
        from scripts.measuring.memory import private_bytes

        return private_bytes()

    def publish(self, config: Mapping[str, Any], size: Size, folder: str) -> int:
        """Builds a model of random weights in pages and publishes it; returns the bytes of its files."""
        import deepspeed
        from transformers import AutoModelForCausalLM

        import deepspeed_ext

        with deepspeed_ext.init(config):
            model = AutoModelForCausalLM.from_config(configuration("mixtral", size))
        engine, *_ = deepspeed.initialize(model=model, config=dict(config))
        deepspeed_ext.export_hf(engine, folder)
        engine.destroy()
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))

    def read(self, config: Mapping[str, Any], folder: str) -> float:
        """Loads a published model into pages, and returns its loss on a few tokens."""
        import deepspeed
        from transformers import AutoModelForCausalLM

        import deepspeed_ext

        with deepspeed_ext.init(config):
            model = AutoModelForCausalLM.from_pretrained(folder)
        engine, *_ = deepspeed.initialize(model=model, config=dict(config))
        tokens = torch.arange(3, 35).view(1, 32)
        with torch.no_grad():
            loss = float(engine(input_ids=tokens, labels=tokens).loss)
        engine.destroy()
        return loss


def _only(experts: int) -> Any:  # noqa: ANN401 - a hook
    """Lets Mixtral's router choose among the first ``experts`` experts only, by stock's formula."""

    def hook(router: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        logits = output[0].clone()
        logits[:, experts:] = float("-inf")
        values, indices = torch.topk(torch.softmax(logits.float(), dim=-1), router.top_k, dim=-1)
        return output[0], values / values.sum(dim=-1, keepdim=True), indices

    return hook


def _disk_bytes() -> int:
    """Bytes that this process has read from and written to storage."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])
