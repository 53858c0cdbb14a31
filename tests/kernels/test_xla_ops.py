"""Parts written and added in place, eagerly and compiled."""

import pytest
import tensorflow as tf

from fastaccum.kernels.xla_ops import dynamic_add_slice, dynamic_update_slice


@pytest.mark.parametrize("jit_compile", [None, True])
def test_slices_are_written_and_added(jit_compile):
    def run(write):
        return tf.function(lambda: write(tf.fill([4], 2.0), tf.ones([2]), [1]), jit_compile=jit_compile)()

    assert run(dynamic_update_slice).numpy().tolist() == [2.0, 1.0, 1.0, 2.0]
    assert run(dynamic_add_slice).numpy().tolist() == [2.0, 3.0, 3.0, 2.0]
