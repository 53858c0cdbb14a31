"""The hand-written eager loop: a GradientTape for each micro-batch, gradients summed in a Python
list.
"""

import tensorflow as tf

from benchmarks.support.contestants import TrainStep


def make(workload):
    model, optimizer, loss_fn = workload.model(), workload.optimizer(), workload.loss()

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
    return [tuple(tf.constant(array) for array in pair) for pair in zip(*stack, strict=True)]
