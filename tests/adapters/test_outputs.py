"""Models of several outputs, whatever nest they return and however losses and targets are passed:
as in Keras.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4)).astype("float32")
Y, Z, W = (RNG.normal(size=(10, 2)).astype("float32") for _ in range(3))
ROWS = np.linspace(0.5, 2.0, 10).astype("float32")


def model_of(K, outputs, count=3):
    K.utils.set_random_seed(1)
    x = K.Input((4,))
    return K.Model(x, outputs(*(K.layers.Dense(2, name=name)(x) for name in "pqr"[:count])))


def shared_head(K):
    K.utils.set_random_seed(1)
    a, body, head = K.Input((4,)), K.layers.Dense(4), K.layers.Dense(2, name="head")
    return K.Model(a, [head(a), head(body(a))])


def nested_model(K):
    K.utils.set_random_seed(1)
    a = K.Input((4,))
    inner = K.Model(b := K.Input((4,)), [K.layers.Dense(2)(b), K.layers.Dense(2)(b)], name="inner")
    return K.Model(a, inner(a))


def lstm_with_state(K):
    K.utils.set_random_seed(1)
    a = K.Input((4,))
    return K.Model(a, K.layers.LSTM(2, return_state=True, name="lstm")(K.layers.Reshape((2, 2))(a)))


def step_and_evaluation(model, y, sample_weight=None, **compiled):
    """Keras's own logs of a step and an evaluation of all rows at once, and the weights between
    them.
    """
    model.compile("sgd", run_eagerly=True, **compiled)
    trained = model.train_on_batch(X, y, sample_weight, return_dict=True)
    weights = [w.copy() for w in model.get_weights()]
    arguments = {"sample_weight": sample_weight, "batch_size": len(X), "verbose": 0}
    return (
        trained,
        weights,
        model.evaluate(X, y, return_dict=True, **arguments),
        model.evaluate(X, y, **arguments),
    )


def assert_as_keras(build, y, sample_weight=None, logged=True, **compiled):
    """Micro-batches of 4, 4 and 2 rows are Keras's step on all 10: its weights, its logs, its list
    of values.
    """
    trained, weights, as_dict, as_list = step_and_evaluation(
        model := build(), y, sample_weight, **compiled
    )
    sgd = type(model.optimizer)(0.01)
    trainer = fa.Trainer(build(), sgd, gradient_accumulation_steps=3, jit_compile=False, **compiled)
    history = trainer.fit(
        X, y, sample_weight=sample_weight, batch_size=4, shuffle=False, verbose=0
    ).history
    for ours, theirs in zip(trainer.model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    ours = trainer.evaluate(
        X, y, sample_weight=sample_weight, batch_size=4, verbose=0, return_dict=True
    )
    in_fit = {name: value for name, (value,) in history.items() if name in trained or name in ours}
    if logged:
        assert in_fit == pytest.approx(trained, rel=1e-4)
        assert ours == pytest.approx(as_dict, rel=1e-4)
        values = trainer.evaluate(X, y, sample_weight=sample_weight, batch_size=4, verbose=0)
        np.testing.assert_allclose(values, as_list, rtol=1e-4)
    return in_fit


@pytest.mark.parametrize("build", [shared_head, nested_model])
def test_two_outputs_of_one_layer_have_their_own_loss_metrics_and_logs(K, build):
    compiled = {
        "loss": ["mse", "mae"],
        "metrics": [["mse"], ["mse"]],
        "weighted_metrics": [["mae"], None],
    }
    compiled["loss_weights"] = [1.0, 3.0]
    is_new = K is keras
    logs = assert_as_keras(lambda: build(K), [Y, Z], logged=not is_new, **compiled)
    if is_new:  # there Keras lets the second loss stand for both
        trained, *_ = step_and_evaluation(build(K), [Y, Z], **compiled)
        name = build(K).output_names[0]
        second = {f"{name}_loss_1": trained[f"{name}_loss"]}
        first = {f"{name}_loss": trained["loss"] - 3.0 * second[f"{name}_loss_1"]}
        assert logs == pytest.approx({**trained, **first, **second}, rel=1e-4)


def test_two_outputs_of_one_name_in_a_dict_share_what_it_says():
    logs = assert_as_keras(
        lambda: shared_head(keras),
        {"head": Y},
        logged=False,
        loss={"head": "mse"},
        metrics={"head": ["mae"]},
    )
    assert {"head_loss", "head_loss_1", "head_mae", "head_mae_1"} < set(logs)
    assert logs["head_loss"] + logs["head_loss_1"] == pytest.approx(logs["loss"], rel=1e-5)


def test_an_lstm_that_returns_its_state(K):
    y = [Y, Z, W]
    logs = assert_as_keras(
        lambda: lstm_with_state(K), y, logged=K is not keras, loss=["mse", "mae", "mse"]
    )
    assert len(logs) == 4


NESTS = {
    "dict of lists": (
        lambda p, q, r: {"z": [p, q], "a": r},
        {"z": [Y, Z], "a": W},
        {"z": ["mse", "mae"], "a": "mse"},
    ),
    "list of dicts": (
        lambda p, q, r: [{"z": p, "a": q}, r],
        [{"z": Y, "a": Z}, W],
        [{"a": "mae", "z": "mse"}, "mse"],
    ),
    "tuples": (lambda p, q, r: (p, (q, r)), (Y, (Z, W)), ("mse", ("mae", "mse"))),
    "one list for tuples": (lambda p, q, r: (p, (q, r)), (Y, (Z, W)), ["mse", "mae", "mse"]),
    "one loss for tuples": (lambda p, q, r: (p, (q, r)), (Y, (Z, W)), "mse"),
    "some of tuples": (lambda p, q, r: (p, (q, r)), (Y, (Z, W)), ("mse", (None, "mae"))),
    "by name": (lambda p, q, r: (p, (q, r)), (Y, (Z, W)), {"p": "mse", "r": "mae", "q": "mse"}),
    "a dict that is not sorted": (
        lambda p, q, r: {"z": p, "a": q},
        {"z": Y, "a": Z},
        {"z": "mse", "a": "mae"},
    ),
    "a list for such a dict": (lambda p, q, r: {"z": p, "a": q}, {"z": Y, "a": Z}, ["mse", "mae"]),
}


FIRST = {"dict of lists", "one list for tuples", "some of tuples", "by name"}


@pytest.mark.parametrize(
    "case", [c if c in FIRST else pytest.param(c, marks=pytest.mark.slow) for c in NESTS]
)
def test_losses_and_targets_in_the_structure_of_the_outputs(K, case):
    outputs, y, loss = NESTS[case]
    assert_as_keras(lambda: model_of(K, outputs), y, loss=loss)


def test_metrics_and_weights_of_losses_in_the_structure_of_the_outputs(K):
    outputs, y, loss = NESTS["dict of lists"]
    metrics = {"z": [["mae", "mse"], None], "a": ["mae"]}
    assert_as_keras(
        lambda: model_of(K, outputs),
        y,
        loss=loss,
        metrics=metrics,
        loss_weights={"z": [1.0, 2.0], "a": 0.5},
    )
    outputs, y, loss = NESTS["a dict that is not sorted"]
    metrics = {"a": ["mse", "mae"], "z": ["mae"]}
    assert_as_keras(
        lambda: model_of(K, outputs),
        y,
        loss=loss,
        metrics=metrics,
        loss_weights={"z": 2.0, "a": 0.5},
    )


def test_a_list_of_targets_goes_by_sorted_names():
    outputs, _, loss = NESTS["a list for such a dict"]
    assert_as_keras(lambda: model_of(keras, outputs), [Y, Z], loss=loss, metrics=["mse", "mae"])


@pytest.mark.parametrize(
    "y", [Y, [Y], [Y, None, None]], ids=["one", "a list of one", "None for the others"]
)
def test_targets_for_the_outputs_with_a_loss(y):
    compiled = {"loss": ["mse", None, None], "metrics": [["mae"], None, None]}
    assert_as_keras(lambda: model_of(keras, lambda p, q, r: [p, q, r]), y, **compiled)


def test_targets_for_the_outputs_with_a_loss_are_in_the_order_of_the_outputs():
    compiled = {"loss": {"r": "mae", "p": "mse"}}
    assert_as_keras(
        lambda: model_of(keras, lambda p, q, r: {"p": p, "q": q, "r": r}), [Y, Z], **compiled
    )


def test_none_among_targets_and_weights(K):
    def build():
        return model_of(K, lambda p, q, r: [p, q, r])

    compiled = {"loss": ["mse", None, "mae"], "weighted_metrics": [["mae"], None, ["mse"]]}
    weights = [ROWS, None, None] if K is keras else ROWS  # there tf_keras takes no None
    logs = assert_as_keras(build, [Y, None, Z], weights, logged=K is keras, **compiled)
    if K is not keras:
        return
    by_hand = fa.Trainer(build(), K.optimizers.SGD(0.01), jit_compile=False, **compiled)
    result = by_hand.train_step((X[None], [Y[None], None, Z[None]], [ROWS[None], None, None]))
    assert float(result.loss) == pytest.approx(logs["loss"], rel=1e-5)
    pipeline = tf.data.Dataset.from_tensor_slices((X, Y, Z, ROWS)).batch(4)
    pipeline = pipeline.map(lambda x, y, z, w: (x, (y, None, z), (w, None, None)))
    trainer = fa.Trainer(
        build(),
        K.optimizers.SGD(0.01),
        gradient_accumulation_steps=3,
        jit_compile=False,
        **compiled,
    )
    assert trainer.fit(pipeline, verbose=0).history["loss"] == pytest.approx(
        [logs["loss"]], rel=1e-5
    )


def decoder(K):
    """Returns what the next call would need beside the logits, as decoders do; of it nothing has a
    loss.
    """

    class Decoder(K.Model):
        def __init__(self):
            super().__init__()
            self.dense = K.layers.Dense(2, kernel_initializer="ones")

        def call(self, x):
            h = self.dense(x)
            return {
                "logits": h,
                "cache": ((h, h[:, :1]), (tf.stack([h, h]), None)),
                "scale": tf.reduce_sum(h),
            }

    return Decoder()


@pytest.mark.parametrize("y", [Y, {"logits": Y}], ids=["one", "by name"])
def test_outputs_without_a_loss_may_be_any_nest(K, y):
    plain = K.Sequential([K.Input((4,)), K.layers.Dense(2, kernel_initializer="ones")])
    plain.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    expected = plain.train_on_batch(X, Y, return_dict=True)
    loss, metrics = {"logits": "mse"}, {"logits": ["mae"]}
    options = {"gradient_accumulation_steps": 3, "jit_compile": False}
    trainer = fa.Trainer(decoder(K), K.optimizers.SGD(0.01), loss, metrics, **options)
    history = trainer.fit(X, y, batch_size=4, shuffle=False, verbose=0).history
    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    logged = history["loss"] + history["logits_mae"]
    assert logged == pytest.approx([expected["loss"], expected["mae"]], rel=1e-5)
    # tf_keras logs the loss of an output even where it is the only one.
    assert history.get("logits_loss") == (None if K is keras else history["loss"])


def test_one_loss_of_several_outputs_is_logged_as_in_keras(K):
    # By name Keras 3 wants one for every output.
    y, loss = ([Y, Z, W], ["mse", None, None]) if K is keras else ({"p": Y}, {"p": "mse"})
    assert_as_keras(lambda: model_of(K, lambda p, q, r: [p, q, r]), y, loss=loss)
