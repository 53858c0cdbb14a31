"""Training on several replicas of one process equals training on one device: the checks of
`on_replicas.py`.
"""

import contextlib

import on_replicas
import pytest
import tensorflow as tf
from on_replicas import outcomes

import fastaccum as fa
from fastaccum.data.stacks import Batch, Layout

pytestmark = pytest.mark.long

CHECKS = [name.removeprefix("check_") for name in vars(on_replicas) if name.startswith("check_")]
ON_FOUR = ["tokens_weights_tails_and_clipping"]
# The others are with what else starts processes.
FIRST = ["tokens_weights_tails_and_clipping", "batch_norm", "refused"]


@pytest.mark.parametrize(("count", "names", "name"), on_replicas.cases(CHECKS, FIRST, ON_FOUR))
def test_replicas(count, names, name):
    assert (failure := outcomes(count, names)[name]) is None, failure


def test_shares_hold_every_row_once():
    rows = tf.range(14)
    stack = Batch(tf.reshape(rows, [2, 7]), tf.reshape(rows, [2, 7]))
    seen = []
    for worker in range(3):
        layout = Layout(2, replicas=6, shards=slice(2 * worker, 2 * worker + 2))
        own = layout.shard(stack)
        assert own.x.shape == [2, 4]
        seen += (
            own.x[own.valid].numpy().tolist()
            if own.mask is not None
            else tf.reshape(own.x, [-1]).numpy().tolist()
        )
    assert sorted(seen) == rows.numpy().tolist()


def test_exact_rows_are_never_padded():
    layout = Layout(1, exact_rows=True, replicas=4, shards=slice(0, 4))
    assert layout.columns(8)[1].all()
    with pytest.raises(ValueError, match=r"7 rows cannot be split equally over 4 replicas"):
        layout.columns(7)


def test_without_a_strategy_nothing_is_replicated():
    trainer = fa.Trainer(on_replicas.dense(), "sgd", "mse")
    assert trainer._replicas is None


@pytest.mark.parametrize("inside", [True, False], ids=["model made inside", "model made outside"])
def test_a_tf_keras_model_is_told_what_works(inside):
    tf_keras = pytest.importorskip("tf_keras")
    one = tf.distribute.MirroredStrategy(["CPU:0"])
    with one.scope() if inside else contextlib.nullcontext():
        model = tf_keras.Sequential([tf_keras.Input((6,)), tf_keras.layers.Dense(3)], name="old")
    message = r"'old' is a tf_keras model.* outside the scope of MirroredStrategy.*Keras 3"
    with one.scope(), pytest.raises(ValueError, match=message):
        fa.Trainer(model, "sgd", "mse")
