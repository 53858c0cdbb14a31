"""tf_keras (Keras 2): its applications and idioms. Those of tensorflow-addons are in
test_addons.py.
"""

import numpy as np
import tensorflow as tf
import tf_keras
from zoo import Case, row

FAMILY = "tf_keras"
ROWS = 10


def points(units=6, rows=ROWS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, units)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0.5)


def images(rows=ROWS, size=8, channels=3):
    return np.random.default_rng(0).normal(size=(rows, size, size, channels)).astype("float32")


def classifier(*layers, units=6):
    return tf_keras.Sequential([tf_keras.Input((units,)), *layers, tf_keras.layers.Dense(3)])


def on_images(*layers):
    return tf_keras.Sequential(
        [
            tf_keras.Input((8, 8, 3)),
            tf_keras.layers.Conv2D(8, 3, padding="same"),
            *layers,
            tf_keras.layers.ReLU(),
            tf_keras.layers.GlobalAveragePooling2D(),
            tf_keras.layers.Dense(3),
        ]
    )


def cross_entropy():
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@row(
    FAMILY,
    "MobileNet: batch statistics",
    tolerance=1e-3,
    note="Our step differs from float64 by 3e-4, Keras's by 6e-5. Where an input of ReLU6 is within 1e-7 of "
    "its kink, the steps may take different sides, and a kernel's update then differs by 6e-2.",
)
def test_mobilenet():
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.applications.MobileNet(
        (32, 32, 3), alpha=0.25, dropout=0.0, weights=None, classes=3, classifier_activation=None
    )
    _, y = points(rows=16)
    return Case(
        model,
        images(16, 32),
        y[:, None],
        loss=cross_entropy(),
        metrics=["accuracy"],
        by_micro_batch=True,
    )


@row(FAMILY, "VGG16's first blocks with a new head, the blocks frozen")
def test_vgg_transfer():
    base = tf_keras.applications.VGG16(include_top=False, weights=None, input_shape=(32, 32, 3))
    base = tf_keras.Model(base.input, base.get_layer("block2_pool").output)
    base.trainable = False
    model = tf_keras.Sequential(
        [base, tf_keras.layers.GlobalMaxPooling2D(), tf_keras.layers.Dense(3)]
    )
    _, y = points()
    return Case(model, 10 * images(ROWS, 32), y, loss=cross_entropy(), metrics=["accuracy"])


@row(FAMILY, "Embedding with a mask, Bidirectional LSTM, weights per token", mixed=True)
def test_tagger():
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 20, (ROWS, 7)) * (np.arange(7) < rng.integers(1, 8, ROWS)[:, None])
    model = tf_keras.Sequential(
        [
            tf_keras.Input((7,), dtype="int32"),
            tf_keras.layers.Embedding(20, 8, mask_zero=True),
            tf_keras.layers.Bidirectional(tf_keras.layers.LSTM(6, return_sequences=True)),
            tf_keras.layers.TimeDistributed(tf_keras.layers.Dense(4)),
        ]
    )
    weights = rng.random((ROWS, 7)).astype("float32")
    return Case(
        model,
        ids,
        ids % 4,
        weights,
        loss=cross_entropy(),
        weighted_metrics=["accuracy"],
        micro_batches=4,
    )


@row(
    FAMILY,
    "Two outputs with losses by name, loss_weights, class indices beside a regression",
    quick=True,
)
def test_two_outputs():
    x, y = points()
    inputs = tf_keras.Input((6,))
    h = tf_keras.layers.Dense(8, "relu", kernel_regularizer="l2", activity_regularizer="l1")(inputs)
    outputs = {
        "kind": tf_keras.layers.Dense(3, name="kind")(h),
        "size": tf_keras.layers.Dense(1, name="size")(h),
    }
    return Case(
        tf_keras.Model(inputs, outputs),
        x,
        {"kind": y, "size": x[:, :1]},
        loss={"kind": cross_entropy(), "size": "huber"},
        loss_weights={"kind": 1.0, "size": 0.25},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        micro_batches=4,
    )


@row(FAMILY, "SpectralNormalization: a kernel that the forward pass assigns")
def test_spectral_normalization():
    x, y = points()
    model = classifier(
        tf_keras.layers.SpectralNormalization(tf_keras.layers.Dense(8)), tf_keras.layers.ReLU()
    )
    return Case(model, x, y, loss=cross_entropy(), by_micro_batch=True)


@row(
    FAMILY,
    "SharpnessAwareMinimization, which has a train_step of its own",
    refused="SharpnessAwareMinimization",
    why="It takes a second gradient at other weights, which a sum over micro-batches is not.",
)
def test_sharpness_aware_minimization():
    x, y = points()
    model = tf_keras.models.experimental.SharpnessAwareMinimization(
        classifier(tf_keras.layers.Dense(8, "relu"))
    )
    return Case(model, x, y, loss=cross_entropy())


@row(
    FAMILY,
    "WideDeepModel with an optimizer for each part",
    refused="WideDeepModel",
    why="Use a plain tf_keras.Model that adds the parts' outputs, with one optimizer or "
    "keras.optimizers.MultiOptimizer.",
)
def test_wide_and_deep():
    x, _ = points()
    model = tf_keras.experimental.WideDeepModel(
        tf_keras.experimental.LinearModel(), tf_keras.Sequential([tf_keras.layers.Dense(1)])
    )
    return Case(model, x, x[:, :1], loss="mse")


@row(FAMILY, "LinearModel, and AdamW with ema and a warm-up schedule of one's own")
def test_linear_model():
    class WarmUp(tf_keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1.0) / 10.0)

    x, _ = points()
    return Case(
        tf_keras.experimental.LinearModel(),
        x,
        x[:, :1],
        loss="mse",
        optimizer=lambda: tf_keras.optimizers.AdamW(
            WarmUp(), weight_decay=0.1, use_ema=True, epsilon=1e-3
        ),
    )
