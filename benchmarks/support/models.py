"""Workloads: a model, its loss, its optimizer and synthetic data, the same for every contestant.

`workload.model()` starts from the same weights each time, and `workload.arrays(updates)` holds the
same numbers each time, so contestants that do the same arithmetic must get the same losses.
"""

import dataclasses
import functools
import os
from collections.abc import Callable

import keras
import numpy as np
from keras import layers as kl

import fastaccum as fa
from benchmarks.support.agreement import MOVEMENT_TOLERANCE
from benchmarks.support.blocks import convolved, inverted, residual, unet

SEED = 0


def _size(full, small):
    """Returns `small` under `--benchmark-disable`, where contestants only have to agree."""
    if "FASTACCUM_SMALL_BENCHMARKS" in os.environ:
        return small
    return full


def _cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Model and data of an update: `micro_batches` micro-batches of `batch_size` examples.

    Args:
        name: as the tables show it.
        micro_batches: micro-batches in one update.
        batch_size: examples in one micro-batch.
        build: makes the Keras model.
        draw: `(generator, examples) -> (x, y)`, NumPy arrays.
        optimizer: makes the Keras optimizer; takes its keyword arguments.
        loss: makes the loss.
        fit_updates: updates in one timed epoch of `fit`.
        steps_per_execution: the values that tuned peers try. A step is one micro-batch to them, and
            no value may be more than the micro-batches of an epoch.
        step_updates: updates in one timed block of train steps.
        rounds: how many times each contestant is timed.
        movement: by how much of a weight's movement contestants may differ (see
            `benchmarks.support.agreement`).
        scan_layers: of the `fa.Trainer`.
    """

    name: str
    micro_batches: int
    batch_size: int
    build: Callable
    draw: Callable
    optimizer: Callable
    fit_updates: int
    step_updates: int
    rounds: int
    steps_per_execution: tuple = (1, 10, 100)
    loss: Callable = _cross_entropy
    movement: float = MOVEMENT_TOLERANCE
    scan_layers: bool | str = "auto"

    @property
    def update_size(self):
        """The number of examples in one update."""
        return self.micro_batches * self.batch_size

    def model(self):
        """Makes a new model, with the same initial weights in every call."""
        keras.utils.set_random_seed(SEED)
        return self.build()

    def arrays(self, updates):
        """Draws x and y for `updates` updates, a row for each example, in the order of training."""
        return self.draw(np.random.default_rng(SEED), updates * self.update_size)

    def stacks(self, updates, micro_batches=None):
        """Returns the examples of `arrays` as a list with one `(x, y)` for each update.

        They have the shape `[micro_batches, batch_size, ...]`, where `micro_batches` may be other
        than the workload's.
        """
        if micro_batches is None:
            micro_batches = self.micro_batches
        x, y = self.draw(np.random.default_rng(SEED), updates * micro_batches * self.batch_size)
        lead = (updates, micro_batches, self.batch_size)
        stacks_of_x = x.reshape(lead + x.shape[1:])
        stacks_of_y = y.reshape(lead + y.shape[1:])
        return list(zip(stacks_of_x, stacks_of_y, strict=True))

    def with_frozen_statistics(self):
        """Returns this workload with BatchNorm in inference mode, where rows are independent."""

        def build():
            model = self.build()
            for layer in model.layers:
                if isinstance(layer, kl.BatchNormalization):
                    layer.trainable = False
            return model

        return dataclasses.replace(self, build=build)

    def with_epsilon(self, epsilon):
        """Returns this workload with that epsilon in its optimizer, if the optimizer has one."""
        if self.optimizer is _momentum:
            return self
        optimizer = functools.partial(self.optimizer, epsilon=epsilon)
        return dataclasses.replace(self, optimizer=optimizer)

    @property
    def has_batch_statistics(self):
        """Says if the model has BatchNorm."""
        layers = self.model().layers
        return any(isinstance(layer, kl.BatchNormalization) for layer in layers)


def _mlp(widths, dropout=()):
    """Makes dense layers, then a Dropout for each rate in `dropout`."""
    layers = [kl.Dense(width, activation="relu") for width in widths]
    layers += [kl.Dropout(rate) for rate in dropout]
    return keras.Sequential([keras.Input((784,)), *layers, kl.Dense(10)])


def _convnet(dropout=()):
    """Makes three convolutions, each with BatchNorm, ReLU, pooling, and a Dropout for each rate."""
    x = inputs = keras.Input((32, 32, 3))
    for filters in _size((32, 64, 128), (8, 8, 8)):
        # Without a bias: BatchNorm cancels it, so that its gradient is rounding noise, on which no
        # two programs agree.
        x = kl.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = kl.BatchNormalization()(x)
        x = kl.ReLU()(x)
        x = kl.MaxPooling2D()(x)
        for rate in dropout:
            x = kl.Dropout(rate)(x)
    x = kl.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, kl.Dense(10)(x))


def _stacked(shape, layers):
    """Makes a model of layers, or blocks of them, one after the other."""
    x = inputs = keras.Input(shape)
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def _classifier(shape, layers):
    return _stacked(shape, [*layers, kl.GlobalAveragePooling2D(), kl.Dense(10)])


def _conv1d():
    """Makes three convolutions over time, each with BatchNorm, ReLU and pooling."""
    blocks = []
    for filters in _size((64, 128, 128), (8, 8, 8)):
        blocks += [
            kl.Conv1D(filters, 5, padding="same", use_bias=False),
            kl.BatchNormalization(),
            kl.ReLU(),
            kl.MaxPooling1D(),
        ]
    return _stacked((256, 12), [*blocks, kl.GlobalAveragePooling1D(), kl.Dense(10)])


def _resnet20():
    """Makes the ResNet of He et al. 2015 for CIFAR-10, three stages of three blocks."""
    blocks = [residual(16), residual(16), residual(16)]
    for filters in (32, 64):
        blocks += [residual(filters, strides=2), residual(filters), residual(filters)]
    layers = []
    for block in _size(blocks, blocks[:1]):
        layers += [block, kl.ReLU()]
    return _classifier((32, 32, 3), [convolved(16), *layers])


def _mobilenet():
    """Makes MobileNetV2 for small images, seven inverted residuals."""
    filters_and_strides = [(16, 1), (24, 2), (24, 1), (32, 2), (32, 1), (64, 1), (64, 1)]
    blocks = [inverted(filters, strides) for filters, strides in filters_and_strides]
    blocks = _size(blocks, blocks[:2])
    return _classifier((32, 32, 3), [convolved(16), *blocks, convolved(128, 1)])


def _unet():
    """Makes a U-Net of three scales with two convolutions each way."""
    return _stacked((32, 32, 3), [unet(_size((16, 32, 64), (4, 8)), 10, convolutions=2)])


def _vectors(generator, examples):
    return _inputs(generator, examples, (784,)), _labels(generator, examples)


def _images(generator, examples):
    return _inputs(generator, examples, (32, 32, 3)), _labels(generator, examples)


def _series(generator, examples):
    return _inputs(generator, examples, (256, 12)), _labels(generator, examples)


def _inputs(generator, examples, shape):
    return generator.normal(size=(examples, *shape)).astype("float32")


def _pixels(generator, examples):
    x, _ = _images(generator, examples)
    return x, generator.integers(0, 10, size=x.shape[:-1]).astype("int32")


def _labels(generator, examples):
    return generator.integers(0, 10, size=examples).astype("int32")


def _tokens(vocabulary_size=256, context=128):
    def draw(generator, examples):
        ids = generator.integers(0, vocabulary_size, size=(examples, context + 1)).astype("int32")
        return ids[:, :-1], ids[:, 1:]

    return draw


def _keras_gpt(width=64, heads=4, vocabulary_size=1000, depth=2, context=64):
    """Makes a GPT of Keras's own layers without positions, of 230,000 parameters by default."""
    ids = keras.Input((context,), dtype="int32")
    x = kl.Embedding(vocabulary_size, width)(ids)
    for _ in range(depth):
        y = kl.LayerNormalization()(x)
        # Without biases: softmax cancels that of the keys, so that its gradient is rounding noise.
        attention = kl.MultiHeadAttention(heads, width // heads, use_bias=False)
        x = kl.Add()([x, attention(y, y, use_causal_mask=True)])
        y = kl.LayerNormalization()(x)
        x = kl.Add()([x, kl.Dense(width)(kl.Dense(4 * width, activation="gelu")(y))])
    return keras.Model(ids, kl.Dense(vocabulary_size)(kl.LayerNormalization()(x)))


def _hub_gpt2():
    """Makes KerasHub's GPT-2 with 200,000 parameters, without dropout."""
    import keras_hub

    sizes = {
        "vocabulary_size": 1000,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 64,
        "intermediate_dim": 256,
    }
    backbone = keras_hub.models.GPT2Backbone(**sizes, dropout=0.0, max_sequence_length=128)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def _padded_tokens(generator, examples):
    ids, labels = _tokens(1000, 64)(generator, examples)
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}, labels


def _adam(**kwargs):
    return keras.optimizers.Adam(1e-3, **kwargs)


def adamw(**kwargs):
    return keras.optimizers.AdamW(3e-4, weight_decay=0.1, **kwargs)


def _momentum(**kwargs):
    return keras.optimizers.SGD(0.05, momentum=0.9, **kwargs)


MLP_128 = Workload(
    "MLP 128",
    micro_batches=10,
    batch_size=32,
    build=lambda: _mlp([128]),
    draw=_vectors,
    optimizer=_adam,
    fit_updates=_size(100, 10),
    step_updates=30,
    rounds=15,
    steps_per_execution=_size((1, 10, 100), (1, 100)),
)
MLP_2048 = Workload(
    "MLP 2048",
    micro_batches=8,
    batch_size=64,
    build=lambda: _mlp(2 * [_size(2048, 128)]),
    draw=_vectors,
    optimizer=_adam,
    fit_updates=5,
    step_updates=2,
    rounds=5,
    steps_per_execution=_size((1, 10, 100), (10,)),
)
CONVNET = Workload(
    "ConvNet",
    micro_batches=8,
    batch_size=16,
    build=_convnet,
    draw=_images,
    optimizer=_momentum,
    fit_updates=3,
    step_updates=3,
    rounds=5,
    steps_per_execution=_size((1, 10), (10,)),
)
GPT = Workload(
    "GPT",
    micro_batches=8,
    batch_size=4,
    build=lambda: fa.gpt(width=_size(256, 32), layers=_size(4, 1), heads=4, context=128),
    draw=_tokens(),
    optimizer=adamw,
    fit_updates=_size(3, 2),
    step_updates=1,
    rounds=10,
    steps_per_execution=_size((1, 10), (10,)),
)

GPT_32K = Workload(
    "GPT 32k",
    micro_batches=4,
    batch_size=4,
    build=lambda: fa.gpt(_size(32_768, 4096), width=128, layers=_size(2, 1), heads=2, context=128),
    draw=_tokens(_size(32_768, 4096)),
    optimizer=adamw,
    fit_updates=3,
    step_updates=1,
    rounds=5,
    loss=fa.LinearCrossEntropy,
)

# Small models as people first try them.
GPT_NANO = dataclasses.replace(
    GPT, name="GPT nano", build=lambda: fa.gpt(preset="nano", context=128)
)
KERAS_GPT = dataclasses.replace(
    GPT, name="Keras GPT", build=_keras_gpt, draw=_tokens(1000, context=64)
)
HUB_GPT2 = dataclasses.replace(GPT, name="KerasHub GPT-2", build=_hub_gpt2, draw=_padded_tokens)

ALL = (MLP_128, MLP_2048, CONVNET, GPT)


def _convolutional(name, batch_size, build, draw, optimizer, movement=MOVEMENT_TOLERANCE):
    return Workload(
        name,
        micro_batches=8,
        batch_size=batch_size,
        build=build,
        draw=draw,
        optimizer=optimizer,
        fit_updates=2,
        step_updates=1,
        rounds=3,
        steps_per_execution=(10,),
        movement=movement,
    )


# Other convolutional networks. Their convolutions have no bias where BatchNorm follows, as in the
# ConvNet. In any program, one of the MobileNet's weights is off from float64 by 2.8% of its
# movement, so two programs may be twice that apart.
CONVOLUTIONAL = (
    _convolutional("Conv1D", 16, _conv1d, _series, _adam),
    _convolutional("ResNet20", 8, _resnet20, _images, _momentum),
    _convolutional("MobileNet", 8, _mobilenet, _images, _momentum, movement=6e-2),
    _convolutional("U-Net", 4, _unet, _pixels, _momentum),
)

# The same with Dropout after each hidden block.
WITH_DROPOUT = {
    MLP_128: dataclasses.replace(MLP_128, build=lambda: _mlp([128], [0.2])),
    CONVNET: dataclasses.replace(CONVNET, build=lambda: _convnet([0.2])),
}


_SMALL = (GPT_NANO, KERAS_GPT, HUB_GPT2)
_NAMED = {workload.name: workload for workload in (*ALL, *CONVOLUTIONAL, GPT_32K, *_SMALL)}


# A benchmark passes a function below with its arguments to other processes, which make the workload
# there. So they are functions of this module that take numbers and names: all of it can be pickled.


def named(name):
    """Returns the workload of this name.

    >>> named("GPT 32k").update_size
    16
    """
    return _NAMED[name]


def with_logits(name):
    """Returns the workload of this name with Keras's own loss, which needs the logits."""
    return dataclasses.replace(named(name), loss=_cross_entropy)


def divided(name, micro_batches, examples=64):
    """Returns the workload of this name with updates of `examples` examples in all.

    >>> divided("GPT", 16).batch_size
    4
    """
    return dataclasses.replace(
        named(name), micro_batches=micro_batches, batch_size=examples // micro_batches
    )


def gpt_of_depth(layers, stacked):
    """Makes the workload of a GPT of width 64, its layers one `LayerStack` or unrolled."""
    return dataclasses.replace(
        GPT,
        micro_batches=2,
        build=lambda: fa.gpt(width=64, layers=layers, heads=2, context=64, stacked=stacked),
        draw=_tokens(context=64),
    )


def keras_gpt_of_depth(layers, scanned):
    """Makes the workload of a GPT of Keras's layers, run as one loop or one after the other."""
    return dataclasses.replace(
        KERAS_GPT,
        micro_batches=4,
        batch_size=8,
        build=lambda: _keras_gpt(vocabulary_size=128, depth=layers, context=16),
        draw=_tokens(128, context=16),
        scan_layers=scanned,
    )


def gpt_of_length(tokens):
    """Makes the workload of a GPT of width 128 on windows of `tokens`, 2 x 4,096 in an update."""
    return dataclasses.replace(
        GPT,
        micro_batches=2,
        batch_size=4096 // tokens,
        build=lambda: fa.gpt(width=128, layers=2, heads=2, context=tokens),
        draw=_tokens(context=tokens),
    )


def scales(variables):
    """Makes the workload of many variables of 4 numbers each, with next to no arithmetic."""
    return Workload(
        f"{variables:,} variables",
        micro_batches=2,
        batch_size=8,
        build=lambda: keras.Sequential([keras.Input((4,)), _Scales(variables)]),
        draw=_inputs_as_targets,
        optimizer=functools.partial(keras.optimizers.SGD, 0.01),
        fit_updates=1,
        step_updates=1,
        rounds=30,
        loss=keras.losses.MeanSquaredError,
    )


class _Scales(kl.Layer):
    """Multiplies by the mean of its weights, vectors as long as the input."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def build(self, input_shape):
        self.scales = [self.add_weight(input_shape[-1:]) for _ in range(self.count)]

    def call(self, x):
        return x * keras.ops.mean(keras.ops.stack([weight.value for weight in self.scales]), axis=0)


def _inputs_as_targets(generator, examples):
    x = _inputs(generator, examples, (4,))
    return x, x
