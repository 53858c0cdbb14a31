"""`Trainer.summary`: FLOPs against arithmetic by hand, the figures of the table, all kinds of
models.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.memory import cost
from fastaccum.step.compiler_ir import hlo_proto

K, ROWS = 3, 4


def summarized(layers, x, y, loss="mse", dtype="float32", **options):
    model = keras.Sequential([keras.Input(x, dtype=dtype), *layers])
    trainer = fa.Trainer(model, "sgd", loss, gradient_accumulation_steps=K, **options)
    data = np.zeros((2 * K * ROWS, *x), dtype), np.zeros((2 * K * ROWS, *y), "float32")
    return trainer.summary(*data, batch_size=ROWS, verbose=False)


def norm(found):
    """The gradient's norm is a product of each matrix with itself; that of a vector is a sum."""
    return 2 * found.trainable_parameters


def test_flops_of_dense_layers():
    found = summarized(
        [keras.layers.Dense(64, use_bias=False), keras.layers.Dense(8, use_bias=False)], [32], [8]
    )
    # Forward, by weights, and by inputs where a layer is below.
    products = 2 * K * ROWS * (2 * 32 * 64 + 3 * 64 * 8)
    assert products <= found.flops <= products + norm(found)


def test_flops_of_convolutions():
    layers = [
        keras.layers.Conv2D(n, 3, padding=p, use_bias=False) for n, p in ((5, "valid"), (7, "same"))
    ]
    found = summarized(layers, [10, 10, 3], [8, 8, 7])
    # Along each axis, the pairs of an output and a weight that meet an input, not the padding.
    pairs = [(3 * 8) ** 2, (3 * 8 - 2) ** 2]
    products = 2 * K * ROWS * (2 * pairs[0] * 3 * 5 + 3 * pairs[1] * 5 * 7)
    assert products <= found.flops <= products + norm(found)


def test_flops_of_attention():
    B, T, D, heads = ROWS, 6, 8, 2
    x = keras.Input([T, D])
    y = keras.layers.MultiHeadAttention(heads, D // heads, use_bias=False)(x, x)
    trainer = fa.Trainer(keras.Model(x, y), "sgd", "mse", gradient_accumulation_steps=K)
    data = np.zeros((K * B, T, D), "float32")
    found = trainer.summary(data, data, batch_size=B, verbose=False)
    # Of queries, keys and values: forward and by weights. Of the output by inputs too, and so of
    # scores and values.
    products = 2 * K * B * T * D * (2 * 3 * D + 3 * D + 3 * 2 * T)
    assert products <= found.flops <= products + norm(found)


def test_a_loop_of_unknown_length_counts_at_least_once():
    """A recurrent layer's backward pass is one."""
    found = summarized([keras.layers.SimpleRNN(8)], [5, 4], [8])
    forward = 2 * K * ROWS * 5 * (4 + 8) * 8
    assert found.at_least and forward < found.flops < 3 * forward and "at least" in str(found)
    assert not summarized([keras.layers.Dense(8)], [4], [8]).at_least


def test_the_most_expensive_case_of_a_branch_counts():
    def product(size):
        return lambda x: tf.reduce_sum(tf.fill([size, size], x) @ tf.fill([size, size], x + 1.0))

    @tf.function(jit_compile=True)
    def either(which, x):
        return tf.cond(which > 0, lambda: product(96)(x), lambda: product(64)(x))

    concrete = either.get_concrete_function(tf.TensorSpec([], tf.int32), tf.TensorSpec([]))
    assert cost.count([hlo_proto(concrete)]).flops == 2 * 96**3


def test_the_table_has_the_figures(capsys):
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(8), keras.layers.Dense(4)])
    model.layers[0].trainable = False
    trainer = fa.Trainer(model, "adam", "mse", gradient_accumulation_steps=K)
    with pytest.raises(ValueError, match="has seen no data yet"):
        trainer.summary()
    x, y = np.zeros((K * ROWS, 32), "float32"), np.zeros((K * ROWS, 4), "float32")
    before = [v.numpy() for v in model.weights]
    found = trainer.summary(x, y, batch_size=ROWS)
    assert capsys.readouterr().out == f"{found}\n" and found.programs == ()
    assert (found.trainable_parameters, found.frozen_parameters) == (8 * 4 + 4, 32 * 8 + 8)
    assert found.memory.by_kind["optimizer slots"] == pytest.approx(
        2 * 4 * found.trainable_parameters, abs=16
    )
    for text in ("36", "264", "GFLOP", "accumulators", f"{K} x {ROWS} rows"):
        assert text in str(found)
    trainer.fit(x, y, batch_size=ROWS, verbose=0)
    with pytest.raises(TypeError, match="one of its batches"):
        trainer.summary(iter([(x, y)]))
    again = trainer.summary(verbose=False)  # of the data seen first
    assert again.flops == found.flops and again.memory.peak_bytes == found.memory.peak_bytes
    assert [program.name for program in again.programs] == ["train step"]
    assert (K, ROWS, 32) in again.programs[0].shapes and again.programs[0].seconds > 0
    # of which the last could be short
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    with pytest.raises(ValueError, match="pass batch_size"):
        trainer.summary(batches)
    assert trainer.summary(batches, batch_size=2 * ROWS, verbose=False).flops > 1.5 * found.flops
    assert all(
        np.array_equal(a, b.numpy()) for a, b in zip(before[:2], model.weights[:2], strict=True)
    )


@pytest.mark.slow
@pytest.mark.sample
def test_recomputation_shows_in_flops_and_in_memory():
    def found(policy):
        layers = [fa.kernels.LayerStack(lambda: keras.layers.Dense(64, "gelu"), 4, policy=policy)]
        return summarized(layers, [64], [64])

    kept, again = found("everything_saveable"), found("nothing_saveable")
    assert 1.2 < again.flops / kept.flops < 1.5
    assert again.memory.by_kind["activations"] < kept.memory.by_kind["activations"]


@pytest.mark.slow
def test_of_a_tf_keras_model():
    import tf_keras

    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(8, use_bias=False), tf_keras.layers.Dense(4, use_bias=False)]
    )
    trainer = fa.Trainer(model, tf_keras.optimizers.SGD(), "mse", gradient_accumulation_steps=K)
    x, y = np.zeros((K * ROWS, 32), "float32"), np.zeros((K * ROWS, 4), "float32")
    found = trainer.summary(x, y, batch_size=ROWS, verbose=False)
    products = 2 * K * ROWS * (2 * 32 * 8 + 3 * 8 * 4)
    assert products <= found.flops <= products + norm(found)
    assert found.frozen_parameters == 0


def test_of_each_replica():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(8, use_bias=False)])
    trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=K)
    x, y = np.zeros((K * ROWS, 32), "float32"), np.zeros((K * ROWS, 8), "float32")
    found = trainer.summary(x, y, batch_size=ROWS, verbose=False)
    products = 2 * K * ROWS // 2 * 2 * 32 * 8
    assert (found.replicas, found.rows) == (2, ROWS // 2) and "each of 2 replicas" in str(found)
    assert found.frozen_parameters == 0 and found.memory.by_kind["weights"] == 4 * 32 * 8
    assert products <= found.flops <= products + norm(found)


def test_without_xla_there_is_nothing_to_read():
    with pytest.raises(ValueError, match="jit_compile=False"):
        summarized([keras.layers.Dense(4)], [8], [4], jit_compile=False)


@pytest.mark.slow
def test_of_a_gpts_program_for_an_h200():
    """Library calls count: cuBLAS's products and cuDNN's attention."""
    from jaxlib import xla_client
    from tensorflow.compiler.xla.service import hlo_pb2

    from benchmarks.h200 import kernels, programs

    gpt = programs.Gpt(layers=2)
    compiled = programs.gpt(gpt)
    proto = hlo_pb2.HloProto()
    proto.hlo_module.ParseFromString(
        xla_client.hlo.hlo_module_from_text(compiled.text).as_serialized_hlo_module_proto()
    )
    found, launched = cost.count([proto]), kernels.read(compiled.text)
    assert found.flops == sum(kernel.flops * kernel.times for kernel in launched)
    # What the norm of the gradient and the rotary tables multiply is no part of the model's own
    # arithmetic.
    assert found.flops == pytest.approx(gpt.flops, rel=0.02)


def test_a_large_table_of_logits_comes_with_the_argument_that_saves_it():
    x = np.zeros((2, 64), "int32")
    for loss, advice in (
        (
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            ("loss=fastaccum.LinearCrossEntropy()",),
        ),
        (fa.LinearCrossEntropy(chunk_size=64), ()),
    ):
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Embedding(9, 8), keras.layers.Dense(5000)]
        )
        found = fa.Trainer(model, "sgd", loss).summary(x, x, batch_size=2, verbose=False)
        assert found.advice == advice and all(line in str(found) for line in advice)


def test_a_summary_is_shown_in_one_line():
    """`Trainer.summary` has printed the table: on the last line of a notebook's cell it would come
    twice.
    """
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8)], name="small")
    trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=K)
    found = trainer.summary(np.zeros((K, 4)), np.zeros((K, 8)), batch_size=1, verbose=False)
    assert repr(found).startswith(
        "<Summary of small: a train step of 3 x 1 row: 40 trainable parameters, "
    )
    assert "small: a train step of 3 x 1 row\n" in str(found)
