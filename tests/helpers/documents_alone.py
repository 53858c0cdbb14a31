"""The update that packed rows must make: each document is called by itself, without padding."""

import keras
import numpy as np
import tensorflow as tf

RATE = 0.1


def expected_update(model, documents, length, make_inputs=lambda ids: ids):
    """Returns the weights after SGD on the mean over targets, and that mean.

    Documents are cut into pieces of at most `length` tokens, whose targets are the next ids of the
    whole document.
    """
    total, count = 0.0, 0
    with tf.GradientTape() as tape:
        for document in documents:
            y = np.append(document[1:], 0)
            counts = np.arange(len(document)) < len(document) - 1
            for start in range(0, len(document), length):
                piece = slice(start, start + length)
                logits = model(make_inputs(document[None, piece]), training=True)
                losses = keras.losses.sparse_categorical_crossentropy(
                    y[None, piece], logits, from_logits=True
                )
                total += tf.reduce_sum(losses * counts[None, piece].astype("float32"))
                count += counts[piece].sum()
        loss = total / float(count)
    variables = [variable.value for variable in model.trainable_variables]
    gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
    weights = [
        variable.numpy() - RATE * tf.convert_to_tensor(gradient).numpy()
        for variable, gradient in zip(variables, gradients, strict=True)
    ]
    return weights, float(loss)


def update_error(before, expected, model):
    """The largest difference of a weight, as a fraction of the largest update."""
    largest = max(np.abs(b - a).max() for a, b in zip(before, expected, strict=True))
    differences = [
        np.abs(variable.numpy() - weight).max()
        for variable, weight in zip(model.trainable_variables, expected, strict=True)
    ]
    return max(differences) / largest
