"""PyTorch's usual accumulation: `(loss / n).backward()` a micro-batch, then `optimizer.step()`.

It runs eagerly, and with the model and its loss under `torch.compile`, in float32 as the CPU suites
do: autocast and GradScaler are for a GPU.
"""

import torch
import torch.nn.functional as F

from benchmarks.peers import torch_models
from benchmarks.support.contestants import ForeignModel, TrainStep


def make(workload):
    """Makes the eager `TrainStep`."""
    return _make(workload, lambda function: function)


def make_compiled(workload):
    """Makes the `TrainStep` under `torch.compile`."""
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
    """Makes the model with the workload's initial weights, and its optimizer."""
    keras_model = workload.model()
    arrays = keras_model.get_weights()
    if workload.name.startswith("MLP"):
        biases = arrays[1::2]
        model = torch_models.mlp([len(arrays[0]), *map(len, biases)])
    elif workload.name == "ConvNet":
        kernels = [array for array in arrays if array.ndim == 4]
        channels = [kernels[0].shape[2], *(kernel.shape[3] for kernel in kernels)]
        model = torch_models.ConvNet(channels, classes=len(arrays[-1]))
    else:
        blocks = [layer for layer in keras_model.layers if layer.name.startswith("block_")]
        vocabulary_size, width = arrays[0].shape
        model = torch_models.GPT(
            vocabulary_size,
            keras_model.get_layer("context").context,
            width,
            layers=len(blocks),
            heads=blocks[0].heads,
        )
    torch_models.set_weights(model, arrays)
    return model, _optimizer(workload.optimizer(), model.parameters())


def _optimizer(keras_optimizer, parameters):
    """Makes PyTorch's form of a Keras optimizer."""
    rate = float(keras_optimizer.learning_rate)
    if hasattr(keras_optimizer, "momentum"):
        return torch.optim.SGD(parameters, rate, momentum=keras_optimizer.momentum, fused=True)
    return torch.optim.AdamW(  # without weight decay this is Adam
        parameters,
        lr=rate,
        betas=(keras_optimizer.beta_1, keras_optimizer.beta_2),
        eps=keras_optimizer.epsilon,
        weight_decay=keras_optimizer.weight_decay or 0.0,
        fused=True,
    )


def _feed_micro_batches(stack):
    stacked_x, stacked_y = stack
    return [
        (_inputs(x), torch.tensor(y, dtype=torch.long))  # PyTorch's labels are int64
        for x, y in zip(stacked_x, stacked_y, strict=True)
    ]


def _inputs(x):
    """Makes a tensor; images get PyTorch's order of axes, and stay in memory as they are."""
    tensor = torch.tensor(x)
    if x.ndim == 4:
        return tensor.permute(0, 3, 1, 2)
    return tensor
