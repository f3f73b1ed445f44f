"""An expert as its neurons, and its pages made from them by hand: the slow side of the tests of names and layouts."""

import torch

from megascale_omni.paging.layout import ExpertShape, PageLayout, Part

Neurons = dict[Part, torch.Tensor]
"""One expert: matrices [f, h], a row a neuron (down: a column of the projection); biases [f], the down bias [h]."""


def random_neurons(shape: ExpertShape) -> Neurons:
    """An expert with random weights (no two elements alike)."""
    f, h = shape.ffn, shape.hidden
    neurons = {Part.UP: torch.randn(f, h), Part.DOWN: torch.randn(f, h)}
    if shape.gated:
        neurons[Part.GATE] = torch.randn(f, h)
    if shape.bias:
        neurons |= {Part.UP_BIAS: torch.randn(f), Part.DOWN_BIAS: torch.randn(h)}
    if shape.gated and shape.bias:
        neurons[Part.GATE_BIAS] = torch.randn(f)
    return neurons


def pages_of(layout: PageLayout, experts: list[Neurons]) -> dict[tuple[int, int], torch.Tensor]:
    """``{(expert, slice): flat page}``, cut neuron range by neuron range."""
    pages = {}
    for e, expert in enumerate(experts):
        for slice_, start in enumerate(range(0, layout.shape.ffn, layout.rows)):
            stop = min(start + layout.rows, layout.shape.ffn)
            by_neuron = (Part.GATE, Part.UP, Part.DOWN, Part.GATE_BIAS, Part.UP_BIAS)
            pieces = [expert[part][start:stop] for part in by_neuron if part in expert]
            if slice_ == 0 and Part.DOWN_BIAS in expert:
                pieces.append(expert[Part.DOWN_BIAS])
            pages[e, slice_] = torch.cat([piece.reshape(-1) for piece in pieces])
    return pages
