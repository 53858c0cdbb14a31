"""PyTorch's usual accumulation: `(loss / n).backward()` for each micro-batch, then
`optimizer.step()`.

Eager, and with the model and its loss under `torch.compile`. In float32, as the CPU suites are:
autocast and GradScaler are for a GPU.
"""

import torch
import torch.nn.functional as F

from benchmarks.peers import torch_models
from benchmarks.support.contestants import ForeignModel, TrainStep


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
    theirs, optimizer = workload.model(), workload.optimizer()
    arrays = theirs.get_weights()
    if workload.name.startswith("MLP"):
        model = torch_models.mlp([len(arrays[0]), *map(len, arrays[1::2])])
    elif workload.name == "ConvNet":
        kernels = [array for array in arrays if array.ndim == 4]
        model = torch_models.ConvNet(
            [kernels[0].shape[2], *(each.shape[3] for each in kernels)], len(arrays[-1])
        )
    else:
        blocks = [layer for layer in theirs.layers if layer.name.startswith("block_")]
        context = theirs.get_layer("context").context
        model = torch_models.GPT(
            *arrays[0].shape[:1], context, arrays[0].shape[1], len(blocks), blocks[0].heads
        )
    torch_models.set_weights(model, arrays)
    return model, _optimizer(optimizer, model.parameters())


def _optimizer(theirs, parameters):
    """PyTorch's form of a Keras optimizer."""
    rate = float(theirs.learning_rate)
    if hasattr(theirs, "momentum"):
        return torch.optim.SGD(parameters, rate, momentum=theirs.momentum, fused=True)
    return torch.optim.AdamW(  # without weight decay this is Adam
        parameters,
        lr=rate,
        betas=(theirs.beta_1, theirs.beta_2),
        eps=theirs.epsilon,
        weight_decay=theirs.weight_decay or 0.0,
        fused=True,
    )


def _feed_micro_batches(stack):
    # as PyTorch asks
    return [(_inputs(x), torch.tensor(y, dtype=torch.long)) for x, y in zip(*stack, strict=True)]


def _inputs(x):
    """A micro-batch; images get PyTorch's order of axes, and stay in memory as they are."""
    return torch.tensor(x).permute(0, 3, 1, 2) if x.ndim == 4 else torch.tensor(x)
