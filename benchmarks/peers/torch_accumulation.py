"""PyTorch's usual accumulation: `(loss / n).backward()` for each micro-batch, then `optimizer.step()`.

Eager, and with the model and its loss under `torch.compile`. In float32, as the CPU suites are: autocast and GradScaler
are for a GPU.
"""

import torch
import torch.nn.functional as F

from benchmarks.contestants import ForeignModel, TrainStep
from benchmarks.peers import torch_models


def make(workload):
    return _make(workload, lambda function: function)


def make_compiled(workload):
    return _make(workload, torch.compile)


def _make(workload, transform):
    model, optimizer = _start(workload)

    @transform
    def loss_fn(x, y):
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def update(micro_batches):
        total_loss = 0.0
        for x, y in micro_batches:
            loss = loss_fn(x, y) / len(micro_batches)
            loss.backward()
            total_loss += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total_loss

    def get_weights():
        return [weight.numpy().copy() for weight in torch_models.weights(model)]

    return TrainStep(ForeignModel(get_weights), _feed_micro_batches, update)


def _start(workload):
    """The model with the workload's initial weights, and its optimizer."""
    theirs, adam = workload.model(), workload.optimizer()
    arrays = theirs.get_weights()
    if workload.name.startswith("MLP"):
        model = torch_models.mlp([len(arrays[0]), *map(len, arrays[1::2])])
    else:
        blocks = [layer for layer in theirs.layers if layer.name.startswith("block_")]
        context = theirs.get_layer("context").context
        model = torch_models.GPT(*arrays[0].shape[:1], context, arrays[0].shape[1], len(blocks), blocks[0].heads)
    torch_models.set_weights(model, arrays)
    # Without weight decay this is Adam.
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=float(adam.learning_rate),
        betas=(adam.beta_1, adam.beta_2),
        eps=adam.epsilon,
        weight_decay=adam.weight_decay or 0.0,
        fused=True,
    )
    return model, optimizer


def _feed_micro_batches(stack):
    # Labels must be int64 in PyTorch.
    return [(torch.tensor(x), torch.tensor(y, dtype=torch.long)) for x, y in zip(*stack, strict=True)]
