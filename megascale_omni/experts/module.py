"""PagedExperts: the drop-in for a stock experts module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from megascale_omni.checkpoint.scratch import MakeTensors
from megascale_omni.experts.activation import Activation
from megascale_omni.experts.backends import Backend
from megascale_omni.experts.combine import Combine, WeighsOutputs
from megascale_omni.experts.function import ExpertsContext, PagedExpertsFunction
from megascale_omni.experts.products import Products
from megascale_omni.experts.rows import ComingRows, Rows
from megascale_omni.experts.tokens import STATIC, ComingCounts, Index, of_row
from megascale_omni.experts.torch_backend import TorchBackend
from megascale_omni.experts.workspace import Workspace
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.leases import Lease
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.names import NamedSlice, NamedTensors, NamingStyle
from megascale_omni.paging.planes import NUM_PLANES, Plane


class PagedExperts(torch.nn.Module):
    """Experts whose weights are pages of an :class:`ExpertManager`, not Parameters.

    Called as ``experts(x [N, h], counts, probs [N])`` with tokens sorted by local expert, it returns ``[N, h]``. It
    appears to ``state_dict`` under the names of the stock class (``style``), and to nothing that walks
    ``parameters()``.

    Args:
        manager: owner of the pages. path: the module's path in the model, its identity. layout: sizes of an expert and
        their cut. num_experts: local experts. dtypes: dtype of each plane. activation: frozen description. style: stock
        class whose names are used. products, workspace: shared by all modules of a process. backend: who computes
        (torch where None). rounds_gradients: see :class:`ExpertsContext`.

    Raises:
        ValueError: the activation is gated and the layout is not, or the other way round; a style that does not fit.
    """

    def __init__(
        self,
        *,
        manager: ExpertManager,
        path: str,
        layout: PageLayout,
        num_experts: int,
        dtypes: dict[Plane, torch.dtype],
        activation: Activation,
        style: NamingStyle,
        products: Products,
        workspace: Workspace,
        backend: Backend | None = None,
        rounds_gradients: bool = True,
    ) -> None:
        super().__init__()
        if activation.gated != layout.shape.gated:
            raise ValueError(f"{path}: activation gated={activation.gated}, expert shape gated={layout.shape.gated}")
        self.num_experts = num_experts
        self.names = NamedTensors(layout=layout, num_experts=num_experts, style=style)
        self.manager = manager
        self.pages = manager.add_module(path=path, layout=layout, num_experts=num_experts, dtypes=dtypes)
        self.context = ExpertsContext(
            manager,
            self.pages,
            activation,
            products,
            workspace,
            backend or TorchBackend(),
            rounds_gradients=rounds_gradients,
        )
        self.trainable = True
        self.fetch: Callable[[Sequence[int]], None] | None = None
        """Makes experts current before they are computed, where other ranks step them; a collective of these ranks."""
        self._anchor = torch.zeros((), device=manager.arena.device, requires_grad=True)

    @property
    def path(self) -> str:
        """The module's path in the model."""
        return self.manager.numbering.path(self.pages.entry.module)

    @property
    def layout(self) -> PageLayout:
        """The cut of this module's experts."""
        return self.pages.layout

    @property
    def shape(self) -> ExpertShape:
        """Sizes of one expert."""
        return self.layout.shape

    @property
    def num_parameters(self) -> int:
        """Elements of all local experts."""
        return self.num_experts * self.shape.num_parameters

    @torch.no_grad()
    def initialise(self, expert: int, tensors: dict[str, torch.Tensor]) -> None:
        """Makes an expert's weight pages from its named tensors, which must be all it has."""
        missing = {s.tensor.name for s in self.names.of_expert(expert)} - tensors.keys()
        if missing:
            raise ValueError(f"{self.path}, expert {expert}: initial values of {sorted(missing)} are missing")
        for slice_ in range(self.layout.num_slices):
            self.manager.create_ids(self.pages, Plane.WEIGHT, self.page_ids(Plane.WEIGHT, [(expert, slice_)]))
            with self.lease(Plane.WEIGHT, [(expert, slice_)]) as lease:
                lease.mark_dirty()
                self.names.scatter(tensors, {(expert, slice_): lease.page(expert, slice_)})

    def requires_grad_(self, requires_grad: bool = True) -> PagedExperts:
        """Freezes or unfreezes all experts of the module."""
        self.trainable = requires_grad
        self._anchor.requires_grad_(requires_grad)
        return self

    @property
    def goes_ahead(self) -> bool:
        """Whether :meth:`forward` takes numbers of tokens that the host has not seen (see [Note: counts that come
        later]): kernels that read them on the device, all pages there and up to date, and nothing to be done with
        gradients in the backward, or to be fetched from other ranks, that depends on them.
        """
        context = self.context
        ahead = STATIC and self.fetch is None and not context.completion.in_backward
        return ahead and context.backend.schedules(self.layout) and self.manager.whole.is_possible(self.pages)

    def forward(
        self,
        x: torch.Tensor,
        counts: Sequence[int] | ComingCounts,
        probs_N: torch.Tensor | None = None,
        index: Index | None = None,
        combine: Combine | None = None,
    ) -> torch.Tensor:
        """Experts' outputs ``[N, h]`` for rows ``x [N, h]`` sorted by expert; ``counts[e]`` of them belong to expert e.

        ``probs_N`` scales each row's activation before the down projection; None scales nothing. With an
        ``index`` (int64, or :class:`~megascale_omni.experts.tokens.Segments`) ``x`` are tokens ``[T, h]``, row ``n`` is
        token ``index[n]``, and the result is the sum ``[T, h]`` of each token's outputs. With ``combine``, which a
        backend that reads by index may be given beside an index, ``probs_N`` scales outputs instead of activations.

        Where the module :attr:`goes_ahead`, ``counts`` may be on their way. Then ``index`` is a tensor, and may have
        more rows than there are, the last ones with index -1.
        """
        index_N = of_row(index)
        num_rows = x.shape[0] if index_N is None else index_N.shape[0]
        rows = self._coming(counts, index) if isinstance(counts, ComingCounts) else self._rows(counts, num_rows)
        keep = torch.is_grad_enabled() and (
            x.requires_grad or self._anchor.requires_grad or (probs_N is not None and probs_N.requires_grad)
        )
        context = self.context
        if combine is not None:
            weighs = keep and probs_N is not None and probs_N.requires_grad
            context = replace(context, backend=cast("WeighsOutputs", context.backend).weighting(combine, keep=weighs))
        result: torch.Tensor = PagedExpertsFunction.apply(x, probs_N, self._anchor, context, rows, index, keep)
        return result

    def _coming(self, counts: ComingCounts, index: Index | None) -> ComingRows:
        if not isinstance(index, torch.Tensor) or counts.on_device.shape != (self.num_experts,):
            raise RuntimeError(f"{self.path}: counts that come later need an index, and one number an expert")
        if not self.goes_ahead:
            raise RuntimeError(f"{self.path}: counts are on their way, and are needed now; wait for them first")
        return ComingRows(counts, index.shape[0])

    def _rows(self, counts: Sequence[int], num_rows: int) -> Rows:
        if sum(counts) != num_rows or len(counts) != self.num_experts:
            raise RuntimeError(
                f"{self.path}: {len(counts)} experts with {sum(counts)} tokens were announced, "
                f"{self.num_experts} experts with {num_rows} tokens are here"
            )
        if self.fetch is not None:
            self.fetch([expert for expert, count in enumerate(counts) if count])
        return Rows.from_counts(counts)

    def page_ids(self, plane: Plane, names: Sequence[tuple[int, int]]) -> np.ndarray:
        """Page ids (int64) of (expert, slice) names in ``plane``, in the order given; RuntimeError for strange ones."""
        entry, found = self.pages.entry, []
        for expert, slice_ in names:  # few: quicker one by one than as an array
            if not (0 <= expert < entry.num_experts and 0 <= slice_ < entry.num_slices):
                raise RuntimeError(
                    f"{self.path}: no expert {expert}, slice {slice_}; it has {entry.num_experts} experts of "
                    f"{entry.num_slices} slices"
                )
            found.append((entry.first_index + expert * entry.num_slices + slice_) * NUM_PLANES + plane)
        return np.array(found, dtype=np.int64)

    def lease(self, plane: Plane, names: Sequence[tuple[int, int]]) -> Lease:
        """Pins the pages (expert, slice) of ``plane``."""
        return self.manager.lease_ids(self.pages, plane, self.page_ids(plane, names))

    # -- names ---------------------------------------------------------------------------------------------------------

    def named_slices(
        self, plane: Plane = Plane.WEIGHT, *, write: bool = False
    ) -> Iterator[tuple[NamedSlice, torch.Tensor]]:
        """Every part of every page there is, with its stock name, expert and place, and a view of its elements.

        Pages are caught up with the optimizer first. A view is valid until the next item is asked for; writing to it
        changes the page, which ``write`` announces.
        """
        present = np.argwhere(self.manager.present(self.pages, Plane.WEIGHT))
        for name in [(int(expert), int(slice_)) for expert, slice_ in present]:
            self.manager.catch_up(self.pages, self.page_ids(Plane.WEIGHT, [name]))
            if not self.manager.present(self.pages, plane)[name]:
                continue
            with self.lease(plane, [name]) as lease:
                if write:  # at once: the caller may never come back
                    lease.mark_dirty()
                for item in self.names.of_page(*name):
                    yield item, self.layout.part(lease.page(*name), item.slice, item.part)

    def dense(self, plane: Plane = Plane.WEIGHT, *, make: MakeTensors | None = None) -> dict[str, torch.Tensor]:
        """Copies of all named tensors of a plane, under their stock names and shapes; absent pages are zeros.

        ``make`` makes the tensors; without it, they are on the module's device.
        """
        dtype = self.pages.dtypes[plane]
        shapes = {tensor.name: tensor.shape for tensor in self.names.tensors()}
        if make is not None:
            tensors = make(shapes, dtype)
        else:
            device = self._anchor.device
            tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        for item, view in self.named_slices(plane):
            item.select(tensors[item.tensor.name]).copy_(view)
        return tensors

    def load_dense(self, tensors: dict[str, torch.Tensor], plane: Plane = Plane.WEIGHT) -> None:
        """Copies named tensors (any subset) into pages, which must exist."""
        shapes = {t.name: t.shape for t in self.names.tensors()}
        for name, tensor in tensors.items():
            if name not in shapes:
                raise ValueError(f"{self.path} has no tensor {name!r}; it has {', '.join(list(shapes)[:4])} ...")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(
                    f"{self.path}.{name}: shape {tuple(tensor.shape)} does not fit, the model has {shapes[name]}"
                )
        for item, view in self.named_slices(plane, write=True):
            if item.tensor.name in tensors:
                view.copy_(item.select(tensors[item.tensor.name]))

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.dense().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [t.name for t in self.names.tensors()]
        found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        missing_keys.extend(prefix + name for name in names if name not in found)
        try:
            self.load_dense(found)
        except ValueError as error:
            error_msgs.append(str(error))
        if strict:
            known = {prefix + name for name in names}
            unexpected_keys.extend(
                key
                for key in state_dict
                if key.startswith(prefix) and key not in known and not key.endswith("_extra_state")
            )
