import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.adapters.loss_terms import compute_term
from fastaccum.adapters.losses import Losses
from fastaccum.adapters.outputs import Outputs
from fastaccum.kernels import private

ROWS, TIME, CLASSES = 6, 4, 3
REDUCTIONS = [
    *(
        ("keras", each)
        for each in ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
    ),
    *(("tf_keras", each) for each in ("sum_over_batch_size", "sum")),
]

rng = np.random.default_rng(0)


def probabilities(*shape):
    p = rng.random(shape).astype("float32") + 0.1
    return p / p.sum(-1, keepdims=True)


def values(*shape):
    return rng.normal(size=shape).astype("float32")


def labels(*shape):
    return rng.integers(0, CLASSES, shape)


LOSSES = keras.losses
# loss class, options, y_true, y_pred
CASES = {
    "mse": (LOSSES.MeanSquaredError, {}, values(ROWS, 2), values(ROWS, 2)),
    "mse, y without its last axis": (LOSSES.MeanSquaredError, {}, values(ROWS), values(ROWS, 1)),
    "mse of sequences": (LOSSES.MeanSquaredError, {}, values(ROWS, TIME, 2), values(ROWS, TIME, 2)),
    "mae": (LOSSES.MeanAbsoluteError, {}, values(ROWS, 2), values(ROWS, 2)),
    "msle": (LOSSES.MeanSquaredLogarithmicError, {}, values(ROWS, 2) ** 2, values(ROWS, 2) ** 2),
    "huber": (LOSSES.Huber, {"delta": 0.5}, values(ROWS, 2), values(ROWS, 2)),
    "log cosh": (LOSSES.LogCosh, {}, values(ROWS, 2), values(ROWS, 2)),
    "hinge": (LOSSES.Hinge, {}, values(ROWS, 2), values(ROWS, 2)),
    "cosine": (LOSSES.CosineSimilarity, {}, values(ROWS, 2), values(ROWS, 2)),
    "kl": (LOSSES.KLDivergence, {}, probabilities(ROWS, CLASSES), probabilities(ROWS, CLASSES)),
    "poisson": (LOSSES.Poisson, {}, values(ROWS, 1) ** 2, values(ROWS, 1) ** 2),
    "binary": (
        LOSSES.BinaryCrossentropy,
        {"from_logits": True, "label_smoothing": 0.1},
        labels(ROWS, 1) % 2,
        values(ROWS, 1),
    ),
    "focal": (
        LOSSES.BinaryFocalCrossentropy,
        {},
        labels(ROWS, 1) % 2,
        probabilities(ROWS, 2)[:, :1],
    ),
    "one-hot": (
        LOSSES.CategoricalCrossentropy,
        {"label_smoothing": 0.1},
        np.eye(CLASSES)[labels(ROWS)],
        probabilities(ROWS, CLASSES),
    ),
    "classes": (
        LOSSES.SparseCategoricalCrossentropy,
        {},
        labels(ROWS),
        probabilities(ROWS, CLASSES),
    ),
    "classes in a column": (
        LOSSES.SparseCategoricalCrossentropy,
        {"from_logits": True},
        labels(ROWS, 1),
        values(ROWS, CLASSES),
    ),
    "tokens": (
        LOSSES.SparseCategoricalCrossentropy,
        {"from_logits": True},
        labels(ROWS, TIME),
        values(ROWS, TIME, CLASSES),
    ),
    "tokens, one class ignored": (
        LOSSES.SparseCategoricalCrossentropy,
        {"from_logits": True, "ignore_class": 1},
        labels(ROWS, TIME),
        values(ROWS, TIME, CLASSES),
    ),
    "images": (LOSSES.MeanSquaredError, {}, values(ROWS, 3, 2, 2), values(ROWS, 3, 2, 2)),
    "focal one-hot": (
        LOSSES.CategoricalFocalCrossentropy,
        {},
        np.eye(3)[labels(ROWS)],
        probabilities(ROWS, 3),
    ),
}


def loss_of(case, reduction="sum_over_batch_size", K=keras):
    cls, options, y_true, y_pred = CASES[case]
    return (
        getattr(K.losses, cls.__name__)(reduction=reduction, **options),
        tf.constant(y_true),
        tf.constant(y_pred),
    )


def with_mask(y_pred, mask):
    y_pred = tf.identity(y_pred)
    private.keras_mask.set(y_pred, mask)
    return y_pred


def value_of(loss, found):
    return float(found.loss_sum if loss.reduction == "sum" else found.loss_sum / found.weight_sum)


@pytest.mark.parametrize(("K", "reduction"), REDUCTIONS, indirect=["K"])
@pytest.mark.parametrize("case", CASES)
def test_a_term_is_the_value_of_keras(K, case, reduction):
    loss, y_true, y_pred = loss_of(case, reduction, K)
    in_fit = (
        y_true[:, tf.newaxis] if y_pred.shape == (ROWS, 1) and len(y_true.shape) == 1 else y_true
    )
    elements = tuple(loss.call(in_fit, y_pred).shape)
    # Fractions and zeros, one for each loss; Keras itself knows no coarser ones for sequences.
    weights = tf.constant(rng.choice([0.0, 0.5, 2.0], size=elements).astype("float32"))
    for sample_weight in (None, weights):
        expected = float(loss(in_fit, y_pred, sample_weight=sample_weight))
        found = compute_term(loss, y_true, y_pred, sample_weight)
        np.testing.assert_allclose(value_of(loss, found), expected, rtol=1e-5)


@pytest.mark.parametrize(("K", "reduction"), REDUCTIONS, indirect=["K"])
@pytest.mark.parametrize("case", ["tokens", "tokens, one class ignored", "mse of sequences"])
@pytest.mark.parametrize("weighted", [False, True])
def test_masked_tokens_count_as_in_keras(K, case, reduction, weighted):
    loss, y_true, y_pred = loss_of(case, reduction, K)
    mask = tf.constant(rng.random((ROWS, TIME)) < 0.6)
    weights = tf.constant(rng.choice([0.0, 0.5, 2.0], size=(ROWS, TIME)).astype("float32"))
    weights = weights if weighted else None
    expected = float(loss(y_true, with_mask(y_pred, mask), sample_weight=weights))
    found = compute_term(loss, y_true, with_mask(y_pred, mask), weights)
    np.testing.assert_allclose(value_of(loss, found), expected, rtol=1e-5)


@pytest.mark.parametrize(("K", "reduction"), REDUCTIONS, indirect=["K"])
@pytest.mark.parametrize("case", CASES)
def test_rows_that_only_pad_leave_no_trace(K, case, reduction):
    loss, y_true, y_pred = loss_of(case, reduction, K)
    weights = tf.constant(rng.choice([0.0, 0.5, 2.0], size=ROWS).astype("float32"))
    valid = tf.constant([True] * 4 + [False] * 2)
    # What stands in a padded row does not matter, not even if it is not finite.
    spoiled = tf.concat([y_pred[:4], y_pred[4:] * np.nan], 0)
    for sample_weight in (None, weights):
        padded = compute_term(loss, y_true, spoiled, sample_weight, valid)
        exact = compute_term(
            loss, y_true[:4], y_pred[:4], None if sample_weight is None else sample_weight[:4]
        )
        np.testing.assert_allclose(padded[:2], exact[:2], rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_terms_of_micro_batches_add_up_to_that_of_all_rows(K, case):
    loss, y_true, y_pred = loss_of(
        case, "mean_with_sample_weight" if K is keras else "sum_over_batch_size", K
    )
    weights = tf.constant(rng.random(ROWS).astype("float32"))
    whole = compute_term(loss, y_true, y_pred, weights)
    parts = [
        compute_term(loss, y_true[a:b], y_pred[a:b], weights[a:b])[:2]
        for a, b in [(0, 1), (1, 4), (4, 6)]
    ]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole[:2], rtol=1e-5)


def test_a_weight_of_zero_counts_but_a_masked_element_does_not():
    loss = LOSSES.MeanSquaredError()
    y_true, y_pred = tf.zeros([3, 1]), tf.ones([3, 1])
    assert float(compute_term(loss, y_true, y_pred, tf.constant([1.0, 0.0, 1.0])).weight_sum) == 3
    assert (
        float(
            compute_term(
                loss, y_true, with_mask(y_pred, tf.constant([True, False, True]))
            ).weight_sum
        )
        == 2
    )


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, TIME), (ROWS, TIME, 1)])
def test_weights_of_any_rank_that_fits(shape):
    loss, y_true, y_pred = loss_of("tokens", "sum")
    weights = rng.random(shape).astype("float32")
    per_token = np.broadcast_to(
        weights.reshape(*shape[:2], *[1] * (2 - len(shape[:2]))), (ROWS, TIME)
    )
    expected = (loss.call(y_true, y_pred).numpy() * per_token).sum()
    np.testing.assert_allclose(
        compute_term(loss, y_true, y_pred, tf.constant(weights)).loss_sum, expected, rtol=1e-5
    )


def test_weights_that_do_not_fit_say_so():
    loss, y_true, y_pred = loss_of("tokens")
    with pytest.raises(
        ValueError, match=r"sample_weight of shape \(6, 3\) does not fit losses of shape \(6, 4\)"
    ):
        compute_term(loss, y_true, y_pred, tf.ones([ROWS, 3]))


def test_a_loss_that_averages_over_rows_alone_is_refused():
    losses = Losses(lambda y_true, y_pred: tf.reduce_mean((y_true - y_pred) ** 2, axis=0))
    spec = keras.KerasTensor((ROWS, 2))
    outputs = Outputs(["out"], spec)
    with pytest.raises(ValueError, match="one loss per example"):
        bound = losses.bind(outputs, spec)
        bound.terms(outputs.matched(tf.zeros([ROWS, 2]), tf.ones([ROWS, 2]), None), {})


def test_a_function_and_a_name_are_losses_too():
    spec = keras.KerasTensor((ROWS, 2))
    outputs = Outputs(["out"], spec)
    batch = outputs.matched(tf.zeros([ROWS, 2]), tf.fill([ROWS, 2], 3.0), None)
    found = []
    for each in (
        "mse",
        lambda y_true, y_pred: tf.reduce_mean((y_true - y_pred) ** 2, -1),
        LOSSES.MeanSquaredError(),
    ):
        losses = Losses(each).bind(outputs, spec)
        (only,) = losses.terms(batch, {})
        found.append((float(only.loss_sum), float(only.weight_sum)))
    assert found == [(9.0 * ROWS, ROWS)] * 3


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        ("mean_sqared_error", ValueError, "'mean_sqared_error' is not a Keras loss"),
        (3, TypeError, "loss=3"),
    ],
)
def test_what_is_no_loss_is_refused(loss, error, message):
    with pytest.raises(error, match=message):
        Losses(loss)


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_without_a_reduction_is_refused(reduction):
    losses = Losses(LOSSES.MeanSquaredError(reduction=reduction))
    with pytest.raises(ValueError, match="reduction=None"):
        losses.bind(Outputs(["out"], keras.KerasTensor((2, 1))), keras.KerasTensor((2, 1)))


class TestOutputs:
    OUTPUTS = Outputs(["a", "b"], (keras.KerasTensor((2, 1)), keras.KerasTensor((2, 3))))

    def test_lists_dicts_and_single_values_mean_the_same(self):
        for value in ([1, 2], (1, 2), {"a": 1, "b": 2}):
            assert self.OUTPUTS.match(value, "loss") == [1, 2]
        assert self.OUTPUTS.match("mse", "loss", repeat=True) == ["mse", "mse"]
        assert self.OUTPUTS.match(None, "loss") == self.OUTPUTS.match((), "loss") == [None, None]

    def test_a_models_dict_names_its_outputs_itself(self):
        outputs = Outputs(
            ["a", "b"], {"x": keras.KerasTensor((2, 1)), "y": keras.KerasTensor((2, 3))}
        )
        assert outputs.names == ["x", "y"] and outputs.match({"y": 2, "x": 1}, "loss") == [1, 2]
        assert outputs.predictions({"y": 2, "x": 1}) == [1, 2]

    def test_outputs_may_share_a_name(self):
        outputs = Outputs(["a", "a"], [keras.KerasTensor((2, 1))] * 2)
        assert outputs.match([1, 2], "loss") == [1, 2] and outputs.match({"a": 1}, "loss") == [1, 1]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"a": 1, "c": 2}, r"loss names \['c'\], but the model's outputs are \['a', 'b'\]"),
            ([1], r"loss has 1 entries for the 2 outputs"),
            (1, "loss is one value, but the model has 2 outputs"),
        ],
    )
    def test_what_does_not_fit_says_so(self, value, message):
        with pytest.raises(ValueError, match=message):
            self.OUTPUTS.match(value, "loss")


def test_a_loss_without_a_target_says_so():
    losses = Losses({"a": "mse", "b": "mse"})
    spec = keras.KerasTensor((2, 1))
    with pytest.raises(ValueError, match="Output 'b' has a loss but no target"):
        losses.bind(Outputs(["a", "b"], {"a": spec, "b": spec}), {"a": spec})


@pytest.mark.parametrize("family", ["keras", "tf_keras"])
def test_only_labels_that_are_class_indices_are_observed(family):
    family = pytest.importorskip(family)
    losses = Losses({"a": "mse", "b": family.losses.SparseCategoricalCrossentropy(ignore_class=-1)})
    y_pred = {"a": tf.zeros([2, 1]), "b": tf.fill([2, CLASSES], 1 / 3)}
    y_true = {"a": tf.fill([2, 1], 99.0), "b": tf.constant([-1, 2])}
    outputs = Outputs(["a", "b"], y_pred)
    losses = losses.bind(outputs, y_true)
    assert [output.classes for output in losses.outputs] == [None, CLASSES]
    # The ignored class is not out of range.
    assert [
        labels.numpy().tolist() for labels in losses.class_indices(outputs.match(y_true, "y"))
    ] == [[0, 2]]


def test_a_loss_that_compares_rows_is_that_of_each_micro_batch():
    """Warns, and pads no micro-batch."""
    y_pred, labels = (
        tf.math.l2_normalize(tf.constant([[1.0, 2], [3, 1], [2, 2], [0, 1]]), 1),
        tf.constant([0, 0, 1, 1]),
    )
    losses, outputs, loss = Losses(LOSSES.Circle()), Outputs(["a"], y_pred), LOSSES.Circle()
    losses = losses.bind(outputs, labels)
    assert losses.mixing == {"a": "circle"}
    (term,) = losses.terms(outputs.matched(labels, y_pred, None), {})
    np.testing.assert_allclose(term.loss_sum / term.weight_sum, loss(labels, y_pred), rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["TripletSemiHard", "TripletHard", "LiftedStruct", "Npairs", "NpairsMultilabel"]
)
def test_a_loss_of_tensorflow_addons_that_compares_rows_is_that_of_each_micro_batch(name):
    """Computes a scalar for each micro-batch, whatever the loss's reduction."""
    pytest.importorskip("tf_keras")
    y_pred, labels = tf.fill([4, 4], 0.5), tf.eye(4) if name == "NpairsMultilabel" else tf.range(4)
    loss, outputs = getattr(fa.addons.losses, f"{name}Loss")(), Outputs(["a"], y_pred)
    losses = Losses(loss)
    losses = losses.bind(outputs, labels)
    assert list(losses.unproven) == ["a"]
    (term,) = losses.terms(outputs.matched(labels, y_pred, None), {})
    np.testing.assert_allclose(term.loss_sum / term.weight_sum, loss(labels, y_pred), rtol=1e-6)


class Halved(LOSSES.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return super().__call__(y_true, y_pred, sample_weight) / 2.0


class PairsOfRows(LOSSES.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)))


@pytest.mark.parametrize("kind", [Halved, PairsOfRows])
def test_a_loss_whose_call_operator_is_its_own_is_refused(kind):
    losses = Losses(kind())
    with pytest.raises(ValueError, match=rf"{kind.__name__}, whose __call__ .* compute_loss"):
        losses.bind(Outputs(["a"], tf.ones([4, 3])), tf.ones([4, 3]))


IMAGES = np.random.default_rng(0).integers(0, 2, size=(10, 4, 4, 2)).astype("float32")


@pytest.mark.parametrize("kind", [LOSSES.Dice, LOSSES.Tversky])
def test_the_error_of_a_whole_batch_loss_names_axes_that_train_as_in_keras(kind):
    spec = keras.KerasTensor((10, 4, 4, 2))
    axes = rf"losses\.{kind.__name__}\(axis=\(1, 2, 3\)\), one loss for each row"
    # as many losses as there are rows may still be of all rows
    for axis in (0, (-4, 1), (0, 1, 2)):
        with pytest.raises(ValueError, match=f"compares the whole batch.*{axes}"):
            Losses(kind(axis=axis)).bind(Outputs(["mask"], spec), spec)

    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((4, 4, 2)), keras.layers.Dense(2, activation="sigmoid")]
        )

    full, x = model(), IMAGES[::-1] + 0.5
    full.compile(keras.optimizers.SGD(0.1), kind(axis=(1, 2, 3)), run_eagerly=True)
    loss = full.train_on_batch(x, IMAGES)
    sgd = keras.optimizers.SGD(0.1)
    trainer = fa.Trainer(
        model(), sgd, kind(axis=(1, 2, 3)), gradient_accumulation_steps=3, jit_compile=False
    )
    history = trainer.fit(x, IMAGES, batch_size=4, shuffle=False, verbose=0).history
    assert history["loss"] == pytest.approx([float(loss)], rel=1e-5)
    for ours, theirs in zip(trainer.model.get_weights(), full.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_an_output_may_have_no_loss():
    losses = Losses({"b": "mse"})
    spec = keras.KerasTensor((2, 1))
    outputs = Outputs(["a", "b"], [spec, spec])
    losses = losses.bind(outputs, {"b": spec})
    assert [(output.position, output.name) for output in losses.outputs] == [(1, "b")]
    batch = outputs.matched({"b": tf.zeros([2, 1])}, [tf.ones([2, 1]), tf.fill([2, 1], 3.0)], None)
    assert [float(each.loss_sum) for each in losses.terms(batch, {})] == [18.0]


def test_a_loss_of_a_distribution_gets_it_as_it_is():
    # as tensorflow-probability's layers return them: no tensor until one is drawn
    class Distribution:
        shape, dtype = tf.TensorShape([ROWS, 1]), tf.float32

        def log_prob(self, y):
            return -tf.square(y[:, 0])

    losses = Losses(lambda y, distribution: -distribution.log_prob(y))
    y = values(ROWS, 1)
    losses = losses.bind(Outputs(["a"], keras.KerasTensor((ROWS, 1))), keras.KerasTensor((ROWS, 1)))
    batch = Outputs(["a"], keras.KerasTensor((ROWS, 1))).matched(
        tf.constant(y), Distribution(), None
    )
    (term,) = losses.terms(batch, {})
    assert float(term.loss_sum) == pytest.approx(np.square(y).sum())
    assert float(term.weight_sum) == ROWS
