"""scikit-learn's handwritten digits, with captions in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_WORDS = ("<start>", "a", "thin", "plain", "bold", "leaning", "left", "upright", "right", "parity", "even", "odd")
WORDS = (*_WORDS, *_NUMBERS)
"""The vocabulary."""


@dataclass(frozen=True)
class Digits:
    """``images`` [N, 8, 8] from 0 to 1; ``captions`` [N, 8] indices of words."""

    images: torch.Tensor
    captions: torch.Tensor

    def batch(self, generator: torch.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images whose contrast has heavy tails, as that of photographs has, and their captions."""
        chosen = torch.randint(len(self.images), (size,), generator=generator)
        contrast = torch.exp(0.5 * torch.randn(size, 1, 1, generator=generator))
        return self.images[chosen] * contrast, self.captions[chosen]


def load() -> Digits:
    """All 1797 digits. Captions say what is seen: ``a bold seven leaning left parity odd``.

    Raises:
        ImportError: scikit-learn is not installed; names the extra.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the demonstration needs scikit-learn: pip install 'megascale[dev]'") from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    ink = images.mean((1, 2))
    edges = torch.quantile(ink, torch.tensor([1 / 3, 2 / 3]))
    columns = torch.arange(8.0) - 3.5
    mass = images.sum((1, 2))
    lean = ((images[:, :4].sum(1) - images[:, 4:].sum(1)) * columns).sum(1) / mass
    tilts = torch.quantile(lean, torch.tensor([1 / 3, 2 / 3]))
    captions = [
        f"<start> a {('thin', 'plain', 'bold')[int((ink[i] > edges).sum())]} {_NUMBERS[digit]} leaning "
        f"{('left', 'upright', 'right')[int((lean[i] > tilts).sum())]} parity {('even', 'odd')[digit % 2]}"
        for i, digit in enumerate(found.target.tolist())
    ]
    indices = [[WORDS.index(word) for word in caption.split()] for caption in captions]
    return Digits(images, torch.tensor(indices))
