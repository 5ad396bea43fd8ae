"""A small decoder-only transformer whose matrix products work like tensor cores, on a CPU too."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "Block", "Linear", "plain_linear"]

EMBEDDING_STD = 0.3


class Linear(nn.Module):
    """``x @ weight.T`` with operands in the dtype of ``x`` and products in fp32.

    A tensor core reads fp16 and accumulates in fp32. A CPU multiplies fp16 a hundred times more slowly than
    fp32, so there the operands, and the gradients that flow back, are stored in fp16 but multiplied in fp32.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * (3 * num_in) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        # Without a mixed-precision wrapper (DDP) the weight is fp32; its gradient passes through this cast.
        weight = self.weight.to(x.dtype)
        if x.is_cuda:
            return F.linear(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)


def plain_linear(num_in: int, num_out: int) -> nn.Linear:
    """The same weights in torch's own layer, for those who convert it."""
    linear = nn.Linear(num_in, num_out, bias=False)
    with torch.no_grad():
        linear.weight.copy_(Linear(num_in, num_out).weight)
    return linear


class Norm(nn.Module):
    """LayerNorm computed in fp32, without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float()).to(x.dtype)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalised copy of the residual stream."""

    def __init__(self, width: int, num_heads: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = Norm(width)
        self.query_key_value = linear(width, 3 * width)
        self.attention_out = linear(width, width)
        self.mlp_norm = Norm(width)
        self.mlp_in = linear(width, 4 * width)
        self.mlp_out = linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.query_key_value(self.attention_norm(x))))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, projected: Tensor) -> Tensor:
        batch, sequence, _ = projected.shape
        # (batch, sequence, 3 * width) -> 3 of (batch, heads, sequence, head)
        heads = projected.view(batch, sequence, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads if projected.is_cuda else heads.float()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.to(projected.dtype).transpose(1, 2).reshape(batch, sequence, -1)


class GPT(nn.Module):
    """Next-token model.

    Args:
        vocabulary: number of tokens.
        layers: number of blocks.
        width: size of the residual stream.
        num_heads: divides ``width``.
        sequence: longest input.
        dtype: of the activations.
        linear: makes the linear layers of the blocks.
    """

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        width: int,
        num_heads: int,
        sequence: int,
        dtype: torch.dtype,
        linear: Callable[[int, int], nn.Module] = Linear,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.token = nn.Parameter(torch.randn(vocabulary, width) * EMBEDDING_STD)
        self.position = nn.Parameter(torch.randn(sequence, width) * EMBEDDING_STD)
        self.blocks = nn.ModuleList(Block(width, num_heads, linear) for _ in range(layers))
        self.norm = Norm(width)
        self.head = Linear(width, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats, fp32, shape (), of int64 tokens, shape (batch, sequence)."""
        x = F.embedding(inputs, self.token).to(self.dtype) + self.position[: inputs.shape[1]].to(self.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
