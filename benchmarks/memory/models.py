"""Six models whose memory is planned and measured, in sizes that run without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import fastaccum as fa

GLOBAL_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Case:
    """Model to train.

    Attributes:
        name: as tables show it.
        trainer: makes a new trainer, with a new model.
        specs: `(x, y)` of one example, `tf.TensorSpec`s without the axis of rows; integers are
            below `below`.
        rows: a micro-batch that runs within a second or two.
    """

    name: str
    trainer: Callable[[], fa.Trainer]
    specs: tuple[Any, Any]
    rows: int
    below: int = 10

    def arrays(self, rows: int) -> tuple[Any, Any]:
        """Draws x and y with so many rows."""
        return tf.nest.map_structure(lambda spec: self._values(spec, rows).numpy(), self.specs)

    def dataset(self, rows: int, batch_size: int) -> tf.data.Dataset:
        """Makes a dataset of such batches, drawn as they are read."""

        def draw(_):
            return tf.nest.map_structure(lambda spec: self._values(spec, batch_size), self.specs)

        return tf.data.Dataset.range(rows // batch_size).map(draw)

    def _values(self, spec: tf.TensorSpec, rows: int) -> tf.Tensor:
        shape = [rows, *spec.shape]
        if spec.dtype.is_integer:
            return tf.random.uniform(shape, maxval=self.below, dtype=spec.dtype)
        return tf.random.uniform(shape, dtype=spec.dtype)


def _trainer(model: Any, loss: Any, optimizer: Any = "adamw") -> fa.Trainer:
    return fa.Trainer(model, optimizer, loss, gradient_accumulation_steps=4, jit_compile=True)


def _classes() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _mlp() -> fa.Trainer:
    layers = [keras.layers.Dense(1024, activation="gelu") for _ in range(4)]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    return _trainer(model, _classes())


def _convnet() -> fa.Trainer:
    x = inputs = keras.Input((32, 32, 3))
    for filters in (32, 64, 128):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return _trainer(keras.Model(inputs, keras.layers.Dense(10)(x)), _classes())


def _gpt() -> fa.Trainer:
    model = fa.gpt(vocabulary_size=4096, context=128, width=256, layers=4, heads=4)
    return _trainer(model, fa.LinearCrossEntropy())


def _bert() -> fa.Trainer:
    import tf_keras

    layers = tf_keras.layers
    ids = tf_keras.Input((64,), dtype="int32")
    x = layers.Embedding(4096, 128)(ids)
    for _ in range(3):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32, dropout=0.1)(x, x))
        y = layers.Dense(512, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(y))
    outputs = layers.Dense(2)(layers.Dropout(0.1)(x[:, 0]))
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _trainer(tf_keras.Model(ids, outputs), loss, tf_keras.optimizers.Adam(1e-3))


def _keras_hub() -> fa.Trainer:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=4096,
        num_layers=3,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=512,
        max_sequence_length=64,
    )
    return _trainer(keras_hub.models.GPT2CausalLM(backbone), _classes())


def _two_tower() -> fa.Trainer:
    def tower(name: str) -> tuple[Any, Any]:
        ids = keras.Input((8,), dtype="int32", name=name)
        x = keras.layers.Embedding(20_000, 64)(ids)
        x = keras.layers.Dense(256, activation="relu")(keras.layers.Flatten()(x))
        return ids, keras.layers.Dense(64)(x)

    user, a = tower("user")
    item, b = tower("item")
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([a * b, a, b]))
    model = keras.Model({"user": user, "item": item}, outputs)
    return _trainer(model, keras.losses.BinaryCrossentropy(from_logits=True))


def _ids(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.int32)


def _tokens(time: int) -> dict[str, tf.TensorSpec]:
    return {"token_ids": _ids(time), "padding_mask": _ids(time)}


_CASES = [
    Case("MLP", _mlp, (tf.TensorSpec([784]), _ids()), 512),
    Case("ConvNet", _convnet, (tf.TensorSpec([32, 32, 3]), _ids()), 64),
    Case("GPT", _gpt, (_ids(128), _ids(128)), 16, below=4096),
    Case("BERT-like, tf_keras", _bert, (_ids(64), _ids()), 32, below=2),
    Case("KerasHub GPT-2", _keras_hub, (_tokens(64), _ids(64)), 16, below=2),
    Case("two-tower", _two_tower, ({"user": _ids(8), "item": _ids(8)}, tf.TensorSpec([1])), 1024),
]
CASES = {case.name: case for case in _CASES}
