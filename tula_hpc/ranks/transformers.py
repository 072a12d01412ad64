"""A vision transformer and a language model in plain torch, small by default and as large as their arguments say.

Both are stacks of the same pre-norm block. Their normalisation layers and embeddings can be told by name (`*norm*`,
`*embed*`), for `workload.unscaled`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Self-attention and a perceptron, each behind a LayerNorm and beside a shortcut: (batch, tokens, width) -> same.

    With `causal` no token sees the ones after it.
    """

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        if width % heads:
            raise ValueError(f"width is {width}, which {heads} heads cannot share evenly; use a multiple of heads")
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        projected = self.query_key_value(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        # memory in proportion to the tokens, where the device has a kernel for it, and not to their square
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.perceptron(self.perceptron_norm(x))


class VisionTransformer(nn.Module):
    """(batch, in_channels, image_size, image_size) -> (batch, num_classes), after Dosovitskiy et al. 2020
    (arXiv 2010.11929), with the mean over patches in place of a class token."""

    def __init__(
        self, in_channels: int, image_size: int, patch_size: int, num_classes: int, depth: int, width: int, heads: int
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size is {image_size}, which patches of {patch_size} do not fill; use a divisor")
        self.patch_embed = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.position_embed = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        return self.head(self.last_norm(self.blocks(patches + self.position_embed)).mean(1))


class LanguageModel(nn.Module):
    """Tokens (batch, tokens), at most `sequence_length` of them -> logits of the next token at each place,
    (batch, vocabulary, tokens): classes are dimension 1, as torch's CrossEntropyLoss wants them."""

    def __init__(self, vocabulary: int, sequence_length: int, depth: int, width: int, heads: int):
        super().__init__()
        self.token_embed = nn.Embedding(vocabulary, width)
        self.position_embed = nn.Parameter(0.02 * torch.randn(sequence_length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token_embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.token_embed(tokens) + self.position_embed[: tokens.shape[1]]
        return self.head(self.last_norm(self.blocks(embedded))).transpose(1, 2)
