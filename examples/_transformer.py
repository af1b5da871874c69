"""A small transformer over bytes, whose token embedding and output head are one parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # every byte


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let every position look at itself and those before it."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            *heads, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the input's shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Predicts each next byte of a text.

    Args:
        width: Size of the vectors between blocks.
        depth: How many blocks.
        heads: How many attention heads a block has.
        context: The longest input, in bytes.
        dropout: Probability of dropping an activation while training.
    """

    def __init__(
        self, *, width: int = 160, depth: int = 4, heads: int = 5, context: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, length, 256) for tokens of shape (batch, length)."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
