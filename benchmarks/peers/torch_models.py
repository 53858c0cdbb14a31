"""Models in PyTorch, and their weights in the Keras model's order.

Shape suffixes are those of `fastaccum.transformer`: B batch, T time, D width, H heads, K width per
head. The module imports PyTorch alone, so that a machine without TensorFlow can use it.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


def mlp(widths):
    """Makes a multilayer perceptron with ReLU; widths go from the input's to the logits'."""
    layers = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ConvNet(nn.Sequential):
    """Convolutions of 3 x 3, each with BatchNorm, ReLU and pooling, on images `[B, C, H, W]`."""

    def __init__(self, channels, classes):
        layers = []
        for channels_in, channels_out in itertools.pairwise(channels):
            # PyTorch's momentum is the share of the new batch: 0.01 is Keras's 0.99.
            layers += [
                nn.Conv2d(channels_in, channels_out, 3, padding="same", bias=False),
                nn.BatchNorm2d(channels_out, eps=1e-3, momentum=0.01),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        super().__init__(*layers, *pooled, nn.Linear(channels[-1], classes))


class CausalSelfAttention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD, cos_TK, sin_TK):
        batch, time, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, time, 3, self.heads, width // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        q_BHTK = _rotate(q_BHTK, cos_TK, sin_TK)
        k_BHTK = _rotate(k_BHTK, cos_TK, sin_TK)
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(mixed_BHTK.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Transformer block of `fa.gpt`."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm = _norm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = _norm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD, cos_TK, sin_TK):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD)), approximate="tanh"))


class GPT(nn.Module):
    """Decoder-only transformer `fa.gpt`, from ids `[B, T]` to logits.

    Its head does not share the embedding's weights.
    """

    def __init__(self, vocabulary_size, context, width, layers, heads):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = _norm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        head_width = width // heads
        inverse = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        angles_TK = (torch.arange(context)[:, None] * inverse).repeat(1, 2)
        self.register_buffer("cos_TK", angles_TK.cos(), persistent=False)
        self.register_buffer("sin_TK", angles_TK.sin(), persistent=False)

    def forward(self, ids_BT):
        time = ids_BT.shape[1]
        x_BTD = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TK[:time], self.sin_TK[:time])
        return self.head(self.final_norm(x_BTD))


def weights(model):
    """Returns views of the model's weights in Keras's order and layout; writing to one sets it."""
    views = []
    for module in model.modules():
        views += _views(module)
    return views


def _views(module):
    """Returns views of the weights that a module has itself, without those of its submodules.

    BatchNorm's running statistics are among them, after its parameters.
    """
    parameters = [parameter.data for parameter in module.parameters(recurse=False)]
    match module:
        case nn.Linear():  # Keras's kernels are [in, out]
            weight, *bias = parameters
            return [weight.T, *bias]
        case nn.Conv2d():  # and [height, width, in, out]
            weight, *bias = parameters
            return [weight.permute(2, 3, 1, 0), *bias]
        case nn.BatchNorm2d():
            return [*parameters, module.running_mean, module.running_var]
    return parameters


def set_weights(model, arrays):
    """Copies NumPy arrays in Keras's order into the model."""
    for weight, array in zip(weights(model), arrays, strict=True):
        if weight.shape != array.shape:
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} cannot be set to an array of "
                f"{array.shape}."
            )
        weight.copy_(torch.from_numpy(array))


def _norm(width):
    # Keras's epsilon.
    return nn.LayerNorm(width, eps=1e-3, bias=False)


def _rotate(t_BHTK, cos_TK, sin_TK):
    """Applies rotary positions, which rotate element i with element i + K/2."""
    first, second = t_BHTK.chunk(2, dim=-1)
    return t_BHTK * cos_TK + torch.cat([-second, first], dim=-1) * sin_TK
