"""Loss functions that return one number for a batch, as people write them, and models and data that
fit them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS = 22  # of the data: updates of 16 rows, and of 6


class Case(NamedTuple):
    """A loss function that returns a scalar."""

    data: str
    loss: Callable
    over_rows: str  # "mean" or "sum" of what each row has by itself; "" for neither
    is_proven: bool = True


class Data(NamedTuple):
    """A model's last layer, and inputs and targets for it."""

    x: np.ndarray
    y: np.ndarray
    make_model: Callable[[], keras.Model]


RNG = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=(ROWS, *shape)).astype("float32")


def _bits(*shape: int) -> np.ndarray:
    return (RNG.uniform(size=(ROWS, *shape)) > 0.5).astype("float32")


def _dense(units: int, activation: str | None = None) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential([keras.Input((5,)), layers.Dense(units, activation)])


X = _normal(5)
IDS = RNG.integers(1, 5, size=(ROWS, 6)) * (np.arange(6) < RNG.integers(1, 7, size=(ROWS, 1)))
IMAGES = RNG.uniform(size=(ROWS, 12, 12, 2)).astype("float32")

DATA = {
    "numbers": Data(X, _normal(3), _dense(3)),
    "positive": Data(X, np.abs(_normal(3)) + 0.1, _dense(3, "softplus")),
    "bits": Data(X, _bits(3), _dense(3, "sigmoid")),
    "signs": Data(X, 2 * _bits(1) - 1, _dense(1)),
    "one-hot": Data(X, np.eye(3, dtype="float32")[RNG.integers(0, 3, ROWS)], _dense(3, "softmax")),
    "classes": Data(X, RNG.integers(0, 3, ROWS), _dense(3)),
    "tokens": Data(
        _normal(6, 4), IDS, lambda: keras.Sequential([keras.Input((6, 4)), layers.Dense(5)])
    ),
    "images": Data(
        IMAGES,
        IMAGES[..., :1],
        lambda: keras.Sequential([keras.Input((12, 12, 2)), layers.Dense(1, "sigmoid")]),
    ),
    "boxes": Data(
        _normal(2, 2, 4),
        np.concatenate([_bits(2, 2, 1), np.abs(_normal(2, 2, 4)), _bits(2, 2, 2)], -1),
        lambda: keras.Sequential([keras.Input((2, 2, 4)), layers.Dense(7, "sigmoid")]),
    ),
    "one number": Data(X, _normal(1), _dense(2)),
    "mixture": Data(X, _normal(1), _dense(6)),
    "embeddings": Data(X, RNG.integers(0, 3, ROWS), _dense(4)),
    "triplets": Data(X, np.zeros((ROWS, 1), "float32"), _dense(6)),
    "survival": Data(X, np.concatenate([np.abs(_normal(1)), _bits(1)], -1), _dense(1)),
    "speech": Data(
        _normal(6, 4),
        RNG.integers(1, 5, size=(ROWS, 2)),
        lambda: keras.Sequential([keras.Input((6, 4)), layers.Dense(5)]),
    ),
}


def mse(y, p):
    return ops.mean(ops.square(y - p))


def mae_of_tf(y, p):
    return tf.reduce_mean(tf.abs(y - p))


def charbonnier(y, p):
    return tf.reduce_mean(tf.sqrt(tf.square(y - p) + tf.square(1e-3)))


def binary_focal(y, p, gamma=2.0, alpha=0.25):
    p = ops.clip(p, 1e-7, 1 - 1e-7)
    pt_1 = tf.where(tf.equal(y, 1), p, tf.ones_like(p))
    pt_0 = tf.where(tf.equal(y, 0), p, tf.zeros_like(p))
    return -ops.mean(alpha * ops.power(1.0 - pt_1, gamma) * ops.log(pt_1)) - ops.mean(
        (1 - alpha) * ops.power(pt_0, gamma) * ops.log(1.0 - pt_0 + 1e-7)
    )


def categorical_focal(gamma=2.0, alpha=0.25):
    def loss(y, p):
        p /= ops.sum(p, axis=-1, keepdims=True)
        p = ops.clip(p, 1e-7, 1.0 - 1e-7)
        cross_entropy = -y * ops.log(p)
        return ops.mean(ops.sum(alpha * ops.power(1 - p, gamma) * cross_entropy, axis=-1))

    return loss


def dice_of_the_batch(y, p, smooth=1.0):
    y, p = tf.reshape(y, [-1]), tf.reshape(p, [-1])
    return 1 - (2.0 * tf.reduce_sum(y * p) + smooth) / (
        tf.reduce_sum(y) + tf.reduce_sum(p) + smooth
    )


def dice_by_row(y, p, smooth=1.0):
    intersection = ops.sum(y * p, axis=[1, 2, 3])
    union = ops.sum(y, axis=[1, 2, 3]) + ops.sum(p, axis=[1, 2, 3])
    return 1 - ops.mean((2.0 * intersection + smooth) / (union + smooth), axis=0)


def tversky(y, p):
    y, p = ops.reshape(y, (-1,)), ops.reshape(p, (-1,))
    true_positive = ops.sum(y * p)
    return 1 - (true_positive + 1) / (
        true_positive + 0.7 * ops.sum(y * (1 - p)) + 0.3 * ops.sum((1 - y) * p) + 1
    )


def iou(y, p):
    intersection = tf.reduce_sum(tf.abs(y * p), axis=[1, 2, 3])
    union = tf.reduce_sum(y, [1, 2, 3]) + tf.reduce_sum(p, [1, 2, 3]) - intersection
    return 1 - tf.reduce_mean((intersection + 1) / (union + 1), axis=0)


def ssim_and_l1(y, p):
    ssim = tf.reduce_mean(1 - tf.image.ssim(y, p, max_val=1.0))
    return 0.84 * ssim + 0.16 * tf.reduce_mean(tf.abs(y - p))


def psnr(y, p):
    return -tf.reduce_mean(tf.image.psnr(y, p, max_val=1.0))


def perceptual():
    keras.utils.set_random_seed(5)
    network = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
    )
    network.trainable = False

    def loss(y, p):
        return tf.reduce_mean(tf.square(network(y) - network(p)))

    return loss


def gradient_difference(y, p):
    def gradients(t):
        return tf.abs(t[:, 1:] - t[:, :-1]), tf.abs(t[:, :, 1:] - t[:, :, :-1])

    (dy, dx), (dy_p, dx_p) = gradients(y), gradients(p)
    return ops.mean(ops.square(dy - dy_p)) + ops.mean(ops.square(dx - dx_p))


def total_variation(y, p):
    return (
        0.1 * tf.reduce_sum(tf.image.total_variation(p)) + tf.reduce_sum(tf.square(y - p))
    ) / 144


def image_gradients(y, p):
    dy_true, dx_true = tf.image.image_gradients(y)
    dy_pred, dx_pred = tf.image.image_gradients(p)
    edges = tf.reduce_mean(tf.abs(dy_pred - dy_true) + tf.abs(dx_pred - dx_true), axis=-1)
    return tf.reduce_mean(edges) + 0.1 * tf.reduce_mean(tf.abs(y - p))


def kl_of_a_vae(y, p):
    mean, log_var = p[:, :1], p[:, 1:]
    reconstruction = ops.mean(ops.sum(ops.square(y - mean), axis=-1))
    kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
    return reconstruction + ops.mean(ops.sum(kl, axis=1))


def mixture_density(y, p):
    mu, log_sigma, logits = tf.split(p, 3, axis=-1)
    log_pi = tf.nn.log_softmax(logits, axis=-1)
    log_prob = (
        -0.5 * tf.square((y - mu) / tf.exp(log_sigma)) - log_sigma - 0.5 * math.log(2 * math.pi)
    )
    return -tf.reduce_mean(tf.reduce_logsumexp(log_pi + log_prob, axis=-1))


def gaussian_nll(y, p):
    mean, log_var = p[:, 0:1], p[:, 1:2]
    return 0.5 * tf.reduce_mean(tf.exp(-log_var) * tf.square(y - mean) + log_var)


def pinball(quantile):
    return lambda y, p: ops.mean(
        ops.maximum(quantile * (y - p), (quantile - 1) * (y - p)), axis=None
    )


def smooth_l1(y, p, delta=1.0):
    error = tf.abs(y - p)
    return tf.reduce_mean(tf.where(error < delta, 0.5 * error**2, delta * (error - 0.5 * delta)))


def wing(y, p, w=1.0, epsilon=0.5):
    x = tf.abs(y - p)
    c = w * (1.0 - math.log(1.0 + w / epsilon))
    losses = tf.where(tf.greater(w, x), w * tf.math.log(1.0 + x / epsilon), x - c)
    return tf.reduce_mean(tf.reduce_sum(losses, axis=[1]), axis=0)


def log_cosh(y, p):
    x = p - y
    return ops.mean(x + ops.softplus(-2.0 * x) - ops.log(2.0))


def cosine_embedding(y, p):
    y, p = tf.math.l2_normalize(y, axis=-1), tf.math.l2_normalize(p, axis=-1)
    return 1.0 - tf.reduce_mean(tf.reduce_sum(y * p, axis=-1))


def contrastive_of_pairs(y, p, margin=1.0):
    return ops.mean(y * ops.square(p) + (1 - y) * ops.square(ops.maximum(margin - p, 0)))


def triplets_in_columns(y, p, alpha=0.2):
    anchor, positive, negative = p[:, 0:2], p[:, 2:4], p[:, 4:6]
    positive_distance = tf.reduce_sum(tf.square(anchor - positive), axis=1)
    negative_distance = tf.reduce_sum(tf.square(anchor - negative), axis=1)
    return tf.reduce_mean(tf.maximum(positive_distance - negative_distance + alpha, 0.0))


def center():
    centers = tf.Variable(np.random.default_rng(3).normal(size=(3, 4)).astype("float32"))

    def loss(y, p):
        own = tf.gather(centers, tf.cast(tf.reshape(y, [-1]), tf.int32))
        return tf.nn.l2_loss(p - own)

    return loss


def hinge(y, p):
    return tf.reduce_mean(tf.nn.relu(1.0 - y * p))


def wasserstein(y, p):
    return ops.mean(y * p)


def least_squares_gan(y, p):
    return 0.5 * tf.reduce_mean(tf.math.squared_difference(p, y))


def smoothed_cross_entropy(y, p, smoothing=0.1):
    classes = ops.shape(p)[-1]
    y = y * (1 - smoothing) + smoothing / ops.cast(classes, "float32")
    return -ops.mean(ops.sum(y * ops.log(p + 1e-8), axis=-1))


def masked_mse(y, p):
    mask = ops.cast(ops.greater(y, 0), "float32")
    return ops.sum(ops.square(y - p) * mask) / ops.maximum(ops.sum(mask), 1)


def masked_by_boolean_mask(y, p):
    return tf.reduce_mean(tf.square(tf.boolean_mask(y - p, y > 0)))


def masked_cross_entropy(y, p):
    """The loss of TensorFlow's tutorials on translation."""
    mask = y != 0
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")(y, p)
    mask = tf.cast(mask, dtype=loss.dtype)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


def yolo_sums(y, p):
    has_object = y[..., 0]
    xy = tf.reduce_sum(has_object[..., None] * tf.square(y[..., 1:3] - p[..., 1:3]))
    sizes = tf.square(tf.sqrt(y[..., 3:5]) - tf.sqrt(p[..., 3:5] + 1e-6))
    wh = tf.reduce_sum(has_object[..., None] * sizes)
    confidence = tf.reduce_sum(has_object * tf.square(1 - p[..., 0]))
    confidence += 0.5 * tf.reduce_sum((1 - has_object) * tf.square(p[..., 0]))
    classes = tf.reduce_sum(has_object[..., None] * tf.square(y[..., 5:] - p[..., 5:]))
    return 5.0 * (xy + wh) + confidence + classes


def yolo_by_batch_size(y, p):
    return yolo_sums(y, p) / tf.cast(tf.shape(p)[0], tf.float32)


def yolo_by_boolean_mask(y, p):
    chosen = y[..., 0] > 0.5
    boxes = tf.boolean_mask(tf.square(y[..., 1:5] - p[..., 1:5]), chosen)
    empty = tf.boolean_mask(tf.square(p[..., 0]), tf.logical_not(chosen))
    return tf.reduce_sum(boxes) + 0.5 * tf.reduce_sum(empty)


def rmse(y, p):
    return ops.sqrt(ops.mean(ops.square(p - y)))


def r_squared(y, p):
    residual = tf.reduce_sum(tf.square(y - p))
    total = tf.reduce_sum(tf.square(y - tf.reduce_mean(y)))
    return residual / (total + 1e-7)


def concordance(y, p):
    mean_y, mean_p = ops.mean(y), ops.mean(p)
    covariance = ops.mean((y - mean_y) * (p - mean_p))
    return 1 - 2 * covariance / (
        ops.mean(ops.square(y - mean_y))
        + ops.mean(ops.square(p - mean_p))
        + ops.square(mean_y - mean_p)
    )


def pearson(y, p):
    y, p = y - tf.reduce_mean(y, axis=0), p - tf.reduce_mean(p, axis=0)
    norms = tf.norm(y, axis=0) * tf.norm(p, axis=0)
    return 1 - tf.reduce_mean(tf.reduce_sum(y * p, axis=0) / (norms + 1e-7))


def poisson_nll(y, p):
    return ops.mean(p - y * ops.log(p + 1e-7))


def arcface(y, p, scale=8.0, margin=0.2):
    labels = tf.one_hot(tf.cast(y, tf.int32), 3)
    theta = tf.acos(tf.clip_by_value(tf.tanh(p), -1.0 + 1e-6, 1.0 - 1e-6))
    logits = scale * tf.where(labels > 0, tf.cos(theta + margin), tf.cos(theta))
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def ctc(y, p):
    rows = ops.shape(y)[0]
    labels, frames = ops.cast(y, "int32"), ops.shape(p)[1]
    lengths = ops.full((rows,), 2, "int32"), ops.full((rows,), frames, "int32")
    losses = ops.ctc_loss(labels, p, *lengths, mask_index=0)
    return ops.mean(losses)


def cox(y, p):
    """The partial likelihood of survival: rows that are at risk at the time of another."""
    time, event = y[:, 0], y[:, 1]
    risk = tf.exp(p[:, 0])
    at_risk = tf.cast(time[None, :] >= time[:, None], tf.float32)
    log_risk = tf.math.log(tf.reduce_sum(at_risk * risk[None, :], axis=1))
    return -tf.reduce_sum(event * (p[:, 0] - log_risk)) / (tf.reduce_sum(event) + 1e-7)


def nt_xent(y, p, temperature=0.5):
    z = tf.math.l2_normalize(p, axis=1)
    similarity = tf.matmul(z, z, transpose_b=True) / temperature
    same = tf.cast(tf.equal(y[:, None], y[None, :]), tf.float32)
    log_prob = similarity - tf.reduce_logsumexp(similarity, axis=1, keepdims=True)
    return -tf.reduce_mean(tf.reduce_sum(same * log_prob, axis=1) / tf.reduce_sum(same, axis=1))


def mape(y, p):
    return 100.0 * ops.mean(ops.abs((y - p) / ops.maximum(ops.abs(y), 1e-3)))


def positives_weighed(y, p):
    logits = tf.math.log(p / (1 - p))
    return tf.reduce_mean(tf.nn.weighted_cross_entropy_with_logits(y, logits, pos_weight=3.0))


def asymmetric(y, p, gamma_negative=4, clip=0.05):
    negative = ops.minimum(1 - p + clip, 1.0)
    losses = y * ops.log(ops.maximum(p, 1e-8)) + (1 - y) * ops.log(ops.maximum(negative, 1e-8))
    focus = ops.power(1 - (p * y + negative * (1 - y)), gamma_negative * (1 - y) + y)
    return -ops.sum(losses * focus)


def evidential(y, p):
    gamma = p[:, 0:1]
    nu, alpha, beta = tf.split(tf.nn.softplus(p[:, 1:4]), 3, axis=-1)
    alpha += 1
    omega = 2 * beta * (1 + nu)
    nll = 0.5 * tf.math.log(math.pi / nu) - alpha * tf.math.log(omega)
    nll += (alpha + 0.5) * tf.math.log(nu * (y - gamma) ** 2 + omega)
    nll += tf.math.lgamma(alpha) - tf.math.lgamma(alpha + 0.5)
    return tf.reduce_mean(nll) + 0.1 * tf.reduce_mean(tf.abs(y - gamma) * (2 * nu + alpha))


@tf.function
def compiled_by_tf(y, p):
    if tf.rank(p) == 2:
        return tf.reduce_mean((y - p) ** 2)
    return tf.reduce_sum((y - p) ** 2)


@tf.function
def masked_in_tf_function(y, p):
    mask = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(mask * (y - p) ** 2) / tf.reduce_sum(mask)


def keras_loss_inside(y, p):
    return keras.losses.MeanSquaredError()(y, p) + 0.5 * keras.losses.MeanAbsoluteError()(y, p)


def hard_examples(y, p):
    losses = tf.reshape(tf.square(y - p), [-1])
    hardest, _ = tf.math.top_k(losses, k=max(1, losses.shape[0] // 2))
    return tf.reduce_mean(hardest)


def sum_over_a_batch_size_of_all_replicas(y, p):
    return tf.nn.compute_average_loss(keras.losses.mean_squared_error(y, p), global_batch_size=16)


def mean_plus_sum(y, p):
    return ops.mean(ops.square(y - p)) + 0.01 * ops.sum(ops.abs(p))


class MeanOfClass(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred))


class SumOfClass(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred))


def each_row_by_map_fn(y, p):
    return tf.reduce_mean(
        tf.map_fn(
            lambda pair: tf.reduce_max(tf.abs(pair[0] - pair[1])),
            (y, p),
            fn_output_signature=tf.float32,
        )
    )


def neighbours(y, p):
    return ops.mean(ops.square(y - p)) + ops.mean(ops.square(p[1:] - p[:-1]))


CASES = {
    "mse": Case("numbers", mse, "mean"),
    "mae": Case("numbers", mae_of_tf, "mean"),
    "a lambda": Case(
        "numbers", lambda y, p: tf.math.reduce_mean(tf.math.square(y - p), axis=None), "mean"
    ),
    "charbonnier": Case("numbers", charbonnier, "mean"),
    "binary focal": Case("bits", binary_focal, "mean"),
    "categorical focal": Case("one-hot", categorical_focal(), "mean"),
    "dice of the batch": Case("bits", dice_of_the_batch, ""),
    "dice by row": Case("images", dice_by_row, "mean"),
    "tversky": Case("bits", tversky, ""),
    "iou": Case("images", iou, "mean"),
    "ssim and l1": Case("images", ssim_and_l1, "mean"),
    "psnr": Case("images", psnr, "mean"),
    "perceptual": Case("images", perceptual(), "mean"),
    "gradient difference": Case("images", gradient_difference, "mean"),
    "total variation": Case("images", total_variation, "sum"),
    "image gradients": Case("images", image_gradients, "mean"),
    "kl of a vae": Case("one number", kl_of_a_vae, "mean"),
    "mixture density": Case("mixture", mixture_density, "mean"),
    "gaussian nll": Case("one number", gaussian_nll, "mean"),
    "pinball": Case("numbers", pinball(0.9), "mean"),
    "smooth l1": Case("numbers", smooth_l1, "mean"),
    "wing": Case("numbers", wing, "mean"),
    "log-cosh": Case("numbers", log_cosh, "mean"),
    "cosine embedding": Case("numbers", cosine_embedding, "mean"),
    "contrastive of pairs": Case("bits", contrastive_of_pairs, "mean"),
    "triplets in columns": Case("triplets", triplets_in_columns, "mean"),
    "center": Case("embeddings", center(), "sum"),
    "hinge of a GAN": Case("signs", hinge, "mean"),
    "wasserstein": Case("signs", wasserstein, "mean"),
    "least squares of a GAN": Case("signs", least_squares_gan, "mean"),
    "label smoothing": Case("one-hot", smoothed_cross_entropy, "mean"),
    "masked mse": Case("numbers", masked_mse, ""),
    "masked by boolean_mask": Case("numbers", masked_by_boolean_mask, ""),
    "masked cross-entropy": Case("tokens", masked_cross_entropy, ""),
    "yolo's sums": Case("boxes", yolo_sums, "sum"),
    "yolo's sums by batch size": Case("boxes", yolo_by_batch_size, "mean"),
    "yolo's sums by boolean_mask": Case("boxes", yolo_by_boolean_mask, "sum", is_proven=False),
    "rmse": Case("numbers", rmse, ""),
    "r squared": Case("numbers", r_squared, ""),
    "concordance": Case("numbers", concordance, ""),
    "pearson": Case("numbers", pearson, ""),
    "poisson nll": Case("positive", poisson_nll, "mean"),
    "arcface": Case("classes", arcface, "mean"),
    "ctc": Case("speech", ctc, "mean"),
    "cox": Case("survival", cox, ""),
    "nt-xent": Case("embeddings", nt_xent, ""),
    "mape": Case("numbers", mape, "mean"),
    "positives weighed": Case("bits", positives_weighed, "mean"),
    "asymmetric": Case("bits", asymmetric, "sum"),
    "evidential": Case("mixture", evidential, "mean"),
    "by tf.function": Case("numbers", compiled_by_tf, "mean", is_proven=False),
    "a mask within tf.function": Case("numbers", masked_in_tf_function, ""),
    "Keras losses inside": Case("numbers", keras_loss_inside, "mean"),
    "hard examples": Case("numbers", hard_examples, ""),
    "sum over a batch size": Case("numbers", sum_over_a_batch_size_of_all_replicas, "sum"),
    "a mean and a sum": Case("numbers", mean_plus_sum, ""),
    "Loss.call, a mean": Case("numbers", MeanOfClass(), "mean"),
    "Loss.call, a sum": Case("numbers", SumOfClass(), "sum"),
    "each row by map_fn": Case("numbers", each_row_by_map_fn, "mean"),
    "neighbours": Case("numbers", neighbours, ""),
}
