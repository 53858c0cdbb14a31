"""Runs the GPT of a program in PyTorch: `python -m benchmarks.gpu.torch_peer FOLDER PROGRAM`.

It starts from the program's initial weights and trains as a PyTorch recipe does, under
torch.compile or with --eager: autocast, scaled dot-product attention, `(loss / n).backward()` n
times, GradScaler for float16, clipping, fused AdamW. The module needs PyTorch.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu import manifest, measure
from benchmarks.peers import torch_models

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ScaledEmbedding(nn.Embedding):
    """Embedding scaled up as in `fa.gpt` with a tied head."""

    def forward(self, ids_BT):
        return super().forward(ids_BT) * (2 * math.sqrt(self.embedding_dim))


class TiedGPT(torch_models.GPT):
    """`fa.gpt` in the form of its presets: the head is the embedding's table."""

    def __init__(self, vocabulary_size, context, width, layers, heads):
        super().__init__(vocabulary_size, context, width, layers, heads)
        self.embedding = ScaledEmbedding(vocabulary_size, width)
        self.head.weight = self.embedding.weight


def set_weights(model, weights):
    """Copies a stacked program's weights into the model."""
    for name, value in weights.items():
        layer, _, path = name.rpartition("/")
        if layer == "blocks":
            sublayer, _, kind = path.rpartition(".")
            for block, weight in zip(model.blocks, torch.from_numpy(value), strict=True):
                if kind == "kernel":
                    weight = weight.T  # Keras's kernels are [in, out]
                block.get_submodule(sublayer).weight.data.copy_(weight)
        else:
            model.get_submodule(layer).weight.data.copy_(torch.from_numpy(value))


def make_step(program, compiled):
    """Makes `step()`, which trains on the program's tokens once and returns the loss."""
    options = program["optimizer"]
    model = TiedGPT(**program["sizes"])
    set_weights(model, manifest.weights(program))
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options["learning_rate"],
        betas=(options["beta_1"], options["beta_2"]),
        eps=options["epsilon"],
        weight_decay=options["weight_decay"],
        fused=True,
    )
    dtype = getattr(torch, program["dtype"])
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype is torch.float16)
    stacked_x, stacked_y = (
        torch.from_numpy(ids).long().to(DEVICE) for ids in manifest.tokens(program)
    )
    micro_batches = list(zip(stacked_x, stacked_y, strict=True))

    def loss_fn(x, y):
        with torch.autocast(DEVICE, dtype):
            logits = model(x)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    if compiled:
        loss_fn = torch.compile(loss_fn)

    def step():
        total_loss = 0.0
        for x, y in micro_batches:
            loss = loss_fn(x, y) / len(micro_batches)
            scaler.scale(loss).backward()
            total_loss += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return total_loss

    return step


def ready(value):
    """Waits for the device and returns the value."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return value


def matmul_rate(dtype):
    """Measures the FLOP/s of a large matmul of random numbers."""
    size = 8192 if DEVICE == "cuda" else 256
    left, right = torch.randn(2, size, size, dtype=getattr(torch, dtype), device=DEVICE)
    return measure.rate_of_matmuls(lambda: left @ right, ready, size)


def main(argv=None):
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.torch_peer", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="from benchmarks.gpu.export")
    parser.add_argument("program", help="the stacked program whose model this trains")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = parser.parse_args(argv)
    program = manifest.chosen(parser, arguments)
    if not program["stacked"]:
        parser.error(f"{program['name']}: PyTorch starts from the weights of a stacked program.")
    torch.set_float32_matmul_precision("high")
    losses, seconds = measure.timed(make_step(program, compiled=not arguments.eager), ready)
    measure.require_losses(program, losses)
    peak = None
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_allocated()  # before the matmul's operands
    measure.report(
        "PyTorch eager" if arguments.eager else "torch.compile",
        program,
        losses,
        seconds,
        matmul_rate=matmul_rate(program["dtype"]),
        peak_bytes=peak,
        device=torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        versions={"torch": torch.__version__},
    )


if __name__ == "__main__":
    main()
