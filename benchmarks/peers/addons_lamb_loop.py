"""Custom loop with `tfa.optimizers.LAMB`: compiled micro-steps add to variables.

The recipe is that of `function_loop`, but tensorflow-addons' optimizers take `tf.Variable`s and
have no `build`.
"""

import tensorflow as tf

from benchmarks.peers.eager_loop import feed_micro_batches
from benchmarks.support.contestants import TrainStep


def make(workload):
    """Makes the peer's `TrainStep`."""
    model = workload.model()
    optimizer = workload.optimizer()
    loss_fn = workload.loss()
    variables = [variable.value for variable in model.trainable_variables]
    accumulated = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]

    @tf.function
    def accumulate(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True)) / workload.micro_batches
        for total, gradient in zip(accumulated, tape.gradient(loss, variables), strict=True):
            total.assign_add(gradient)
        return loss

    @tf.function
    def apply():
        optimizer.apply_gradients(zip(accumulated, variables, strict=True))
        for total in accumulated:
            total.assign(tf.zeros_like(total))

    def update(micro_batches):
        total_loss = 0.0
        for x, y in micro_batches:
            total_loss += accumulate(x, y)
        apply()
        return total_loss

    return TrainStep(model, feed_micro_batches, update)
