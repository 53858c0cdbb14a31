"""A table's rows that no example looked up: updated as by the optimizer itself, given the lookups
of the whole step.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_optimizer import KERAS, TF_KERAS, TFA, raw, tf_keras

import fastaccum as fa
from fastaccum.families import adapt_optimizer
from fastaccum.legacy import untouched_rows


def decayed(name, **arguments):
    base = getattr(tf_keras().legacy, name)
    return fa.addons.optimizers.extend_with_decoupled_weight_decay(base)(
        weight_decay=0.1, learning_rate=0.1, **arguments
    )


LEGACY = {
    **{
        f"legacy {name}": lambda name=name: getattr(tf_keras().legacy, name)(0.1)
        for name in ("SGD", "Adam", "Adamax", "Nadam", "Adagrad", "Adadelta", "RMSprop", "Ftrl")
    },
    "legacy momentum": lambda: tf_keras().legacy.SGD(0.1, momentum=0.9, nesterov=True),
    "legacy RMSprop with momentum": lambda: tf_keras().legacy.RMSprop(
        0.1, momentum=0.9, centered=True
    ),
    "ProximalAdagrad": lambda: fa.addons.optimizers.ProximalAdagrad(
        0.1, l1_regularization_strength=0.1
    ),
    "ConditionalGradient": lambda: fa.addons.optimizers.ConditionalGradient(0.9, 0.1),
    "SGDW without momentum": lambda: fa.addons.optimizers.SGDW(0.1, 0.1),
    "AdaBelief, amsgrad": lambda: fa.addons.optimizers.AdaBelief(
        0.1, weight_decay=0.1, amsgrad=True
    ),
    "NovoGrad, decay": lambda: fa.addons.optimizers.NovoGrad(
        0.1, weight_decay=0.1, grad_averaging=True
    ),
    "Yogi, l1": lambda: fa.addons.optimizers.Yogi(0.1, l1_regularization_strength=0.1),
    "Yogi without momentum": lambda: fa.addons.optimizers.Yogi(0.1, beta1=0.0),
    "SWA of LazyAdam": lambda: fa.addons.optimizers.SWA(fa.addons.optimizers.LazyAdam(0.1), 1, 1),
    **{
        f"decayed {name}": lambda name=name: decayed(name)
        for name in ("RMSprop", "Adamax", "Adagrad", "Nadam")
    },
}
# COCOB has no update for lookups; MultiOptimizers have those of their parts.
ALL = {
    k: v for k, v in {**KERAS, **TF_KERAS, **TFA, **LEGACY}.items() if k not in ("COCOB", "Multi")
}
TABLE = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
LOOKUPS = [[0, 2, 2, 4], [2, 3], [4, 2, 0, 0]]  # row 1 and 5 never, row 3 once


def steps():
    rng = np.random.default_rng(1)
    for ids in LOOKUPS:
        dense, looked_up = np.zeros_like(TABLE), np.zeros(len(TABLE), bool)
        np.add.at(dense, ids, rng.normal(size=(len(ids), 3)))
        looked_up[ids] = True
        yield dense, looked_up


@pytest.mark.parametrize("name", ALL)
def test_a_table_is_updated_as_by_its_lookups_merged(name):
    """Keras 3's optimizers and tf_keras's newer ones treat all rows alike; others are told which
    were looked up.
    """
    ours, theirs = keras.Variable(TABLE, name="ours"), keras.Variable(TABLE, name="theirs")
    optimizer, reference = adapt_optimizer(ALL[name]()), adapt_optimizer(ALL[name]())
    for each, table in ((optimizer, ours), (reference, theirs)):
        each.build([table])
    for dense, looked_up in steps():
        (rows,) = np.nonzero(looked_up)
        merged = tf.IndexedSlices(
            tf.constant(dense[rows]), tf.constant(rows), tf.constant(TABLE.shape)
        )
        if isinstance(reference.optimizer, keras.Optimizer):
            reference.optimizer.apply([merged], [theirs])
        else:
            reference.optimizer.apply_gradients([(merged, *raw([theirs]))])
        known = [tf.constant(looked_up)] if optimizer.needs_lookups else []
        optimizer.apply([tf.constant(dense)], [ours], tf.constant(True), known)
    for mine, other in zip(
        [ours, *optimizer.variables], [theirs, *reference.variables], strict=True
    ):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["LazyAdam", "tfa AdamW", "AdaBelief", "SWA of LazyAdam"])
def test_in_a_compiled_step(name):
    """Lookups in several micro-batches; a skipped step leaves every row and slot."""
    ours, theirs = tf.Variable(TABLE), tf.Variable(TABLE)
    reference = ALL[name]()
    rng = np.random.default_rng(1)

    def loss(micro_batch):
        ids, factors = micro_batch
        return tf.reduce_sum(tf.gather(ours, ids) * factors), tf.constant(0.5)

    step = fa.TrainStep(loss, [ours], ALL[name]())
    for ids in np.array([[[0, 2], [2, 4]], [[2, 2], [3, 3]], [[4, 2], [0, 0]]]):
        factors = rng.normal(size=(2, 2, 3)).astype("float32")
        dense = np.zeros_like(TABLE)
        np.add.at(dense, np.ravel(ids), factors.reshape(4, 3))
        rows = np.unique(ids)
        reference.apply_gradients([(tf.IndexedSlices(dense[rows], rows, TABLE.shape), theirs)])
        assert step((ids, factors)).grads_finite
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    held = [ours, *step.optimizer.variables]
    before = [v.numpy().tobytes() for v in held]
    assert not step((ids, factors * np.inf)).grads_finite
    assert [v.numpy().tobytes() for v in held] == before


def make_model(regularizer=None):
    import tf_keras as k

    embedding = k.layers.Embedding(8, 2, embeddings_regularizer=regularizer)
    model = k.Sequential(
        [k.Input((3,), dtype="int32"), embedding, k.layers.Flatten(), k.layers.Dense(1)]
    )
    rng = np.random.default_rng(0)
    for v in model.weights:
        v.assign(rng.normal(size=v.shape))
    return model


@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_fit_equals_tf_keras_on_the_full_batch(regularizer):
    """Trains on five rows, of which the last stack pads one.

    With a regulariser every row of the table has a gradient.
    """
    tf_keras()
    fused, reference = make_model(regularizer), make_model(regularizer)
    rng = np.random.default_rng(1)
    x, y = rng.integers(1, 5, (10, 3)), rng.normal(size=(10, 1)).astype("float32")
    x[5:] += 2
    reference.compile(fa.addons.optimizers.AdamW(0.1, 0.1), "mse", run_eagerly=True)
    reference.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    trainer = fa.Trainer(
        fused,
        fa.addons.optimizers.AdamW(0.1, 0.1),
        "mse",
        gradient_accumulation_steps=3,
        jit_compile=False,
    )
    for _ in range(2):
        for half in (slice(5), slice(5, None)):
            trainer.fit(x[half], y[half], batch_size=2, shuffle=False, verbose=0)
    for ours, theirs in zip(fused.weights, reference.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    fresh = make_model().weights[0].numpy()
    assert (np.all(fused.weights[0].numpy()[0] == fresh[0])) == (regularizer is None)


def test_keras_3_squares_repeated_lookups_apart():
    """Its Adam adds up the squares of the `IndexedSlices` of one row; ours squares their sum, the
    gradient of the full batch, and equals Keras's own where no id comes twice.
    """

    def make():
        layers = [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(6, 2),
            keras.layers.Flatten(),
        ]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        rng = np.random.default_rng(0)
        for v in model.weights:
            v.assign(rng.normal(size=v.shape))
        return model

    def difference(ids):
        y = np.array([[1.0], [-2.0]], np.float32)
        fused, theirs, dense = make(), make(), make()
        theirs.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
        theirs.fit(ids, y, verbose=0)
        trainer = fa.Trainer(
            fused,
            keras.optimizers.Adam(0.1),
            "mse",
            gradient_accumulation_steps=2,
            jit_compile=False,
        )
        trainer.fit(ids, y, batch_size=1, verbose=0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((dense(ids) - y) ** 2)
        gradients = tape.gradient(loss, raw(dense.trainable_weights))
        keras.optimizers.Adam(0.1).apply(
            [tf.convert_to_tensor(g) for g in gradients], dense.trainable_weights
        )
        tables = [model.weights[0].numpy() for model in (fused, theirs, dense)]
        np.testing.assert_allclose(tables[0], tables[2], rtol=1e-5, atol=1e-6)
        return np.abs(tables[0] - tables[1]).max()

    assert difference(np.array([[0, 1], [2, 3]])) < 1e-6
    assert difference(np.array([[0, 1], [0, 1]])) > 1e-3


def test_every_class_of_theirs_is_known():
    classes = [
        c
        for m in (tf_keras().legacy, fa.addons.optimizers)
        for c in vars(m).values()
        if isinstance(c, type)
    ]
    families = {c.__name__ for c in classes if "_resource_apply_sparse" in vars(c)}
    wrappers = {"AveragedOptimizerWrapper", "DecoupledWeightDecayExtension", "Lookahead"}
    base = {"OptimizerV2"}
    # the last is Hugging Face's
    not_exported = {"NonFusedAdam", "AdamWeightDecay"}
    assert families - wrappers - base == set(untouched_rows._EFFECTS) - not_exported


def test_one_of_ones_own_is_refused_where_it_looks_up():
    adam = tf_keras().legacy.Adam

    class Own(adam):
        def _resource_apply_sparse(self, grad, var, indices, apply_state=None):
            return super()._resource_apply_sparse(2 * grad, var, indices, apply_state)

    class OwnDense(adam):
        def _resource_apply_dense(self, grad, var, apply_state=None):
            return super()._resource_apply_dense(2 * grad, var, apply_state)

    table = tf.Variable(TABLE)

    def of_lookups(ids):
        return tf.reduce_sum(tf.gather(table, ids)), tf.constant(1.0)

    for own in (Own, OwnDense):
        with pytest.raises(
            ValueError,
            match=rf"optimizer={own.__name__} .*Set {own.__name__}\._resource_apply_sparse =",
        ):
            fa.TrainStep(of_lookups, [table], own(0.1), jit_compile=False)(np.array([[0, 1]]))
    np.testing.assert_array_equal(table, TABLE)
    # A table that is not looked up alone has a dense gradient, and what the error says to set has
    # an effect.
    fa.TrainStep(lambda _: (tf.reduce_sum(table), 1.0), [table], Own(0.1), jit_compile=False)(
        np.array([[0, 1]])
    )
    Own._resource_apply_sparse = tf_keras().legacy.Optimizer._resource_apply_sparse
    fa.TrainStep(of_lookups, [table], Own(0.1), jit_compile=False)(np.array([[0, 1]]))
