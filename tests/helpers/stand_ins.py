"""Small models in place of those that a page of the documentation speaks of."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from fastaccum import transformer


def small_presets():
    """Every preset of `fa.gpt` has one small layer: a step of the real ones takes a CPU minutes."""
    for name in transformer.PRESETS:
        transformer.PRESETS[name] = {"width": 16, "layers": 1, "heads": 2, "context": 16}


def token_ids(rows, length):
    """Random ids `[rows, length]`, and those that follow them."""
    ids = np.random.default_rng(0).integers(0, 256, (rows, length), dtype="int32")
    return ids, np.roll(ids, -1, axis=1)


class Task(keras.Model):
    """Computes its own loss, as KerasHub's tasks do."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.compile("adam")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred))


class VAE(keras.Model):
    """Adds its losses in `call`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        y = self.dense(x)
        self.add_loss(keras.ops.mean(keras.ops.square(y - x)))
        return y


class Bert(tf_keras.Model):
    """Takes the labels among its inputs, as the models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.dense = tf_keras.layers.Dense(1)

    def call(self, inputs):
        logits = self.dense(inputs["x"])
        self.add_loss(tf.reduce_mean(tf.square(logits[:, 0] - inputs["labels"])))
        return logits
