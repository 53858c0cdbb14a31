"""Full batch without accumulation: one XLA step over all the examples of the update at once.

The step needs the memory that accumulation saves. BatchNorm sees the whole batch here, so a network
that has it computes something else: the suites compare that pair with frozen statistics.
"""

import tensorflow as tf

from benchmarks.support.contestants import TrainStep


def make(workload):
    """Makes the peer's `TrainStep`."""
    model, step = make_step(workload)
    return TrainStep(model, feed_full_batch, lambda batch: step(*batch))


def make_step(workload):
    """Makes the model, and a jitted tf.function `step(x, y) -> loss`."""
    model = workload.model()
    optimizer = workload.optimizer()
    loss_fn = workload.loss()
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        # Gradients become dense: Keras squares the slices of a sparse gradient without summing
        # duplicates first, so its Adam would take another step than for a tensor.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return model, step


def feed_full_batch(stack):
    """Turns a stack into one batch of tensors."""
    return tuple(tf.constant(array.reshape(-1, *array.shape[2:])) for array in stack)
