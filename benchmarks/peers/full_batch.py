"""The limit: no accumulation, one XLA step over all the examples of the update at once.

It needs the memory that accumulation is there to save. BatchNorm sees the whole batch here, so a
network that has it computes something else: the suites compare that pair with frozen statistics.
"""

import tensorflow as tf

from benchmarks.support.contestants import TrainStep


def make(workload):
    model, step = make_step(workload)
    return TrainStep(model, feed_full_batch, lambda batch: step(*batch))


def make_step(workload):
    """The model, and a jitted tf.function `step(x, y) -> loss`."""
    model, optimizer, loss_fn = workload.model(), workload.optimizer(), workload.loss()
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        # Dense: Keras squares the slices of a sparse gradient without summing duplicates first, so
        # that its Adam would take another step than for the same gradient as a tensor.
        gradients = [
            tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)
        ]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return model, step


def feed_full_batch(stack):
    return tuple(tf.constant(array.reshape(-1, *array.shape[2:])) for array in stack)
