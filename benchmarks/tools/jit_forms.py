"""Times train steps with XLA and without: `python -m benchmarks.tools.jit_forms [MODEL ...]`.

The choice of `jit_compile="auto"` is fitted to these times. Both forms of a model take turns, step
by step, in one process; a time is the median of its steps.
"""

import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import fastaccum as fa
from benchmarks.support.blocks import convolved, inverted, residual, unet
from fastaccum.data.stacks import Batch

MICRO_BATCHES = 4
# Each model is timed for at least this long, and for at least so many rounds.
MIN_SECONDS = 2
MIN_ROUNDS = 7
CLASSES = 10


def dense(width, depth):
    """Makes `depth` dense layers and the scores of the classes."""
    layers = [kl.Dense(width, "relu") for _ in range(depth)]
    return [*layers, kl.Dense(CLASSES)]


def images(*layers):
    """Ends layers of images with the scores of the classes."""
    return [*layers, kl.GlobalAveragePooling2D(), kl.Dense(CLASSES)]


def sequences(*layers):
    """Ends layers of sequences with the scores of the classes."""
    return [*layers, kl.GlobalAveragePooling1D(), kl.Dense(CLASSES)]


def transformer_block(heads, width):
    """Returns a block of a transformer."""

    def block(x):
        y = kl.LayerNormalization()(x)
        x = kl.Add()([x, kl.MultiHeadAttention(heads, width // heads)(y, y)])
        y = kl.Dense(4 * width, "gelu")(kl.LayerNormalization()(x))
        return kl.Add()([x, kl.Dense(width)(y)])

    return block


def transformer(*stem, width, heads, depth):
    """Makes a transformer after a stem of layers, such as Whisper's convolutions."""
    blocks = [transformer_block(heads, width) for _ in range(depth)]
    return sequences(*stem, *blocks)


def tokens(width, heads, depth, vocabulary=1000):
    """Makes a transformer of token ids."""
    return transformer(kl.Embedding(vocabulary, width), width=width, heads=heads, depth=depth)


def two_convolutions(convolution, filters, kernel_size, pool, global_pool):
    """Makes two convolutions with pooling between them, and the scores of the classes."""
    first, second = (convolution(n, kernel_size, activation="relu") for n in filters)
    return [first, pool, second, global_pool, kl.Dense(CLASSES)]


def patches(size, width, heads, depth):
    """Makes a vision transformer."""
    embed = [kl.Conv2D(width, size, size), kl.Reshape((-1, width))]
    return transformer(*embed, width=width, heads=heads, depth=depth)


def convnext(width):
    """Returns a block of ConvNeXt."""

    def block(x):
        y = kl.LayerNormalization()(kl.DepthwiseConv2D(7, padding="same")(x))
        return kl.Add()([x, kl.Dense(width)(kl.Dense(4 * width, "gelu")(y))])

    return block


IMAGE = (8, 32, 32, 3)
# `{name: (a function that makes the layers, the shape of a micro-batch)}`.
MODELS = {
    "dense, narrow": (lambda: dense(128, 2), (32, 784)),
    "dense, wide": (lambda: dense(1024, 3), (32, 784)),
    "dense with BatchNorm": (
        lambda: [kl.Dense(256), kl.BatchNormalization(), kl.ReLU(), *dense(256, 1)],
        (64, 256),
    ),
    "embeddings and dense": (
        lambda: [kl.Embedding(5000, 32), kl.Flatten(), *dense(128, 2)],
        (64, 20),
    ),
    "Conv1D": (
        lambda: two_convolutions(
            kl.Conv1D, (64, 64), 5, kl.MaxPooling1D(), kl.GlobalAveragePooling1D()
        ),
        (16, 256, 16),
    ),
    "Conv2D, MNIST": (
        lambda: [
            kl.Conv2D(32, 3, activation="relu"),
            kl.MaxPooling2D(),
            kl.Conv2D(64, 3, activation="relu"),
            kl.MaxPooling2D(),
            kl.Flatten(),
            kl.Dense(CLASSES),
        ],
        (16, 28, 28, 1),
    ),
    "Conv2D, tiny": (
        lambda: [kl.Conv2D(8, 3, 2, activation="relu"), kl.Flatten(), *dense(32, 1)],
        (8, 12, 12, 1),
    ),
    "Conv2D, wide dense head": (
        lambda: [
            kl.Conv2D(16, 3, activation="relu"),
            kl.MaxPooling2D(4),
            kl.Flatten(),
            *dense(1024, 2),
        ],
        (16, 28, 28, 1),
    ),
    "Conv3D": (
        lambda: two_convolutions(
            kl.Conv3D, (16, 32), 3, kl.MaxPooling3D(), kl.GlobalAveragePooling3D()
        ),
        (4, 16, 16, 16, 1),
    ),
    "Conv2D, dilated": (
        lambda: images(*(convolved(16, dilation_rate=d) for d in (1, 2, 4))),
        IMAGE,
    ),
    "depthwise": (
        lambda: images(
            kl.Conv2D(32, 1),
            kl.DepthwiseConv2D(3, padding="same"),
            kl.ReLU(),
            kl.DepthwiseConv2D(5, padding="same"),
            kl.ReLU(),
        ),
        IMAGE,
    ),
    "separable": (
        lambda: images(*(kl.SeparableConv2D(32, 3, activation="relu") for _ in range(3))),
        IMAGE,
    ),
    "transposed": (
        lambda: [
            kl.Dense(256, "relu"),
            kl.Dense(7 * 7 * 32),
            kl.Reshape((7, 7, 32)),
            kl.Conv2DTranspose(32, 4, 2, "same", activation="relu"),
            *images(kl.Conv2DTranspose(16, 4, 2, "same", activation="relu")),
        ],
        (16, 64),
    ),
    "U-Net": (lambda: [unet((16, 32, 64), CLASSES), kl.GlobalAveragePooling2D()], (4, 32, 32, 3)),
    "ResNet": (
        lambda: images(convolved(16), residual(16), residual(32, 2), residual(64, 2)),
        IMAGE,
    ),
    "MobileNet": (
        lambda: images(convolved(16, strides=2), inverted(16), inverted(32, 2), inverted(32)),
        IMAGE,
    ),
    "EfficientNet": (
        lambda: images(
            convolved(16, strides=2),
            inverted(16, excite=True),
            inverted(32, 2, excite=True),
            inverted(32, excite=True),
        ),
        IMAGE,
    ),
    "average pooling": (
        lambda: images(kl.Dense(32, "relu"), kl.AveragePooling2D(2), kl.Dense(64, "relu")),
        IMAGE,
    ),
    "LSTM": (lambda: [kl.LSTM(64), kl.Dense(CLASSES)], (16, 40, 32)),
    "GRU, two layers": (
        lambda: [kl.GRU(64, return_sequences=True), kl.GRU(64), kl.Dense(CLASSES)],
        (16, 40, 32),
    ),
    "LSTM, both ways, of text": (
        lambda: [kl.Embedding(1000, 32), kl.Bidirectional(kl.LSTM(32)), kl.Dense(CLASSES)],
        (16, 30),
    ),
    "ConvLSTM2D": (lambda: images(kl.ConvLSTM2D(8, 3)), (4, 6, 16, 16, 1)),
    "Conv1D and LSTM": (
        lambda: [kl.Conv1D(32, 5, 2, activation="relu"), kl.LSTM(32), kl.Dense(CLASSES)],
        (16, 80, 16),
    ),
    "transformer, small": (lambda: tokens(64, 4, 2), (8, 64)),
    "transformer, large": (lambda: tokens(256, 8, 3), (4, 128)),
    "ViT, small": (lambda: patches(4, 64, 4, 2), IMAGE),
    "ViT, large patches": (lambda: patches(16, 192, 6, 3), (4, 128, 128, 3)),
    "Conv1D stem, transformer": (
        lambda: transformer(
            kl.Conv1D(128, 3, padding="same", activation="gelu"),
            kl.Conv1D(128, 3, 2, "same", activation="gelu"),
            width=128,
            heads=4,
            depth=3,
        ),
        (4, 128, 40),
    ),
    "Conv2D stem, transformer": (
        lambda: transformer(
            convolved(32, strides=2),
            convolved(64, strides=2),
            kl.Reshape((-1, 64)),
            width=64,
            heads=4,
            depth=2,
        ),
        IMAGE,
    ),
    "ConvNeXt": (
        lambda: images(kl.Conv2D(32, 4, 4), *(convnext(32) for _ in range(3))),
        (8, 64, 64, 3),
    ),
}


def make(name):
    """Makes a model and a stack of random numbers for it."""
    build, (rows, *shape) = MODELS[name]
    keras.utils.set_random_seed(0)
    draw = np.random.default_rng(0)
    layers = build()
    takes_ids = any(isinstance(layer, kl.Embedding) for layer in layers)
    stacked_shape = (MICRO_BATCHES, rows, *shape)
    if takes_ids:
        inputs = keras.Input(shape, dtype="int32")
        numbers = draw.integers(0, 1000, stacked_shape).astype("int32")
    else:
        inputs = keras.Input(shape)
        numbers = draw.normal(size=stacked_shape).astype("float32")
    labels = draw.integers(0, CLASSES, (MICRO_BATCHES, rows)).astype("int32")
    x = inputs
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x), (numbers, labels)


def make_trainer(name, jit_compile):
    """Makes a trainer of the model, and a stack for it."""
    model, stack = make(name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(
        model, "adam", loss, gradient_accumulation_steps=MICRO_BATCHES, jit_compile=jit_compile
    )
    return trainer, stack


def make_step(name, jit_compile):
    """Makes a function that runs a train step of the model until its loss is read."""
    trainer, stack = make_trainer(name, jit_compile)
    return lambda: float(trainer.train_step(stack).loss)


def seconds(step):
    """Times a call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def race(name):
    """Times both forms of a model in turn; returns the medians with XLA and without, in ms."""
    step_with = make_step(name, jit_compile=True)
    step_without = make_step(name, jit_compile=False)
    for step in (step_with, step_without):
        step()  # compiles
        step()
    times_with = []
    times_without = []
    start = time.perf_counter()
    while len(times_with) < MIN_ROUNDS or time.perf_counter() - start < MIN_SECONDS:
        times_with.append(seconds(step_with))
        times_without.append(seconds(step_without))
    return 1000 * statistics.median(times_with), 1000 * statistics.median(times_without)


def uses_xla(name):
    """Says if "auto" chooses XLA for a model; nothing is compiled."""
    trainer, stack = make_trainer(name, "auto")
    sample = Batch(*(tf.TensorSpec(array.shape[1:], array.dtype) for array in stack))
    engine = trainer._builder.get_or_build(sample, trainer._present_options)
    return engine.objective.options.uses_xla


def main():
    """Prints the table of the models that the command line names, or of all."""
    print('| model | with XLA | without | "auto" | "auto" / other |')
    print("| --- | --- | --- | --- | --- |")
    for name in sys.argv[1:] or MODELS:
        with_xla, without = race(name)
        if uses_xla(name):
            form = "with"
            ratio = with_xla / without
        else:
            form = "without"
            ratio = without / with_xla
        print(f"| {name} | {with_xla:.3g} | {without:.3g} | {form} | {ratio:.2f} |", flush=True)
        keras.backend.clear_session()


if __name__ == "__main__":
    main()
