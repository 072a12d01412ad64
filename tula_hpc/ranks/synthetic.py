"""Data made up on the spot, of the true shapes: images with a pattern for each class, tokens with a law of succession.

Samples repeat after a pool of at most 128 MiB: making each one when it is asked for would be measured as loading time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

POOL_BYTES = 2**27
POOL_SAMPLES = 4096
SUCCESSORS = (0.6, 0.2, 0.1, 0.1)
"""How likely each of the tokens is that may follow one: what the best model reaches is 60 % top-1, and all of top-5."""
_LAW_SEED = 1234  # of what training and test set share


class SyntheticImages(Dataset[Any]):
    """Random inputs of the true shape; each class has its own mean pattern, so that a model can learn something."""

    def __init__(self, length: int, shape: list[int], num_classes: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        pool = _pool(length, 4 * math.prod(shape))
        patterns = torch.randn(min(num_classes, pool), *shape, generator=torch.Generator().manual_seed(_LAW_SEED))
        self._labels = [int(i) for i in torch.randint(len(patterns), (pool,), generator=generator)]
        self._inputs = torch.randn(pool, *shape, generator=generator)
        for inputs, label in zip(self._inputs, self._labels, strict=True):  # one by one: a copy of all would be large
            inputs.add_(patterns[label], alpha=0.5)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._inputs[index % len(self._labels)], self._labels[index % len(self._labels)]


class SyntheticTokens(Dataset[Any]):
    """Sequences of a Markov chain: each token is followed by one of four, of fixed probabilities (`SUCCESSORS`).

    A sample is (tokens, the next token at each place), both int64 of shape (sequence_length,). All tokens are equally
    frequent, so a model that has learnt nothing is right at 1 / vocabulary of the places.

    Args:
        length: Samples.
        sequence_length: Tokens in a sample.
        vocabulary: Different tokens.
        seed: Of the sequences; the law of succession is the same for every seed.
    """

    def __init__(self, length: int, sequence_length: int, vocabulary: int, seed: int):
        law = torch.Generator().manual_seed(_LAW_SEED)
        followers = torch.stack([torch.randperm(vocabulary, generator=law) for _ in SUCCESSORS])
        generator = torch.Generator().manual_seed(seed)
        pool = _pool(length, 8 * (sequence_length + 1))
        self._sequences = torch.empty(pool, sequence_length + 1, dtype=torch.int64)
        token = torch.randint(vocabulary, (pool,), generator=generator)
        weights = torch.tensor(SUCCESSORS)
        for place in range(sequence_length + 1):
            self._sequences[:, place] = token
            token = followers[torch.multinomial(weights, pool, replacement=True, generator=generator), token]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sequence = self._sequences[index % len(self._sequences)]
        return sequence[:-1], sequence[1:]


def _pool(length: int, sample_bytes: int) -> int:
    """How many samples are made before they repeat."""
    return max(1, min(length, POOL_BYTES // sample_bytes, POOL_SAMPLES))
