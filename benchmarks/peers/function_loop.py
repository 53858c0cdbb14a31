"""tf.function loop written by hand: a micro-step that adds to variables, and an update.

A Python loop calls both, as the recipes on the web do; none of them asks for XLA.
"""

import tensorflow as tf

from benchmarks.peers.eager_loop import feed_micro_batches
from benchmarks.support.contestants import TrainStep


def make(workload):
    """Makes the peer's `TrainStep`."""
    model = workload.model()
    optimizer = workload.optimizer()
    loss_fn = workload.loss()
    optimizer.build(model.trainable_variables)
    accumulated = [
        tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables
    ]

    @tf.function
    def accumulate(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True)) / workload.micro_batches
        gradients = tape.gradient(loss, model.trainable_variables)
        for total, gradient in zip(accumulated, gradients, strict=True):
            total.assign_add(gradient)
        return loss

    @tf.function
    def apply():
        optimizer.apply_gradients(zip(accumulated, model.trainable_variables, strict=True))
        for total in accumulated:
            total.assign(tf.zeros_like(total))

    def update(micro_batches):
        total_loss = 0.0
        for x, y in micro_batches:
            total_loss += accumulate(x, y)
        apply()
        return total_loss

    return TrainStep(model, feed_micro_batches, update)
