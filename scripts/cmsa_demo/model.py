"""A vision encoder, an aligner and a text decoder. Shapes: B images, P patches, L words, d width."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PATCHES, WIDTH, HEADS = 16, 32, 4


class Gain(torch.autograd.Function):
    """Identity whose gradient is multiplied: what a change of units between two modules does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float) -> torch.Tensor:  # noqa: ANN401 - torch's own
        """``x``."""
        ctx.gain = gain
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        """The gradient times the gain."""
        return gradient * ctx.gain, None


def _layers(count: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


class VisionEncoder(nn.Module):
    """Patches of 2 x 2 pixels through two transformer layers: [B, 8, 8] -> [B, P, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.position = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.layers = _layers(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features of patches."""
        patches = images.unflatten(1, (4, 2)).unflatten(3, (4, 2)).transpose(2, 3).flatten(3).flatten(1, 2)
        found: torch.Tensor = self.layers(self.patch(patches) + self.position)
        return found


class TextDecoder(nn.Module):
    """Words after the image's features through two causal layers: [B, P, d], [B, L] -> logits [B, L, words]."""

    def __init__(self, words: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.position = nn.Parameter(torch.randn(length, WIDTH) * 0.02)
        self.layers = _layers(2)
        self.head = nn.Linear(WIDTH, words)

    def forward(self, features: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Logits of each word's successor."""
        text = self.embedding(words) + self.position[: words.shape[1]]
        joined = torch.cat([features, text], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(joined.shape[1])
        mask[:PATCHES, :PATCHES] = 0.0
        found: torch.Tensor = self.head(self.layers(joined, mask=mask)[:, PATCHES:])
        return found


class Captioner(nn.Module):
    """Writes captions of images. ``gain``: by what the gradient into the encoder is multiplied."""

    def __init__(self, words: int, length: int) -> None:
        super().__init__()
        self.vision_encoder = VisionEncoder()
        self.aligner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.text_decoder = TextDecoder(words, length)
        self.gain = 1.0

    def forward(self, images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of a caption's words, each from those before it."""
        features = Gain.apply(self.vision_encoder(images), self.gain)
        logits = self.text_decoder(self.aligner(features), captions[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), captions[:, 1:].flatten())


MODULES = {"vision_encoder.": "encoder", "aligner.": "aligner", "text_decoder.": "generator"}
"""Beginnings of parameter names, and their modules."""


def module_norms(model: nn.Module) -> dict[str, float]:
    """Gradient norm of each module."""
    squares = dict.fromkeys(MODULES.values(), 0.0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            module = next(module for start, module in MODULES.items() if name.startswith(start))
            squares[module] += float(parameter.grad.double().square().sum())
    return {module: square**0.5 for module, square in squares.items()}
