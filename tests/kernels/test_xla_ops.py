"""Parts written and added in place, eagerly and compiled."""

import pytest
import tensorflow as tf

from fastaccum.kernels import xla_ops
from fastaccum.kernels.xla_ops import dynamic_add_slice, dynamic_update_slice, product


@pytest.mark.parametrize("jit_compile", [None, True])
def test_slices_are_written_and_added(jit_compile):
    def run(write):
        return tf.function(
            lambda: write(tf.fill([4], 2.0), tf.ones([2]), [1]), jit_compile=jit_compile
        )()

    assert run(dynamic_update_slice).numpy().tolist() == [2.0, 1.0, 1.0, 2.0]
    assert run(dynamic_add_slice).numpy().tolist() == [2.0, 3.0, 3.0, 2.0]


def test_memory_is_left_unfilled_only_where_a_trial_succeeds():
    """XLA's `AllocateBuffer` is for GPUs: on a CPU the trial fails, inside of a trace too, and
    there is no error.
    """
    answer = tf.function(lambda: tf.constant(xla_ops._allocates("/device:CPU:0")), jit_compile=True)
    assert not answer() and xla_ops.unfilled([2], tf.float32) is None


def test_operations_of_a_gradient_are_named_after_its_call():
    @tf.function(autograph=False)
    def gradient(x):
        with tf.name_scope("head"):
            y = product(x, x)
        return tf.gradients(y, x)

    graph = gradient.get_concrete_function(tf.TensorSpec([2, 2])).graph
    products = [
        operation.name for operation in graph.get_operations() if operation.type == "MatMul"
    ]
    assert sorted(products) == [
        "gradient_tape/head/MatMul",
        "gradient_tape/head/MatMul_1",
        "head/MatMul",
    ]
