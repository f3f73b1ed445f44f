"""A few layers of the model that is planned, trained as a run trains them, for the probe to time.

Shape suffixes: T tokens, s of a sequence, b sequences, N rows (a token and an expert), h hidden size, V vocabulary.

[Note: miniature]
Whatever makes a step slow has to be in it, or the plan leaves it out. Layers are walked through, forward and then
backward, so that weights, gradients and moments are as cold, and memory is asked for and given back as often, as in a
step of the model. Around the experts there is what stock computes: RMS norms, attention (unfused on a CPU), rotary
embeddings, router, output layer and loss. Gradients are measured in the backward that completes them, and the optimizer
clips and steps pages and dense parameters.

Experts get what a router gives them that was drawn as the model's is, some very much and some nothing. That depends on
the text: few of all tokens make up most of it, and the same token goes the same way. Of a vocabulary of bytes the text
is this package's own source; of a larger one, tokens are drawn by Zipf's law. One router leaves out other experts than
another: they are drawn anew for each step, and a plan goes by all of them. The learning rate is nothing, so that the
other weights stay as they were drawn.

Of many or large experts only the first few of each layer are made; rows of the others are routed, and computed by
nobody. Of many layers there are at most ``MOST_LAYERS``. Of a model that is too large to be tried where the probe runs
the miniature has fewer tokens, of fewer experts so that each has as many, and a smaller vocabulary: ``reach.in_reach``.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.completion import LastGradients
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.products import products_for
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.tokens import rows_of_map
from megascale_omni.experts.workspace import Workspace
from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.layout import PageLayout
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane
from megascale_omni.planner import reach
from megascale_omni.planner.models import ModelCard
from megascale_omni.planner.reach import BYTES, MOST_LAYERS

INIT_STD = 0.02
_ADAM: dict[str, object] = {"lr": 0.0, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


@dataclass
class StepTimes:
    """Seconds of a step: all of its passes, of these in experts and in embedding, output layer and loss; optimizer.

    ``row_share``: of all rows, those that the experts computed. ``active``: experts that got tokens, for each layer.
    """

    passes: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    optimizer: float = 0.0
    row_share: float = 0.0
    active: tuple[tuple[int, ...], ...] = ()


class Miniature:
    """Layers of ``card`` with their optimizer on ``device``, see [Note: miniature]."""

    def __init__(
        self,
        card: ModelCard,
        device: torch.device,
        *,
        page_bytes: int,
        options: PagingOptions | None = None,
        layers: int = MOST_LAYERS,
    ) -> None:
        self.card, self.device = card, device
        self.dtype = torch.bfloat16 if card.bf16 else torch.float32
        self.num_layers = min(layers, reach.layers_made(card))
        of_layer = reach.EXPERT_BYTES // (self.num_layers * card.expert.num_parameters * self.dtype.itemsize)
        self.number = min(card.num_experts, max(1, of_layer))
        self.times = StepTimes()
        self._stepped = 0
        self._chosen: list[list[tuple[int, ...]]] = []
        self._random = torch.Generator().manual_seed(0)
        self._dense: list[torch.Tensor] = []
        self._layers = [self._layer() for _ in range(self.num_layers)]
        self._embedding = self._weight(card.vocabulary, card.hidden_size)
        self._output = self._weight(card.vocabulary, card.hidden_size)
        self._make_experts(page_bytes, options)
        self._make_tables()
        self._main = [torch.zeros_like(weight, dtype=torch.float32) for weight in self._dense]
        for weight, main in zip(self._dense, self._main, strict=True):
            weight.register_post_accumulate_grad_hook(partial(_moved, main))
        self._dense_adam = torch.optim.AdamW(self._dense, **_ADAM)  # type: ignore[arg-type]

    def _weight(self, *shape: int, std: float = INIT_STD) -> torch.Tensor:
        """A dense parameter."""
        weight = (torch.randn(shape, generator=self._random) * std).to(self.device, self.dtype).requires_grad_()
        self._dense.append(weight)
        return weight

    def _expert_weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        std = self._output_std if "fc2" in name else INIT_STD
        return (torch.randn(shape, generator=self._random) * std).to(self.device, self.dtype)

    @property
    def _output_std(self) -> float:
        """Of weights whose products are added to what goes through all layers."""
        return INIT_STD / math.sqrt(2 * self.card.num_layers)

    def _layer(self) -> tuple[torch.Tensor, ...]:
        """Weights of queries, keys and values together, of the projection after them, and of the router."""
        card, heads = self.card, self.card.attention
        projected = heads.heads * heads.channels
        return (
            self._weight(projected + 2 * heads.groups * heads.channels, card.hidden_size),
            self._weight(card.hidden_size, projected, std=self._output_std),
            self._weight(card.num_experts, card.hidden_size),
        )

    def _make_experts(self, page_bytes: int, options: PagingOptions | None) -> None:
        card = self.card
        self.manager = ExpertManager(device=self.device, options=options)
        workspace = Workspace(self.device)
        dtypes = {Plane.WEIGHT: self.dtype, Plane.GRADIENT: torch.float32}
        if self.dtype is not torch.float32:
            dtypes[Plane.MASTER] = torch.float32
        self.modules = [
            PagedExperts(
                manager=self.manager,
                path=f"probe.{number}",
                layout=PageLayout.for_page_bytes(card.expert, page_bytes=page_bytes, dtype=self.dtype),
                num_experts=self.number,
                dtypes={**dtypes, Plane.MOMENT1: torch.float32, Plane.MOMENT2: torch.float32},
                activation=Activation("silu" if card.gated else "gelu", gated=card.gated),
                style="sequential",
                products=products_for(device=self.device, choice="auto", workspace=workspace),
                workspace=workspace,
            )
            for number in range(self.num_layers)
        ]
        for module in self.modules:
            for expert in range(self.number):
                shapes = {part.tensor.name: part.tensor.shape for part in module.names.of_expert(expert)}
                values = {name: self._expert_weight(name, shape) for name, shape in shapes.items()}
                module.initialise(expert, values)
        self._gradients = ExpertGradients(self.modules)
        self._gradients.counts_zeros = False
        LastGradients(self._gradients, scale=1.0, backwards=lambda: 1)
        self._adam = PagedAdam(
            [(m, GroupBinding(weights=0, biases=1 if card.expert_bias else None)) for m in self.modules],
            groups=[dict(_ADAM), dict(_ADAM)],
            arithmetic=arithmetic_for(decoupled=True, fused=False, device=self.device),
            shards=PageShards(),
        )

    def _make_tables(self) -> None:
        """What tokens are drawn by, who sees whom, and angles of rotary embeddings."""
        card, length = self.card, self.card.seq_length
        self._frequencies_V = 1.0 / torch.arange(1, card.vocabulary + 1)
        self._source = _source() if card.vocabulary == BYTES else None
        self._mask_ss = torch.ones(length, length, device=self.device, dtype=torch.bool).triu(1)
        half = card.attention.channels // 2
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        angles_s11c = torch.cat([angles, angles], dim=-1)[:, None, None, :].to(self.device)
        self._cos_s11c, self._sin_s11c = angles_s11c.cos().to(self.dtype), angles_s11c.sin().to(self.dtype)

    @property
    def layer_elements(self) -> int:
        """What a plan counts of a layer beside its experts: parameters, and attention's scores."""
        return sum(weight.numel() for weight in self._layers[0]) + self.card.seq_length * self.card.hidden_size

    @property
    def head_elements(self) -> int:
        """What a plan counts of embedding and output layer."""
        return self._embedding.numel() + self._output.numel()

    @property
    def stepped_elements(self) -> int:
        """Of parameters that the last step stepped: the dense ones, and those of experts that had tokens."""
        return sum(weight.numel() for weight in self._dense) + self._stepped * self.card.expert.num_parameters

    # -- a step --------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def passes(self) -> None:
        """Forward and backward of a micro-batch, the first and last of its step."""
        card = self.card
        tokens_bs = self._drawn()
        self.times, began = StepTimes(), self._now()
        self._gradients.drop()
        for main in self._main:
            main.zero_()
        self._stepped = 0
        x_sbh = F.embedding(tokens_bs[:, :-1].t(), self._embedding)
        for number in range(self.num_layers):
            if card.recompute:
                with torch.no_grad():
                    self._forward(number, x_sbh)
            x_sbh = self._forward(number, x_sbh)
        forward = self._now()
        top_sbh = x_sbh.detach().requires_grad_()
        logits_TV = _normed(top_sbh).view(-1, card.hidden_size) @ self._output.t()
        F.cross_entropy(logits_TV.float(), tokens_bs[:, 1:].t().reshape(-1)).backward()  # type: ignore[no-untyped-call]
        self.times.head = self._now() - forward
        x_sbh.backward(top_sbh.grad)  # type: ignore[no-untyped-call]
        self.times.passes = self._now() - began

    @torch.no_grad()
    def routed(self, count: int) -> list[tuple[tuple[int, ...], ...]]:
        """Experts of each layer that ``count`` routers, drawn apart, give tokens of one more text to."""
        self.times, self._chosen = StepTimes(), [[] for _ in range(count)]
        x_sbh = F.embedding(self._drawn()[:, :-1].t(), self._embedding)
        for number in range(self.num_layers):
            x_sbh = self._forward(number, x_sbh)
        chosen, self._chosen = self._chosen, []
        return [tuple(layers) for layers in chosen]

    def _drawn(self) -> torch.Tensor:
        """Draws a text ``[b, s + 1]``, and routers."""
        with torch.no_grad():
            for _, _, router in self._layers:
                router.copy_(self._router(router))
        return self._text().to(self.device)

    def _router(self, like: torch.Tensor) -> torch.Tensor:
        return (torch.randn(like.shape, generator=self._random) * INIT_STD).to(self.device, self.dtype)

    def _text(self) -> torch.Tensor:
        """Tokens ``[b, s + 1]`` of a micro-batch and of what follows each."""
        sequences, length = self.card.micro_batch_size, self.card.seq_length + 1
        if self._source is None or self._source.numel() < length:
            shape = (sequences, length)
            drawn = torch.multinomial(self._frequencies_V, math.prod(shape), replacement=True, generator=self._random)
            return drawn.view(shape)
        starts = torch.randint(self._source.numel() - length + 1, (sequences,), generator=self._random)
        return torch.stack([self._source[start : start + length] for start in starts.tolist()])

    def step(self) -> None:
        """Norm, clipping and the optimizer's step."""
        began = self._now()
        self._gradients.finish(scale=1.0)
        norms = torch.stack([torch.linalg.vector_norm(main) for main in self._main])
        squares = self._gradients.squares(PageShards()) + float(norms.square().sum())
        coefficient = min(1.0, 1.0 / (math.sqrt(squares) + 1e-6))
        for weight, main in zip(self._dense, self._main, strict=True):
            weight.grad = main.mul_(coefficient).to(self.dtype)
        self._dense_adam.step()
        self._dense_adam.zero_grad()
        self._adam.step(clip_coefficient=coefficient if coefficient < 1.0 else None)
        self.times.optimizer = self._now() - began

    def close(self) -> None:
        """Gives the pages back."""
        self.manager.close()

    def _forward(self, number: int, x_sbh: torch.Tensor) -> torch.Tensor:
        """A layer."""
        qkv, projection, router = self._layers[number]
        x_sbh = x_sbh + self._attention(_normed(x_sbh) @ qkv.t()) @ projection.t()
        return x_sbh + self._mixture(number, _normed(x_sbh), router)

    def _attention(self, qkv_sbw: torch.Tensor) -> torch.Tensor:
        heads = self.card.attention
        length, sequences, _ = qkv_sbw.shape
        each = heads.heads // heads.groups
        split = qkv_sbw.view(length, sequences, heads.groups, (each + 2) * heads.channels)
        q, k, v = split.split([each * heads.channels, heads.channels, heads.channels], dim=3)
        q = q.reshape(length, sequences, heads.heads, heads.channels)
        if self.card.rotary:
            q, k = self._turned(q), self._turned(k)
        if each > 1:
            k, v = k.repeat_interleave(each, dim=2), v.repeat_interleave(each, dim=2)
        if self.device.type == "cuda":  # where stock's attention is one kernel
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return fused.permute(2, 0, 1, 3).reshape(length, sequences, -1)
        q, k, v = (t.reshape(length, sequences * heads.heads, heads.channels).transpose(0, 1) for t in (q, k, v))
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0.0, alpha=heads.channels**-0.5)
        scores = scores.view(sequences, heads.heads, length, length).float().masked_fill_(self._mask_ss, -1e4)
        weights = scores.softmax(-1).to(self.dtype).view(-1, length, length)
        return (weights @ v).transpose(0, 1).reshape(length, sequences, -1)

    def _turned(self, x_sbhc: torch.Tensor) -> torch.Tensor:
        """With rotary embeddings."""
        turning = self._cos_s11c.shape[-1]
        x, rest = x_sbhc[..., :turning], x_sbhc[..., turning:]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([x * self._cos_s11c + torch.cat([-second, first], dim=-1) * self._sin_s11c, rest], dim=-1)

    def _mixture(self, number: int, z_sbh: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        """Router and experts."""
        card, experts = self.card, self.modules[number]
        z_Th = z_sbh.reshape(-1, card.hidden_size)
        logits_TE = (z_Th @ router.t()).float()
        for layers in self._chosen:
            other_TE = (z_Th @ self._router(router).t()).float()
            layers.append(tuple(other_TE.topk(card.moe_router_topk, dim=-1).indices.unique().tolist()))
        chosen = logits_TE.topk(card.moe_router_topk, dim=-1)
        shape = (z_Th.shape[0], card.num_experts)
        probs_TE = z_Th.new_zeros(shape).scatter(1, chosen.indices, chosen.values.softmax(-1).to(self.dtype))
        map_TE = torch.zeros(shape, dtype=torch.bool, device=self.device).scatter(1, chosen.indices, True)
        map_ET = map_TE.T.contiguous()
        every = map_ET.sum(1).tolist()
        counts = every[: self.number]
        expert_N, index_N = rows_of_map(map_ET[: self.number], sum(counts))
        probs_N = probs_TE.reshape(-1).index_select(0, index_N * card.num_experts + expert_N)
        if torch.is_grad_enabled():  # not in a forward that is made again
            self.times.active += (tuple(expert for expert, count in enumerate(every) if count),)
            self._stepped += sum(count > 0 for count in counts)
            self.times.row_share += sum(counts) / (z_Th.shape[0] * card.moe_router_topk * self.num_layers)
        return self._timed(experts, z_Th, counts, probs_N, index_N).view(z_sbh.shape)

    def _timed(
        self, experts: PagedExperts, z_Th: torch.Tensor, counts: list[int], probs_N: torch.Tensor, index_N: torch.Tensor
    ) -> torch.Tensor:
        """Experts with a clock; what goes in and comes out of them tells when their backward begins and ends."""
        into_Th = z_Th.view_as(z_Th)
        before = self._now()
        out_Th = experts(into_Th, counts, probs_N, index_N)
        self.times.experts += self._now() - before
        began: list[float] = []

        def ended(_: torch.Tensor) -> None:
            self.times.experts += self._now() - began[0]

        if out_Th.requires_grad:
            out_Th.register_hook(lambda _: began.append(self._now()))
            into_Th.register_hook(ended)
        return out_Th


def _source() -> torch.Tensor:
    """Bytes of this package's files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def _moved(main: torch.Tensor, weight: torch.Tensor) -> None:
    """Adds a gradient to its buffer, as stock's wrapper does."""
    if weight.grad is not None:
        main.add_(weight.grad)
        weight.grad = None


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])
