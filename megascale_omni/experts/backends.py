"""Who computes a wave: torch (any device, the reference) or Triton kernels, behind one protocol.

A backend is chosen once for a run, by device and configuration. ``function.py`` walks the waves and hands each one to
the call that the backend made for this forward or backward.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch

from megascale_omni.config import BackendChoice
from megascale_omni.paging.layout import PageLayout
from megascale_omni.paging.leases import Wave, WholeWave

if TYPE_CHECKING:
    from megascale_omni.experts.function import ExpertsContext
    from megascale_omni.experts.rows import ComingRows, Rows


class ForwardCall(Protocol):
    """One forward over a module's experts; waves come in ascending order of (expert, slice)."""

    def wave(self, wave: Wave | WholeWave) -> None:
        """Computes the pages of a wave."""
        ...


class BackwardCall(Protocol):
    """One backward; after the last wave the gradients are whole.

    Attributes:
        gprobs_N: gradient of the probabilities in their dtype or fp32, None where not needed.
    """

    gprobs_N: torch.Tensor | None

    def wave(self, wave: Wave | WholeWave) -> None:
        """Computes the pages of a wave; gradient pages are written where the wave has them."""
        ...


class Backend(Protocol):
    """How the experts of a wave are computed.

    Attributes:
        by_index: whether tokens are read where they are, each row's by its index; others are given rows.
    """

    name: str
    by_index: bool

    def schedules(self, layout: PageLayout) -> bool:
        """Whether it computes experts of this layout where only the device knows how many tokens each has.

        Then calls may be made for :class:`ComingRows`, with an index, and get one :class:`WholeWave`.
        """
        ...

    def forward(
        self,
        context: ExpertsContext,
        rows: Rows | ComingRows,
        x_Nh: torch.Tensor,
        probs_N: torch.Tensor | None,
        *,
        flat: torch.Tensor,
        y_Nh: torch.Tensor,
        index_N: torch.Tensor | None = None,
    ) -> ForwardCall:
        """A call that fills ``y`` and ``flat``, the pre-activations of all tokens (see function.py).

        With ``index_N``, which only those are given that read by index, ``x`` are tokens ``[T, h]``.
        """
        ...

    def backward(
        self,
        context: ExpertsContext,
        rows: Rows | ComingRows,
        saved: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        gy_Nh: torch.Tensor,
        needs: tuple[bool, bool],
        *,
        gx_Nh: torch.Tensor | None,
        index_N: torch.Tensor | None = None,
    ) -> BackwardCall:
        """A call for ``saved`` (tokens, probabilities, pre-activations) that fills ``gx``, the gradient of the tokens.

        ``needs``: whether gradients of probabilities and of weights are wanted. With ``index_N`` tokens and ``gy`` are
        ``[T, h]`` (see :meth:`forward`), and ``gx`` has the rows all the same.
        """
        ...

    def sum_rows(self, rows_Nh: torch.Tensor, index_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The sum ``[T, h]`` of each token's rows, in ascending order of experts; row ``n`` is of ``index_N[n]``."""
        ...

    def measures(self, gradient: torch.Tensor) -> bool:
        """Whether :meth:`statistics` can be asked about a gradient page; torch's operators measure others."""
        ...

    def statistics(self, gradient: torch.Tensor) -> torch.Tensor:
        """What is measured of a gradient page, on its device and waited for by nobody.

        fp64 ``[7]``: finite elements, their sum, sum of sizes, sum of squares and largest size; elements that are not
        finite; elements that are not zero.
        """
        ...


def triton_available() -> bool:
    """Whether Triton is installed (nothing is imported)."""
    return find_spec("triton") is not None


def wants_triton(*, device: torch.device, choice: BackendChoice) -> bool:
    """Whether a run on ``device`` computes with Triton kernels. By name, never by timing.

    Raises:
        ValueError: kernels are asked for where they cannot run.
    """
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return False
    if not triton_available():
        if choice == "auto":
            return False
        raise ValueError(
            "compute.backend='triton': Triton is not installed; pip install 'megascale[kernels]', or 'torch'"
        )
    if device.type != "cuda":
        from megascale_omni.kernels.interpreter import is_interpreted

        if not is_interpreted():
            raise ValueError(
                f"compute.backend='triton' on {device}: kernels need an accelerator, or TRITON_INTERPRET=1 for tests; "
                "use 'auto' or 'torch'"
            )
    return True


def backend_for(*, device: torch.device, choice: BackendChoice) -> Backend:
    """The backend of a run.

    Raises:
        ValueError: kernels are asked for where they cannot run.
    """
    if wants_triton(device=device, choice=choice):
        from megascale_omni.kernels.backend import TritonBackend

        return TritonBackend(device)
    from megascale_omni.experts.torch_backend import TorchBackend

    return TorchBackend()
