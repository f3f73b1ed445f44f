"""One fine-tuning run under DeepSpeed in a process of its own (one a rank), told step by step what to do."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale_omni.clipping import ClipReport
from scripts.comparison.collectives import CollectiveCounter
from scripts.comparison.worker import Made, Step, Totals
from scripts.deepspeed_runs.models import Size, build, configuration
from scripts.measuring.memory import peak_resident_bytes, private_bytes
from scripts.moe_trainer.corpus import VOCABULARY_SIZE, read_corpus

PRESET = Size(vocabulary=VOCABULARY_SIZE, hidden=256, ffn=512, layers=4, heads=4, experts=16, top_k=2, positions=512)
"""A model that two cores train in half a second a step."""


@dataclass(frozen=True)
class Job:
    """What to train, on what, how.

    ``model``: folder of a published model, or None for random weights of ``family`` at ``size``. ``config``: of
    DeepSpeed, whose megascale section decides. Text is bytes where there is no tokenizer.
    """

    config: Mapping[str, Any]
    data_path: str
    family: str = "mixtral"
    model: str | None = None
    size: Size = PRESET
    length: int = 128
    seed: int = 1234
    streamed: bool = False
    """Whether the model is loaded under ``deepspeed_ext.init`` (way b)."""


def without_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration for stock."""
    return {key: copy.deepcopy(value) for key, value in config.items() if key != "megascale"}


class FinetuningRun:
    """A target for ``scripts.measuring.processes.Workers``, and the loop of ``finetune_hf_moe.py``."""

    def __init__(self, rank: int, world: int, *, job: Job) -> None:
        self._rank, self._world, self._job = rank, world, job
        self._collectives = CollectiveCounter()
        self._collectives.install()
        self._expert_peak = self._data_peak = self._steps = 0
        self.clip_report: ClipReport | None = None
        """Of the last step, where gradients are clipped by module."""
        import deepspeed

        import deepspeed_ext
        from deepspeed_ext.cpu import without_compiled_ops

        deepspeed.utils.logger.setLevel("WARNING")
        if not torch.cuda.is_available():
            without_compiled_ops()
        with deepspeed_ext.init(job.config if job.streamed else {}):
            model, self._tokens = _model_and_tokens(job)
        self._parameters = sum(p.numel() for p in model.parameters())
        self.engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(dict(job.config)))
        self.engine.train()
        self._look_between_backward_and_step()
        self._look()

    def describe(self) -> Made:
        """The classes that run."""
        experts = {type(m).__name__ for name, m in self.engine.module.named_modules() if name.endswith(".experts")}
        return Made(
            experts=" + ".join(sorted(experts)) or "none",
            dispatcher=f"ZeRO {int(self.engine.zero_optimization_stage())}",
            optimizer=type(self.engine.optimizer).__name__,
            tokens_per_step=self.engine.train_batch_size() * self._job.length,
            parameters=self._parameters + self._paged_parameters(),
        )

    def train(self, steps: int) -> list[Step]:
        """Makes optimizer steps; every rank has other text."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> Step:
        sent, start = self._collectives.sent_bytes, time.perf_counter()
        losses = []
        for _ in range(self.engine.gradient_accumulation_steps()):
            batch = self._batch()
            loss = self.engine(input_ids=batch, labels=batch).loss
            losses.append(float(loss.detach()))
            self.engine.backward(loss)
            self.engine.step()
        seconds = time.perf_counter() - start
        self._steps += 1
        norm = self.engine.get_global_grad_norm()
        self._look()
        mean = sum(losses) / len(losses)
        self.clip_report = getattr(self.engine, "clip_report", None)
        return Step(mean, None if norm is None else float(norm), seconds, self._collectives.sent_bytes - sent)

    def _batch(self) -> torch.Tensor:
        count, length = self.engine.train_micro_batch_size_per_gpu(), self._job.length
        number = self._steps * self.engine.gradient_accumulation_steps() + self.engine.micro_steps % 97
        generator = torch.Generator().manual_seed(self._job.seed + 7919 * number + 104729 * self._rank)
        starts = torch.randint(0, len(self._tokens) - length, (count,), generator=generator).tolist()
        return torch.stack([self._tokens[start : start + length] for start in starts]).to(self.engine.device)

    def totals(self) -> Totals:
        """Peaks and counters so far."""
        from megascale_omni.experts.overview import counters

        counts = counters([self.engine.module]) or {}
        return Totals(
            peak_rss_bytes=peak_resident_bytes(),
            expert_state_peak_bytes=self._expert_peak,
            page_faults=counts.get("page_faults", 0),
            bytes_read=counts.get("bytes_loaded", 0),
            bytes_written=counts.get("bytes_written", 0),
            peak_data_bytes=self._data_peak,
        )

    def export(self, folder: str) -> None:
        """A plain Hugging Face checkpoint. A collective."""
        import deepspeed_ext

        deepspeed_ext.export_hf(self.engine, folder)

    def _look_between_backward_and_step(self) -> None:
        """Gradient pages exist there: paged state is at its largest."""
        step = self.engine.step

        def looked_at(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._look()
            return step(*args, **kwargs)

        self.engine.step = looked_at

    def _look(self) -> None:
        self._expert_peak = max(self._expert_peak, resident_expert_bytes(self.engine))
        self._data_peak = max(self._data_peak, private_bytes())

    def _paged_parameters(self) -> int:
        modules = getattr(self.engine, "modules_in_pages", [])
        built = self._job.streamed
        return sum(e.all_experts * e.shape.num_parameters for e in modules) if built else 0


def resident_expert_bytes(engine: Any) -> int:  # noqa: ANN401
    """Bytes of this rank's routed experts: pages in memory, or what stock's ZeRO stage keeps of every expert parameter.

    Stock, by parameter: the weight and its gradient in the training dtype, fp32 moments, a fp32 master beside half
    precision; moments and masters divided by ZeRO 1 to 3, gradients by 2 and 3, weights by 3. On NVMe it is the buffers
    that they are read into.
    """
    modules = getattr(engine, "modules_in_pages", None)
    if modules is not None:
        return sum(sum(m.resident_bytes().values()) for m in {experts.manager for experts in modules})
    stage, world = int(engine.zero_optimization_stage()), torch.distributed.get_world_size()
    zero = engine._config.zero_config
    if zero.offload_param is not None and zero.offload_param.device == "nvme":
        width = 2 if engine.bfloat16_enabled() else 4
        of_weights = zero.offload_param.buffer_count * zero.offload_param.buffer_size * width
        of_states = 0 if zero.offload_optimizer is None else zero.offload_optimizer.buffer_count * zero.sub_group_size
        return int(of_weights + 4 * of_states)
    total = 0.0
    for name, parameter in engine.module.named_parameters():
        if ".experts." in name:
            numel, width = getattr(parameter, "ds_numel", parameter.numel()), parameter.element_size()
            state = 8 + (4 if width < 4 else 0)
            total += numel * (width / (world if stage == 3 else 1) + width / (world if stage >= 2 else 1))
            total += numel * state / (world if stage else 1)
    return int(total)


def _model_and_tokens(job: Job) -> tuple[torch.nn.Module, torch.Tensor]:
    corpus = read_corpus(job.data_path)
    if job.model is None:
        tokens = torch.from_numpy(corpus.tokens.astype("int64"))
        return build(configuration(job.family, job.size), seed=job.seed), tokens
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(job.model)
    if not list(Path(job.model).glob("tokenizer*")):
        return model, torch.from_numpy(corpus.tokens.astype("int64"))
    text = corpus.tokens[: 1 << 22].tobytes().decode(errors="replace")
    ids = AutoTokenizer.from_pretrained(job.model)(text, return_tensors="pt").input_ids[0]
    return model, ids


def largest_parameter(job: Job) -> int:
    """Elements of the model's largest parameter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job.model) if job.model else configuration(job.family, job.size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return max(parameter.numel() for parameter in model.parameters())


def read_config(path: str | Path) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        content: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"DeepSpeed configuration {path} cannot be read: {error}") from error
    return content
