"""CMSAClipper: gradient clipping by module, whatever framework the gradients are in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megascale_omni.bulk import TORCH, Bulk, bulk_for
from megascale_omni.clipping.calibration import (
    Calibration,
    Observation,
    Stage,
    as_plain,
    fixed,
    from_plain,
    observe,
    restarted,
)
from megascale_omni.clipping.mpus import MpuMap, mpus_for
from megascale_omni.clipping.parts import Alone, GradientPart, Ranks, expert_names, local_tensor, parts_of
from megascale_omni.clipping.policy import clip, total_norm
from megascale_omni.clipping.report import ClipReport, fit_message
from megascale_omni.clipping.settings import ClipConfig
from megascale_omni.clipping.statistics import (
    ABSOLUTE,
    NON_FINITE,
    GradientStatistics,
    GradientSums,
    from_rows,
    one_thread,
)

logger = logging.getLogger(__name__)

Loss = float | torch.Tensor
STATE_VERSION = 1


class CMSAClipper:
    """Clips each module's gradient norm to ``base * (1 + alpha * min(GVC, gvc_max))``.

    In plain PyTorch, between backward and step::

        clipper = CMSAClipper.for_model(model, base=1.0)
        loss.backward()
        report = clipper.clip(model.named_parameters(), loss=loss)
        if not report.skip:
            optimizer.step()

    An adapter calls :meth:`decide` with what its ranks hold and multiplies gradients by :meth:`coefficient` itself.
    ``decide`` is a collective of ``ranks``; what follows from it is the same on every rank. A rank without gradients
    joins with none.

    Args:
        mpus: modules and who belongs to them; the same on every rank. base: the norm that thresholds refer to.
        config: options (``mode`` is taken to be cmsa). ranks: who puts sums together. experts: (expert, a parameter of
        it) of every expert on any rank whose untouched elements do not count (see :class:`GradientPart`); the same on
        every rank. speaks: whether this process logs. bulk: who multiplies gradients (None: chosen by their device).

    Raises:
        ValueError: ``base`` is not above 0.
    """

    def __init__(
        self,
        mpus: MpuMap,
        *,
        base: float,
        config: ClipConfig | None = None,
        ranks: Ranks | None = None,
        experts: Sequence[tuple[str, str]] = (),
        speaks: bool = True,
        bulk: Bulk | None = None,
    ) -> None:
        if not base > 0:
            raise ValueError(f"CMSA needs a clipping norm above 0, not {base}; give clip.base or --clip-grad, e.g. 1.0")
        self.mpus = mpus
        self.base = base
        self.config = config or ClipConfig(mode="cmsa")
        self.ranks: Ranks = ranks or Alone()
        self.last: ClipReport | None = None
        self.skipped_steps = 0
        self.calibration = Calibration() if self.config.alpha == "auto" else fixed(float(self.config.alpha))
        self.bulk = bulk
        self._speaks = speaks
        self._losses: list[tuple[int | None, Loss]] = []
        self._expert_rows: dict[tuple[str, int], int] = {}  # one for each module that an expert has parameters of
        self._expert_mpus: list[int] = []
        for expert, parameter in experts:
            mpu = mpus.index(parameter)
            if (expert, mpu) not in self._expert_rows:
                self._expert_rows[expert, mpu] = len(mpus.names) + len(self._expert_rows)
                self._expert_mpus.append(mpu)

    @classmethod
    def for_model(
        cls, model: torch.nn.Module, *, base: float, config: ClipConfig | None = None, ranks: Ranks | None = None
    ) -> CMSAClipper:
        """For a model whose parameters have the same names on all ranks (plain, DDP, FSDP2)."""
        config = config or ClipConfig(mode="cmsa")
        named = [(name, parameter.shape) for name, parameter in model.named_parameters()]
        experts = [(expert, name) for name, shape in named for expert in expert_names(name, shape)]
        mpus = mpus_for(config.mpus, [name for name, _ in named])
        return cls(mpus, base=base, config=config, ranks=ranks, experts=experts)

    # -- losses --------------------------------------------------------------------------------------------------------

    def report_loss(self, loss: Loss | Mapping[str, Loss]) -> None:
        """Tells the loss of a micro-batch of the coming step, or losses by module (modalities); means are taken.

        Losses weight the fit of alpha. Ranks that have none (other pipeline stages) report none.

        Raises:
            ValueError: a module that does not exist.
        """
        if not isinstance(loss, Mapping):
            self._losses.append((None, _detached(loss)))
            return
        for name, value in loss.items():
            if name not in self.mpus.names:
                raise ValueError(f"loss of {name!r}: there is no such module; there are {', '.join(self.mpus.names)}")
            self._losses.append((self.mpus.names.index(name), _detached(value)))

    def _loss_sums(self) -> torch.Tensor:
        """[modules + 1, 2] sums and counts of reported losses, that of the whole model last."""
        sums = torch.zeros(len(self.mpus.names) + 1, 2, dtype=torch.float64)
        if self.config.alpha == "auto" and self.calibration.stage is not Stage.FIXED:
            for module, loss in self._losses:
                sums[-1 if module is None else module] += torch.tensor([float(loss), 1.0], dtype=torch.float64)
        self._losses.clear()
        return sums

    # -- one step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decide(
        self,
        parts: Iterable[GradientPart],
        *,
        known: Iterable[tuple[int, GradientStatistics, float]] = (),
        norm: float | None = None,
        non_finite: Callable[[], str | None] = lambda: None,
    ) -> ClipReport:
        """What is to be done with this step's gradients. A collective; counts as a step of the calibration.

        Args:
            parts: what this rank holds.
            known: (module index, sums, share) of gradients that were summed already.
            norm: the whole gradient's norm in the framework's own arithmetic, taken where there is one module only, so
                that it is clipped to the bit as the framework would.
            non_finite: names what is not finite among ``known``.
        """
        parts = list(parts)
        sums, largest = self._sums(parts, known)
        together = torch.cat([sums.flatten(), self._loss_sums().flatten()])
        self.ranks.reduce(together, largest)
        sums, losses = together[: sums.numel()].view_as(sums), together[sums.numel() :].view(-1, 2)
        self._merge_experts(sums, largest)
        statistics = from_rows(sums, largest)[: len(self.mpus.names)]
        norms = [norm if len(statistics) == 1 and norm is not None else s.norm for s in statistics]
        finite = all(s.non_finite == 0 and _is_finite(n) for s, n in zip(statistics, norms, strict=True))
        if not finite:
            self.last = self._skipped(parts, statistics, norms, non_finite)
            return self.last
        self._restart_when_due()
        stage, gvcs = self.stage, [s.gvc() for s in statistics]
        alpha = self._advance(norms, gvcs, losses)
        self.last = self._report(statistics, norms, alpha=alpha, stage=stage)
        return self.last

    def coefficient(self, parameter: str) -> float:
        """What the last decision multiplies a parameter's gradient by.

        Raises:
            RuntimeError: nothing was decided yet.
        """
        if self.last is None:
            raise RuntimeError("decide() comes before coefficient()")
        return self.last.modules[self.mpus.index(parameter)].coefficient

    @torch.no_grad()
    def clip(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, loss: Loss | Mapping[str, Loss] | None = None
    ) -> ClipReport:
        """Decides about the gradients of named parameters and clips them in place. A collective of ``ranks``.

        With one module and alpha 0 gradients are, to the bit, those that ``torch.nn.utils.clip_grad_norm_`` makes.

        Raises:
            ValueError: a parameter of no module, a gradient that is sparse or not reduced yet, or one that is divided
                among more ranks than ``ranks`` are.
        """
        if loss is not None:
            self.report_loss(loss)
        named = [(name, parameter) for name, parameter in named_parameters if parameter.grad is not None]
        parts = list(parts_of(named, ranks=self.ranks.size))
        total = None
        if len(self.mpus.names) == 1 and self.ranks.size == 1:
            total = torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])
        norm = None if total is None else float(total)
        report = self.decide(parts, norm=norm)
        if report.skip:
            return report
        if total is not None:
            limit = report.modules[0].threshold
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_([p for _, p in named], limit, total)
            return report
        by_module: dict[int, list[torch.Tensor]] = {}
        for name, parameter in named:
            assert parameter.grad is not None
            index = self.mpus.index(name)
            if report.modules[index].coefficient < 1.0:
                by_module.setdefault(index, []).append(local_tensor(parameter.grad))
        if by_module:
            bulk = self.bulk or bulk_for(next(iter(by_module.values()))[0].device)
            coefficients = [report.modules[index].coefficient for index in by_module]
            if bulk.name != TORCH.name:
                bulk.scale(list(by_module.values()), coefficients)
            else:
                for gradients, coefficient in zip(by_module.values(), coefficients, strict=True):
                    torch._foreach_mul_(gradients, coefficient)
        return report

    def _sums(
        self, parts: Sequence[GradientPart], known: Iterable[tuple[int, GradientStatistics, float]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = GradientSums(len(self.mpus.names) + len(self._expert_rows))
        with one_thread():
            for part in parts:
                if not part.experts:
                    sums.add(self.mpus.index(part.name), part.gradient, part.share)
                    continue
                pieces = part.gradient.reshape(-1).split([elements for _, elements in part.experts])
                for (expert, _), piece in zip(part.experts, pieces, strict=True):
                    sums.add(self._row_of(expert, part.name), piece, part.share)
            for index, statistics, share in known:
                sums.add_statistics(index, statistics, share)
            return sums.read()

    def _row_of(self, expert: str, parameter: str) -> int:
        row = self._expert_rows.get((expert, self.mpus.index(parameter)))
        if row is None:
            raise RuntimeError(f"{expert} was not named when the clipper was made, so that ranks cannot agree on it")
        return row

    def _merge_experts(self, sums: torch.Tensor, largest: torch.Tensor) -> None:
        """Adds experts with gradients to their modules; the others got no tokens."""
        if not self._expert_mpus:
            return
        first, owners = len(self.mpus.names), torch.tensor(self._expert_mpus)
        rows, tops = sums[first:], largest[first:]
        touched = (rows[:, ABSOLUTE] != 0) | (rows[:, NON_FINITE] != 0)  # NaN is not 0
        sums[:first].index_add_(0, owners[touched], rows[touched])
        largest[:first].scatter_reduce_(0, owners[touched], tops[touched], reduce="amax")

    def _restart_when_due(self) -> None:
        every = self.config.recalibrate_steps
        fitted = self.config.alpha == "auto" and self.stage is Stage.FIXED
        if every and fitted and self.calibration.step >= every:
            self.recalibrate()

    def _advance(self, norms: list[float], gvcs: list[float], losses: torch.Tensor) -> float | None:
        """One step of the calibration; the alpha in force."""
        means = (losses[:, 0] / losses[:, 1]).tolist()  # NaN where nobody reported
        whole = means.pop()
        seen = Observation(tuple(norms), tuple(gvcs), tuple(whole if m != m else m for m in means))
        before = self.calibration
        self.calibration, alpha = observe(before, seen, base=self.base, ridge=self.config.ridge)
        fit = self.calibration.fit
        if before.stage is Stage.FITTING and self.calibration.stage is Stage.FIXED and fit is not None and self._speaks:
            logger.warning("%s", fit_message(fit))
        return alpha

    def _report(
        self, statistics: Sequence[GradientStatistics], norms: Sequence[float], *, alpha: float | None, stage: Stage
    ) -> ClipReport:
        modules = tuple(
            clip(name=name, found=found, base=self.base, alpha=alpha, gvc_max=self.config.gvc_max, norm=norm)
            for name, found, norm in zip(self.mpus.names, statistics, norms, strict=True)
        )
        return ClipReport(total_norm(modules), alpha, stage, modules, skipped_steps=self.skipped_steps)

    def _skipped(
        self,
        parts: Sequence[GradientPart],
        statistics: Sequence[GradientStatistics],
        norms: Sequence[float],
        elsewhere: Callable[[], str | None],
    ) -> ClipReport:
        self.skipped_steps += 1
        bad = next((p.name for p in parts if not bool(torch.isfinite(p.gradient).all())), None) or elsewhere()
        places = "; ".join(f"rank {r}: {name}" for r, name in enumerate(self.ranks.gather(bad)) if name is not None)
        found = zip(self.mpus.names, statistics, norms, strict=True)
        modules = ", ".join(name for name, s, norm in found if s.non_finite or not _is_finite(norm))
        where = f"{modules} ({places})" if places else modules
        if self._speaks:
            logger.warning("step left out (%d so far): gradients of %s are not finite", self.skipped_steps, where)
        report = self._report(statistics, norms, alpha=None, stage=self.stage)
        return replace(report, skip=True, non_finite=where)

    # -- calibration and state -----------------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        """The calibration's stage at the coming step."""
        return self.calibration.stage

    def recalibrate(self) -> None:
        """Fits alpha anew over the next 11 steps; the present one stays in force until then. Call it on every rank.

        Raises:
            ValueError: alpha was given as a number.
        """
        if self.config.alpha != "auto":
            raise ValueError(f"alpha was given as {self.config.alpha}; there is nothing to fit. Use alpha auto")
        self.calibration = restarted(self.calibration)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: modules, calibration, steps left out. The same on every rank."""
        return {
            "version": STATE_VERSION,
            "mpus": list(self.mpus.names),
            "calibration": as_plain(self.calibration),
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave.

        A number given as alpha wins over a saved calibration. Where the saved run was given one, or its modules are
        others and its calibration unfinished (its window is of those), calibration begins anew, and the saved alpha
        stays in force until there is a fitted one. Of a run that clipped as stock, the left-out steps are taken alone.

        Raises:
            ValueError: the state is of another version.
        """
        if state.keys() == {"skipped_steps"}:
            self.skipped_steps = int(state["skipped_steps"])
            return
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"the clipper's state has version {state.get('version')!r}, known is {STATE_VERSION}")
        self.skipped_steps = int(state["skipped_steps"])
        if self.config.alpha != "auto":
            return
        self.calibration = from_plain(state["calibration"])
        is_fixed = self.calibration.stage is Stage.FIXED
        was_given = is_fixed and self.calibration.fit is None
        if was_given or (not is_fixed and list(state["mpus"]) != list(self.mpus.names)):
            self.calibration = restarted(self.calibration)


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def _detached(loss: Loss) -> Loss:
    return loss.detach() if isinstance(loss, torch.Tensor) else loss
