"""The activation between an expert's two products: forward, backward and the scaling by routing probabilities.

Shape suffixes: n tokens, r neurons, R = 2 r where gated (a row is gate | up), else r.

    gated      y = act(min(gate, clamp)) * (clip(up, -clamp, clamp) + offset)
    ungated    y = act(x)
    scaled     a = (y * probs[:, None]) in the dtype of y

[Note: the same bits as autograd]
Results have the bits that autograd gives for these expressions written with torch's operators, in fp32 and bf16: the
same kernels run on the same operands, so that every intermediate is rounded where an operator would round it. Two
things about torch on CPU make that a matter of layout, too:
 * vector and scalar code of exp and erf differ, and where scalar code runs depends on how rows are strung together;
 * gelu goes to another library where its operands are contiguous.
Operands of those kernels are therefore contiguous exactly where the operators' own would be: half a row is not, a
clamped or scaled copy is. Products and sums may go anywhere. Only the sign of a zero may differ: ``offset`` 0 is not
added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megascale_omni.experts.workspace import Workspace

Kind = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """A frozen description of an expert's activation, and its computation on blocks of one page.

    GPT-OSS has ``Activation("quick_gelu", gated=True, clamp=7.0, offset=1.0)``.

    Attributes:
        kind: ``quick_gelu`` is ``x * sigmoid(alpha * x)``, ``squared_relu`` is ``relu(x)**2``; others are torch's.
        gated: whether a row is gate | up.
        clamp: bound of the gate from above and of up from both sides, before anything else; None for none. Gated only.
        offset: added to up after clamping. Gated only.
        alpha: of ``quick_gelu``.

    All methods take 2-D contiguous tensors and raise ValueError for others. A result goes to ``out`` where given, else
    to a new tensor. ``workspace`` lends buffers for intermediates (names beginning with ``activation.``); without one
    they are allocated in each call.
    """

    kind: Kind
    gated: bool
    clamp: float | None = None
    offset: float = 0.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"activation {self.kind!r} is unknown; there are {', '.join(get_args(Kind))}")
        if not self.gated and (self.clamp is not None or self.offset != 0.0):
            raise ValueError(
                f"clamp={self.clamp} and offset={self.offset} belong to gated activations, this {self.kind} is not"
            )
        if self.clamp is not None and not (math.isfinite(self.clamp) and self.clamp > 0):
            raise ValueError(f"clamp {self.clamp} must be a positive number, or None for no clamping")
        for name in ("offset", "alpha"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name)} must be finite")

    def forward(
        self, h_nR: torch.Tensor, *, out: torch.Tensor | None = None, workspace: Workspace | None = None
    ) -> torch.Tensor:
        """The activation ``y [n, r]`` of pre-activations ``h``."""
        y_nr = self._result("out", out, h_nR, self._neurons(h_nR))
        if h_nR.numel():
            self._forward(h_nR, y_nr, workspace or Workspace(h_nR.device))
        return y_nr

    def backward(
        self,
        h_nR: torch.Tensor,
        grad_nr: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """The gradient ``[n, R]`` of ``h``, given that of :meth:`forward`'s result."""
        return self.with_probs_backward(h_nR, None, grad_nr, out=out, workspace=workspace)[0]

    def with_probs_forward(
        self,
        h_nR: torch.Tensor,
        probs_n: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """The activation, each row scaled by its probability in the wider of the two dtypes; None scales nothing."""
        work = workspace or Workspace(h_nR.device)
        y_nr = self.forward(h_nR, out=out, workspace=work)
        if probs_n is not None:
            _check_probs(probs_n, h_nR)
            _Scaling(probs_n, y_nr.dtype, work).apply(y_nr, out=y_nr)
        return y_nr

    def with_probs_backward(
        self,
        h_nR: torch.Tensor,
        probs_n: torch.Tensor | None,
        grad_nr: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        activated: torch.Tensor | None = None,
        need_grad_probs: bool = True,
        overwrite_grad: bool = False,
        workspace: Workspace | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of ``h`` and ``probs``, given that of :meth:`with_probs_forward`'s result.

        Args:
            h_nR: as given to the forward.
            probs_n: as given to the forward.
            grad_nr: gradient of the result.
            out: where the gradient of ``h`` goes, ``[n, R]``.
            activated: ``[n, r]``, receives :meth:`with_probs_forward`'s result, for less than computing it separately.
            need_grad_probs: whether the gradient of ``probs`` is wanted.
            overwrite_grad: whether ``grad_nr`` may serve as a buffer; its contents are then lost.
            workspace: see the class.

        Returns:
            The gradient of ``h``, and that of ``probs`` ``[n]`` in its dtype (None without probs, or where not needed).
        """
        neurons = self._neurons(h_nR)
        out = self._result("out", out, h_nR, h_nR.shape[1])
        self._result("grad", grad_nr, h_nR, neurons)
        if activated is not None:
            self._result("activated", activated, h_nR, neurons)
        if probs_n is not None:
            _check_probs(probs_n, h_nR)
        need_grad_probs = need_grad_probs and probs_n is not None
        if not h_nR.numel():
            return out, torch.zeros_like(probs_n) if need_grad_probs and probs_n is not None else None
        work = workspace or Workspace(h_nR.device)
        scaling = None if probs_n is None else _Scaling(probs_n, h_nR.dtype, work)
        block = _Backward(self, h_nR, out, work)
        grad_probs_n = None
        if need_grad_probs or activated is not None:
            y_nr = block.activate(activated)
            if scaling is not None:
                grad_probs_n = scaling.gradient(y_nr, grad_nr, block.scratch) if need_grad_probs else None
                if activated is not None:
                    scaling.apply(activated, out=activated)
        if scaling is not None:
            grad_nr = scaling.apply(grad_nr, out=grad_nr if overwrite_grad else block.grad_buffer())
        block.differentiate(grad_nr)
        return out, grad_probs_n

    def _neurons(self, h_nR: torch.Tensor) -> int:
        if h_nR.ndim != 2 or not h_nR.is_contiguous() or not h_nR.is_floating_point():
            raise ValueError(
                f"pre-activations must be a contiguous 2-D floating-point tensor, not {h_nR.dtype} of shape "
                f"{tuple(h_nR.shape)} and strides {h_nR.stride()}"
            )
        if self.gated and h_nR.shape[1] % 2:
            raise ValueError(f"rows of a gated activation are gate | up, {h_nR.shape[1]} columns are no pair of halves")
        return h_nR.shape[1] // 2 if self.gated else h_nR.shape[1]

    def _result(self, name: str, given: torch.Tensor | None, h_nR: torch.Tensor, columns: int) -> torch.Tensor:
        if given is None:
            return h_nR.new_empty(h_nR.shape[0], columns)
        if given.shape != (h_nR.shape[0], columns) or given.dtype is not h_nR.dtype or not given.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {h_nR.dtype} of shape {(h_nR.shape[0], columns)}, "
                f"not {given.dtype} of shape {tuple(given.shape)} and strides {given.stride()}"
            )
        return given

    def _forward(self, h_nR: torch.Tensor, y_nr: torch.Tensor, work: Workspace) -> None:
        if not self.gated:
            self._act(h_nR, out=y_nr, sigmoid=y_nr)
            return
        gate_nr, up_nr = h_nR.chunk(2, dim=1)
        if self.clamp is None and self.offset == 0.0:
            self._act(gate_nr, out=y_nr, sigmoid=y_nr)
            y_nr.mul_(up_nr)
            return
        part_nr = work.take("activation.part", tuple(y_nr.shape), y_nr.dtype)
        if self.clamp is not None:
            gate_nr = torch.clamp(gate_nr, max=self.clamp, out=part_nr)
        self._act(gate_nr, out=y_nr, sigmoid=y_nr)
        y_nr.mul_(self._up(up_nr, out=part_nr))

    def _up(self, up_nr: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """What the activated gate is multiplied by: ``up`` itself, or its clamped and shifted copy in ``out``."""
        if self.clamp is not None:
            up_nr = torch.clamp(up_nr, min=-self.clamp, max=self.clamp, out=out)
        return up_nr if self.offset == 0.0 else torch.add(up_nr, self.offset, out=out)

    def _act(self, x_nr: torch.Tensor, *, out: torch.Tensor, sigmoid: torch.Tensor) -> None:
        """``out = act(x)``; quick_gelu leaves its sigmoid in ``sigmoid``, which is contiguous and may be ``out``."""
        match self.kind:
            case "silu":
                _aten.silu.out(x_nr, out=out)
            case "gelu":
                _aten.gelu.out(x_nr, out=out)
            case "gelu_tanh":
                _aten.gelu.out(x_nr, approximate="tanh", out=out)
            case "quick_gelu":
                torch.mul(x_nr, self.alpha, out=sigmoid).sigmoid_()
                torch.mul(x_nr, sigmoid, out=out)
            case "relu":
                torch.clamp_min(x_nr, 0, out=out)
            case "squared_relu":
                torch.clamp_min(x_nr, 0, out=out).pow_(2)


class _Backward:
    """One block on its way back: first (optionally) the activation again, then the gradient of ``h``."""

    def __init__(self, activation: Activation, h_nR: torch.Tensor, out: torch.Tensor, work: Workspace) -> None:
        self._activation = activation
        self._work = work
        self._out = out
        self._shape = (h_nR.shape[0], h_nR.shape[1] // 2 if activation.gated else h_nR.shape[1])
        self._gated = activation.gated
        self._clamped = activation.clamp is not None
        self._x_nr = h_nR
        if self._gated:
            self._gate_nr, self._raw_up_nr = h_nR.chunk(2, dim=1)
            self._grad_gate_nr, self._grad_up_nr = out.chunk(2, dim=1)
            self._x_nr = self._gate_nr
        if self._clamped:  # contiguous from here on, see [Note: the same bits as autograd]
            self._x_nr = torch.clamp(self._gate_nr, max=activation.clamp, out=self.take("gate"))
        self._act_nr: torch.Tensor | None = None
        self._up_nr: torch.Tensor | None = None

    def take(self, name: str) -> torch.Tensor:
        """A contiguous buffer ``[n, r]``."""
        return self._work.take(f"activation.{name}", self._shape, self._out.dtype)

    @property
    def scratch(self) -> torch.Tensor:
        """A part of the result ``[n, r]`` that holds nothing until :meth:`differentiate`."""
        return self._grad_gate_nr if self._gated else self._out

    def grad_buffer(self) -> torch.Tensor:
        """Where a scaled gradient of ``y`` may lie until :meth:`differentiate` has read it."""
        return self.take("grad") if self._gated else self._out

    def activate(self, out: torch.Tensor | None) -> torch.Tensor:
        """The activation ``y [n, r]``, in ``out`` or in a buffer."""
        if not self._gated:
            y_nr = self.take("y") if out is None else out
            self._activation._act(self._x_nr, out=y_nr, sigmoid=self._sigmoid())
            self._act_nr = y_nr
            return y_nr
        y_nr = self.scratch if out is None else out
        return torch.mul(self._gate_activated(), self._up(), out=y_nr)

    def differentiate(self, grad_nr: torch.Tensor) -> None:
        """Writes the gradient of ``h``, given that of ``y``."""
        if not self._gated:
            self._act_backward(grad_nr, out=self._out)
            return
        # The order spares buffers: the activated gate lies in its own gradient's neighbour until it is used.
        torch.mul(self._gate_activated(), grad_nr, out=self._grad_up_nr)
        if not self._clamped:
            torch.mul(self._up(), grad_nr, out=self._grad_gate_nr)
            self._act_backward(self._grad_gate_nr, out=self._grad_gate_nr)
            return
        grad_gate_nr = torch.mul(self._up(), grad_nr, out=self.take("act"))
        self._act_backward(grad_gate_nr, out=grad_gate_nr)
        self._grad_gate_nr.copy_(grad_gate_nr)
        self._mask_clamped()

    def _gate_activated(self) -> torch.Tensor:
        if self._act_nr is None:
            self._act_nr = self.take("act") if self._clamped else self._grad_up_nr
            self._activation._act(self._x_nr, out=self._act_nr, sigmoid=self._sigmoid())
        return self._act_nr

    def _up(self) -> torch.Tensor:
        if self._up_nr is None:
            plain = not self._clamped and self._activation.offset == 0.0
            self._up_nr = self._raw_up_nr if plain else self._activation._up(self._raw_up_nr, out=self.take("up"))
        return self._up_nr

    def _sigmoid(self) -> torch.Tensor:
        return self.take("sigmoid") if self._activation.kind == "quick_gelu" else self._out

    def _mask_clamped(self) -> None:
        """No gradient where clamping changed a value (or met a NaN); on the bound itself there is one."""
        clamp = self._activation.clamp
        assert clamp is not None
        changed = self._work.take("activation.changed", self._shape, torch.bool)
        self._grad_gate_nr.masked_fill_(torch.ne(self._x_nr, self._gate_nr, out=changed), 0)
        clamped_nr = torch.clamp(self._raw_up_nr, min=-clamp, max=clamp, out=self.take("act"))
        self._grad_up_nr.masked_fill_(torch.ne(clamped_nr, self._raw_up_nr, out=changed), 0)

    def _act_backward(self, grad_nr: torch.Tensor, *, out: torch.Tensor) -> None:
        """``out = grad * act'(x)``; ``out`` may be ``grad``."""
        x_nr, activation = self._x_nr, self._activation
        match activation.kind:
            case "silu":
                _aten.silu_backward.grad_input(grad_nr, x_nr, grad_input=out)
            case "gelu":
                _aten.gelu_backward.grad_input(grad_nr, x_nr, grad_input=out)
            case "gelu_tanh":
                _aten.gelu_backward.grad_input(grad_nr, x_nr, approximate="tanh", grad_input=out)
            case "relu":
                _aten.threshold_backward.grad_input(grad_nr, x_nr, 0, grad_input=out)
            case "squared_relu":  # d/dx relu(x)^2 = 2 relu(x)
                twice_nr = torch.mul(x_nr, 2, out=self.take("slope"))
                torch.mul(twice_nr, grad_nr, out=out)
                _aten.threshold_backward.grad_input(out, x_nr, 0, grad_input=out)
            case "quick_gelu":  # x * s(alpha x): by its factor x, and through the sigmoid
                sigmoid_nr = self._sigmoid()
                if self._act_nr is None:
                    torch.mul(x_nr, activation.alpha, out=sigmoid_nr).sigmoid_()
                through_nr = torch.mul(x_nr, grad_nr, out=self.take("slope"))
                _aten.sigmoid_backward.grad_input(through_nr, sigmoid_nr, grad_input=through_nr)
                through_nr.mul_(activation.alpha)
                torch.mul(grad_nr, sigmoid_nr, out=out).add_(through_nr)


class _Scaling:
    """Rows times probabilities, computed in the wider of the two dtypes and rounded to the rows' dtype."""

    def __init__(self, probs_n: torch.Tensor, dtype: torch.dtype, work: Workspace) -> None:
        self._probs_dtype = probs_n.dtype
        self._wide = torch.promote_types(dtype, probs_n.dtype)
        self._same = self._wide is dtype
        self._probs_n1 = probs_n.to(self._wide).unsqueeze(-1)
        self._work = work

    def apply(self, rows_nr: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """``out = rows * probs``; ``out`` may be ``rows``."""
        if self._same:
            return torch.mul(rows_nr, self._probs_n1, out=out)
        return out.copy_(self._widened("left", rows_nr).mul_(self._probs_n1))

    def gradient(self, y_nr: torch.Tensor, grad_nr: torch.Tensor, scratch_nr: torch.Tensor) -> torch.Tensor:
        """The gradient of probs: the sum of ``y * grad`` over each row; ``scratch`` may be ``y``."""
        if self._same:
            product_nr = torch.mul(y_nr, grad_nr, out=scratch_nr)
        else:
            product_nr = self._widened("left", y_nr).mul_(self._widened("right", grad_nr))
        return product_nr.sum(-1).to(self._probs_dtype)

    def _widened(self, name: str, rows_nr: torch.Tensor) -> torch.Tensor:
        """A copy in the wider dtype. Mixed products would make the same copies, in fresh memory each time."""
        wide = self._work.take(f"activation.{name}", tuple(rows_nr.shape), self._wide)
        return wide.copy_(rows_nr)


def _check_probs(probs_n: torch.Tensor, h_nR: torch.Tensor) -> None:
    if probs_n.shape != h_nR.shape[:1] or not probs_n.is_floating_point():
        raise ValueError(
            f"probabilities must be floating-point of shape {(h_nR.shape[0],)}, one a token, "
            f"not {probs_n.dtype} of shape {tuple(probs_n.shape)}"
        )
