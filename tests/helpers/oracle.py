"""Computes a full-batch step: a small model in float64 NumPy, and Keras's own `train_on_batch`."""

import sys

import keras
import numpy as np

LEARNING_RATE = 1.0  # with plain SGD a step then shows the gradient itself


def coefficients(reduction, valid, weights=None):
    """Returns the factor of each element's loss in the full batch: w / denominator if valid, else
    0.

    The denominator is that of the Keras reduction: the count of valid elements, where a weight of 0
    counts; the sum of their weights; or 1.
    """
    weights = np.where(valid, 1.0 if weights is None else weights.astype("float64"), 0.0)
    denominator = {
        "sum_over_batch_size": valid.sum(),
        "mean": valid.sum(),
        "mean_with_sample_weight": weights.sum(),
        "sum": 1.0,
    }[reduction]
    return weights / denominator if denominator else np.zeros_like(weights)


def squared_error(prediction, target):
    """Loss and its gradient, each averaged over the last axis as Keras does."""
    error = prediction - target
    return np.mean(error**2, axis=-1), 2 * error / error.shape[-1]


def softmax_cross_entropy(logits, labels):
    """Loss and its gradient for integer labels; labels out of range are for the caller to mask."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    one_hot = np.eye(logits.shape[-1])[np.clip(labels, 0, logits.shape[-1] - 1)]
    return -(one_hot * log_p).sum(axis=-1), np.exp(log_p) - one_hot


def two_layers(weights, x, target, loss, factors):
    """Loss and weight gradients of `tanh(x @ W1 + b1) @ W2 + b2`, over all leading axes; `factors`
    from above.

    With three weights `[table, W2, b2]`, `x` holds ids and the first layer is `tanh(table[x])`.
    """
    weights = [w.astype("float64") for w in weights]
    *first, w2, b2 = weights
    rows = np.eye(len(first[0]))[x] if len(first) == 1 else x.astype("float64")
    hidden = np.tanh(rows @ first[0] + (first[1] if len(first) == 2 else 0.0))
    losses, d_output = loss(hidden @ w2 + b2, target)
    d_output = d_output * factors[..., np.newaxis]
    d_hidden = (d_output @ w2.T) * (1 - hidden**2)

    def flat(array):
        return array.reshape(-1, array.shape[-1])

    gradients = [flat(rows).T @ flat(d_hidden), flat(d_hidden).sum(0)][: len(first)]
    gradients += [flat(hidden).T @ flat(d_output), flat(d_output).sum(0)]
    return (losses * factors).sum(), gradients


def assert_is_step(after, before, gradients):
    """Asserts that weights moved by one SGD step of these gradients, to float32 rounding."""
    for now, then, gradient in zip(after, before, gradients, strict=True):
        room = 4e-6 * (1.0 + np.abs(gradient).max() + np.abs(then).max())
        np.testing.assert_allclose(now, then - LEARNING_RATE * gradient, rtol=0, atol=room)


def assert_same(ours, theirs, tolerance=2e-6):
    """Asserts that two lists of weights agree to float32 rounding."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=tolerance, atol=tolerance * (1 + np.abs(other).max())
        )


def family(model):
    """The Keras that a model is of: keras, or tf_keras."""
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return sys.modules["tf_keras" if "tf_keras" in packages else "keras"]


def keras_steps(model, loss, batches, learning_rate=LEARNING_RATE, **options):
    """Trains `model` by Keras's own `train_on_batch`, one full-batch SGD step for each batch.

    Returns:
        The logs of the last step.
    """
    # Eager, since each batch would otherwise compile a program of its own.
    K = family(model)
    if K is keras:
        options["auto_scale_loss"] = False
    model.compile(K.optimizers.SGD(learning_rate), loss, run_eagerly=True, **options)
    for batch in batches:
        logs = model.train_on_batch(*batch, return_dict=True)
    return logs
