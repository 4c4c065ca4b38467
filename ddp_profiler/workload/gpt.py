"""The built-in language models: a GPT with layer norm before each sublayer."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_profiler.errors import UsageError
from ddp_profiler.workload.catalog import GptOptions
from ddp_profiler.workload.data import ByteDataset, PooledDataset, synthetic_tokens
from ddp_profiler.workload.definition import Workload
from ddp_profiler.workload.losses import mean_cross_entropy

_BYTE_VALUES = 256


class Attention(nn.Module):
    """Causal self-attention over [sample, position, width].

    Args:
        width: Features of a position.
        heads: Number of heads; divides the width.
        dropout: Probability with which an attention weight or an output is dropped.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended values, before they are added to ``x``."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        y = self.project(y.transpose(1, 2).flatten(-2))
        return functional.dropout(y, dropout)


class Block(nn.Module):
    """A transformer block: attention, then a feed-forward network, each added to its input.

    Args:
        width: Features of a position.
        heads: Number of attention heads.
        dropout: Probability with which an activation is dropped.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output in the shape of ``x``."""
        x = x + self.attention(self.attention_norm(x))
        fed: Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + fed


class Gpt(nn.Module):
    """A GPT whose output layer shares the token embedding's weights.

    Args:
        options: Its sizes.
    """

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocab, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads, options.dropout) for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(options.width)
        self._initialize(options.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [sample, position, token] for tokens [sample, position]."""
        positions = self.positions.weight[: tokens.shape[1]]
        x = self.dropout(self.tokens(tokens) + positions)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)

    def _initialize(self, layers: int) -> None:
        # As GPT-2: what is added to the residual stream shrinks with the number of additions.
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
                continue
            added = name.endswith(("project.weight", "feed_forward.2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)


def build(name: str, options: GptOptions, *, seed: int, data: Path | None) -> Workload:
    """Builds a language model with synthetic tokens, or the bytes of a file.

    Raises:
        InputError: The file cannot be used.
        UsageError: The vocabulary is too small for bytes.
    """
    dtype: torch.dtype = getattr(torch, options.dtype)
    dataset: PooledDataset | ByteDataset
    if data is None:
        dataset = synthetic_tokens(seed, vocab=options.vocab, context=options.context)
    elif options.vocab < _BYTE_VALUES:
        raise UsageError(
            f"--model {name}: vocab={options.vocab} is too small for --data, whose tokens are "
            f"bytes.",
            f"Give vocab={_BYTE_VALUES} or more.",
        )
    else:
        dataset = ByteDataset(data, options.context)
    # float16 rounds the usual 1e-8 to 0, and 0 / 0 follows.
    epsilon = 1e-4 if dtype is torch.float16 else 1e-8
    return Workload(
        name=name,
        module=Gpt(options).to(dtype),
        dataset=dataset,
        inputs=_inputs,
        loss=_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, eps=epsilon),
        tokens_per_sample=options.context,
        options=asdict(options),
    )


def _inputs(batch: Any) -> tuple[Any, ...]:
    return (batch[:, :-1],)


def _loss(output: Any, batch: Any) -> Tensor:
    return mean_cross_entropy(output, batch[:, 1:])
