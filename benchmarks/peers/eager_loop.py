"""Eager loop written by hand: a GradientTape for each micro-batch, gradients summed in a list."""

import tensorflow as tf

from benchmarks.support.contestants import TrainStep


def make(workload):
    """Makes the peer's `TrainStep`."""
    model = workload.model()
    optimizer = workload.optimizer()
    loss_fn = workload.loss()

    def update(micro_batches):
        accumulated = [tf.zeros_like(variable) for variable in model.trainable_variables]
        total_loss = 0.0
        for x, y in micro_batches:
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True)) / len(micro_batches)
            gradients = tape.gradient(loss, model.trainable_variables)
            accumulated = [
                total + gradient for total, gradient in zip(accumulated, gradients, strict=True)
            ]
            total_loss += loss
        optimizer.apply_gradients(zip(accumulated, model.trainable_variables, strict=True))
        return total_loss

    return TrainStep(model, feed_micro_batches, update)


def feed_micro_batches(stack):
    """Turns a stack into a list of `(x, y)`, one for each micro-batch."""
    stacked_x, stacked_y = stack
    return [(tf.constant(x), tf.constant(y)) for x, y in zip(stacked_x, stacked_y, strict=True)]
