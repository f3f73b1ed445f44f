"""What the ranks of test_clipping.py do."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megascale_omni.clipping import ClipConfig, CMSAClipper
from scripts.deepspeed_runs import clipping
from scripts.deepspeed_runs.clipping import numbers_apart, states_apart
from scripts.deepspeed_runs.models import build, configuration
from scripts.deepspeed_runs.proof import Case, Side, batches_of
from scripts.deepspeed_runs.state import read_state
from tests.distributed.deepspeed_state import fresh_deepspeed
from tests.integration.deepspeed_ext.ranks import differences


def apart(rank: int, world: int, *, cases: list[Case]) -> list[tuple[float, float, str]]:
    """Numbers and moments of each case against plain PyTorch in one process, which has the tokens of all ranks."""
    with fresh_deepspeed():
        import deepspeed_ext  # noqa: F401

        found = []
        for case in cases:
            run, expected = clipping.clipped(rank, world, case=case), clipping.reference(world, case=case)
            found.append((numbers_apart(run, expected), *states_apart(run, expected)))
        return found


def one_module_beside_stock(rank: int, world: int, *, cases: list[Case]) -> list[list[str]]:
    """Tensors, and the norm, that differ between the framework's clipping and one module with alpha 0."""
    with fresh_deepspeed():
        import deepspeed_ext  # noqa: F401

        found = []
        for case in cases:
            stock = Side(case, _model(case), megascale=True)
            norms = [stock.step(batches_of(case, rank, world, step))[1] for step in range(case.steps)]
            state = read_state(stock.engine)
            stock.engine.destroy()
            one = {"clip": {"mode": "cmsa", "alpha": 0, "mpus": {"*": "all"}}}
            run = clipping.clipped(rank, world, case=replace(case, section={**case.section, **one}))
            assert all(step.modules["all"]["clip_ratio"] < 1 for step in run.steps), "nothing was clipped"
            different = differences(state, run.state)
            if norms != [step.norm for step in run.steps] and None not in norms:  # ZeRO 0 in fp32 has none
                different.append(f"norms {norms} {[step.norm for step in run.steps]}")
            found.append(different)
        return found


def spoiled(
    rank: int, world: int, *, cases: list[tuple[Case, str]], rounds: int = 2
) -> list[tuple[list[str], int, list[str]]]:
    """Tensors that differ between a run whose last step has a NaN in a gradient, and one without that step; the steps
    that were left out; and what the log said.
    """
    with fresh_deepspeed():
        import deepspeed_ext  # noqa: F401

        found = []
        for case, where in cases:
            whole = clipping.clipped(rank, world, case=replace(case, steps=rounds - 1))
            with _logged() as lines:
                run = clipping.clipped(rank, world, case=replace(case, steps=rounds), spoil={rounds - 1: where})
            found.append((differences(whole.state, run.state), run.skipped_steps, list(lines)))
        return found


class _logged(logging.Handler):
    """Warnings of the clippers while it lasts."""

    def __enter__(self) -> list[str]:
        self._lines: list[str] = []
        self._loggers = [logging.getLogger(n) for n in ("megascale_omni.clipping.clipper", "deepspeed_ext.clipping")]
        for logger in self._loggers:
            logger.addHandler(self)
        return self._lines

    def emit(self, record: logging.LogRecord) -> None:
        if "left out" in record.getMessage():
            self._lines.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)


def _model(case: Case) -> torch.nn.Module:
    return build(configuration(case.family, case.size), seed=7)


def calibrated(rank: int, world: int, *, case: Case, folder: str) -> dict[str, object]:
    """A run that fits alpha, whole, and one that goes on from its checkpoint of the sixth step."""
    with fresh_deepspeed():
        import deepspeed_ext  # noqa: F401

        first = Side(case, _model(case), megascale=True)
        _steps(first, rank, world, range(6))
        first.engine.save_checkpoint(folder)
        whole = _steps(first, rank, world, range(6, 13))
        second = Side(case, _model(case), megascale=True)
        second.engine.load_checkpoint(folder)
        resumed = _steps(second, rank, world, range(6, 13))
        alphas = [record["alpha"] for record in whole]
        first.engine.destroy()
        second.engine.destroy()
        return {"same": repr(whole) == repr(resumed), "alphas": alphas, "stages": [r["stage"] for r in whole]}


def _steps(side: Side, rank: int, world: int, numbers: range) -> list[dict[str, Any]]:
    found = []
    for number in numbers:
        side.step(batches_of(side.case, rank, world, number))
        found.append(side.engine.clip_report.as_record())
    return found


# --- models without experts -------------------------------------------------------------------------------------------


class Captioner(torch.nn.Module):
    """An image encoder, an aligner and a text decoder; a batch without images reaches the decoder alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.vision_tower = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh())
        self.multi_modal_projector = torch.nn.Linear(9, 5)
        self.language_model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))

    def forward(self, images: torch.Tensor | None, texts: torch.Tensor) -> torch.Tensor:
        x = texts if images is None else texts + self.multi_modal_projector(self.vision_tower(images))
        loss: torch.Tensor = self.language_model(x).square().mean()
        return loss


class Tiny(torch.nn.Module):
    """Three parameters: of four ranks one holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = torch.nn.Linear(1, 1)
        self.language_model = torch.nn.Linear(1, 1, bias=False)
        for number, parameter in enumerate(self.parameters()):
            torch.nn.init.constant_(parameter, 0.5 + number)

    def forward(self, images: torch.Tensor | None, texts: torch.Tensor) -> torch.Tensor:
        assert images is not None
        loss: torch.Tensor = self.language_model(self.vision_tower(images[:, :1])).square().mean()
        return loss


def dense_apart(rank: int, world: int, *, kind: str, stages: list[int], offload: bool = False) -> list[float]:
    """The largest relative difference of the numbers of any step and module from plain PyTorch's, by stage.

    ``kind``: ``whole``, ``frozen`` (the encoder), ``absent`` (no images at the second step), ``tiny``.
    """
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        found = []
        for stage in stages:
            engine, *_ = deepspeed.initialize(model=_dense(kind), config=_dense_config(stage, offload=offload))
            records = []
            for step in range(_steps_of(kind)):
                loss = engine(*_dense_batch(kind, step, range(rank, rank + 1)))
                engine.backward(loss)
                engine.step()
                records.append(engine.clip_report.as_record()["mpus"])
            engine.destroy()
            # The spread of one element is what rounding makes of it.
            keys = ("norm",) if kind == "tiny" else ("norm", "gvc", "threshold", "clip_ratio")
            found.append(_records_apart(records, _dense_reference(kind, world), keys=keys))
        return found


def encoder_norms(rank: int, world: int, *, stage: int, offload: bool) -> list[float]:
    """At a step with images and one without."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        engine, *_ = deepspeed.initialize(model=_dense("absent"), config=_dense_config(stage, offload=offload))
        norms = []
        for step in range(2):
            engine.backward(engine(*_dense_batch("absent", step, range(rank, rank + 1))))
            engine.step()
            norms.append(engine.clip_report.module("encoder").norm)
        engine.destroy()
        return norms


def _dense(kind: str) -> torch.nn.Module:
    model: torch.nn.Module = Tiny() if kind == "tiny" else Captioner()
    if kind == "frozen":
        model.vision_tower.requires_grad_(False)  # type: ignore[union-attr]
    return model


def _steps_of(kind: str) -> int:
    """After a step without a gradient weights differ: DeepSpeed steps by zeros, torch not at all."""
    return 2 if kind == "absent" else 3


def _dense_config(stage: int, *, offload: bool) -> dict[str, object]:
    zero: dict[str, object] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": zero,
        "gradient_clipping": 1e-3,
        "steps_per_print": None,
        "megascale": {"enabled": True, "clip": {"mode": "cmsa", "alpha": 0.35}},
    }


def _dense_batch(kind: str, step: int, ranks: range) -> tuple[torch.Tensor | None, torch.Tensor]:
    images, texts = [], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        images.append(torch.randn(4, 6, generator=generator))
        texts.append(torch.randn(4, 5, generator=generator))
    without = kind == "absent" and step == 1
    return None if without else torch.cat(images), torch.cat(texts)


def _dense_reference(kind: str, world: int) -> list[Mapping[str, Mapping[str, float]]]:
    model = _dense(kind)
    clipper = CMSAClipper.for_model(model, base=1e-3, config=ClipConfig(mode="cmsa", alpha=0.35))
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    found: list[Mapping[str, Mapping[str, float]]] = []
    for step in range(_steps_of(kind)):
        adam.zero_grad()
        model(*_dense_batch(kind, step, range(world))).backward()
        report = clipper.clip(model.named_parameters())
        adam.step()
        found.append(report.as_record()["mpus"])  # type: ignore[arg-type]
    return found


def _records_apart(records: list[Any], expected: list[Any], *, keys: tuple[str, ...]) -> float:
    worst = 0.0
    for one, other in zip(records, expected, strict=True):
        assert one.keys() == other.keys() == {"encoder", "aligner", "generator"} & one.keys()
        for name, of in other.items():
            for key in keys:
                value, wanted = one[name][key], of[key]
                worst = max(worst, abs(value - wanted) / abs(wanted) if value != wanted else 0.0)
    return worst


# --- mistakes ---------------------------------------------------------------------------------------------------------


def refusals(rank: int, world: int, *, clips: list[dict[str, object]], folder: str) -> list[str]:
    """What each ``clip`` section is answered with. ``FILE`` stands for a file that only rank 0 can read."""
    with fresh_deepspeed():
        import deepspeed

        import deepspeed_ext  # noqa: F401

        path = Path(folder) / f"mpus-{rank}.yaml"
        if rank == 0:
            path.write_text("'*': all\n")
        found = []
        for clip in clips:
            clip = {key: str(path) if value == "FILE" else value for key, value in clip.items()}
            base: dict[str, object] = {"gradient_clipping": 0.0} if clip.pop("unclipped", False) else {}
            case = Case(section={"clip": clip}, extra=base)
            try:
                deepspeed.initialize(model=_model(case), config=case.config(megascale=True))
                found.append("")
            except ValueError as error:
                found.append(str(error))
        return found
