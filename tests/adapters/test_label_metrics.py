"""Metrics of an output whose loss is `LinearCrossEntropy`: the values of Keras's own metrics on all
the logits.
"""

import importlib.util

import h200
import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.adapters import label_metrics, metrics
from fastaccum.kernels import cross_entropy

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

# an extra, not imported here: it would choose Keras for all tests
HAS_HUB = importlib.util.find_spec("keras_hub")

K, B, T, V, D = 3, 4, 6, 50, 8
ROWS = 2 * K * B + B + 1  # a last stack and in it a last micro-batch that are short
IGNORED = -100
CHUNK = 16  # 24 tokens x 50 classes: 8 chunks, with an overlap each way


def make_model(dtype="float32", mask_zero=False):
    keras.utils.set_random_seed(1)
    ids = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(V, D, dtype=dtype, mask_zero=mask_zero)(ids)
    head = keras.layers.Dense(V, dtype="float32", name="head", kernel_initializer="normal")
    return keras.Model(ids, head(x))


def make_perplexity(*arguments, **options):
    if not HAS_HUB:
        return []
    from keras_hub.metrics import Perplexity

    return [Perplexity(*arguments, **options)]


def make_hub_model(dtype="float32"):
    import keras_hub

    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=V,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=D,
        intermediate_dim=16,
        dtype=dtype,
    )
    return keras_hub.models.LlamaCausalLM(backbone)


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, V, (ROWS, T)).astype("int32")
    return x, np.where(rng.random((ROWS, T)) < 0.2, IGNORED, rng.integers(0, V, (ROWS, T))).astype(
        "int32"
    )


def make_metrics():
    return [
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseTopKCategoricalAccuracy(k=7, name="top_7"),
        keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
        *make_perplexity(from_logits=True),
    ]


def of_logits(metrics, model, x, y, weights=None, counted=None):
    """Updates Keras's metrics with all logits; labels that are ignored weigh nothing."""
    logits = model(x, training=False)
    counted = (y != IGNORED) if counted is None else counted
    weights = (
        counted
        if weights is None
        else counted * (weights if weights.ndim == 2 else weights[:, None])
    )
    for metric in metrics:
        metric.update_state(
            np.maximum(y, 0), tf.cast(logits, tf.float32), weights.astype("float32")
        )
    return {metric.name: float(metric.result()) for metric in metrics}


def check(model, x, y, sample_weight=None, counted=None, tolerance=1e-5, **options):
    """Compares the metrics of `evaluate`, and those of an epoch of `fit` that leaves the weights
    alone.
    """
    kept = None if counted is None else counted & (y != IGNORED)
    expected = of_logits(make_metrics(), model, x, y, None, kept)
    weighted = of_logits(make_metrics(), model, x, y, sample_weight, kept)
    expected |= {f"weighted_{name}": value for name, value in weighted.items()}
    loss = fa.LinearCrossEntropy(chunk_size=options.pop("chunk_size", CHUNK))
    options = {"metrics": make_metrics(), "weighted_metrics": make_metrics(), **options}
    trainer = fa.Trainer(
        model, keras.optimizers.SGD(0.0), loss, gradient_accumulation_steps=K, **options
    )
    arguments = {"sample_weight": sample_weight, "batch_size": B, "verbose": 0}
    fitted = trainer.fit(x, y, shuffle=False, **arguments).history
    evaluated = trainer.evaluate(x, y, return_dict=True, **arguments)
    assert (
        expected["sparse_categorical_accuracy"] > 0
        and expected["top_7"] > expected["sparse_categorical_accuracy"]
    )
    for name, value in expected.items():
        np.testing.assert_allclose(
            [fitted[name][0], evaluated[name]], value, rtol=tolerance, atol=1e-6, err_msg=name
        )
    return evaluated


def weights_of(kind):
    rng = np.random.default_rng(5)
    return {"none": None, "rows": rng.random(ROWS), "tokens": rng.random((ROWS, T))}[kind]


@pytest.mark.parametrize(
    ("kind", "jit_compile"),
    [
        ("tokens", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("rows", True), ("none", False))
        ),
    ],
)
def test_they_are_those_of_all_logits(kind, jit_compile):
    """Covers ignored labels, sample weights, several chunks, and rows that pad the last micro-
    batch.
    """
    x, y = make_data()
    check(make_model(), x, y, weights_of(kind), jit_compile=jit_compile)


def test_masked_tokens_do_not_count():
    x, y = make_data()
    check(make_model(mask_zero=True), x, y, weights_of("rows"), counted=x != 0, jit_compile=False)


@pytest.mark.slow
@pytest.mark.sample
def test_those_of_a_step_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_is_small", lambda head, chunk_size: False)
    x, y = make_data()
    with h200.as_on_a_gpu():
        check(
            make_model("mixed_bfloat16"),
            x,
            y,
            weights_of("tokens"),
            chunk_size=None,
            tolerance=2e-2,
            jit_compile=False,
        )


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_those_of_a_causal_lm_of_keras_hub(dtype):
    """Uses the weights that its preprocessor makes, in which padding weighs 0."""
    pytest.importorskip("keras_hub")
    ids, y = make_data()
    real = np.arange(T) < np.random.default_rng(2).integers(2, T + 1, (ROWS, 1))
    x = {"token_ids": ids, "padding_mask": real.astype("int32")}
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    check(
        make_hub_model(dtype), x, y, real.astype("float32"), tolerance=tolerance, jit_compile=False
    )


def test_a_metric_that_counts_ignored_labels_is_told_apart(monkeypatch):
    """The comparison with Keras's metrics fails for such a one."""

    def count_all(labels):
        return labels._replace(counted=tf.ones_like(labels.counted))

    update = label_metrics.update_from_scores
    monkeypatch.setattr(
        metrics,
        "update_from_scores",
        lambda metric, labels, weight: update(metric, count_all(labels), tf.ones_like(weight)),
    )
    x, y = make_data()
    with pytest.raises(AssertionError, match="sparse_categorical_accuracy"):
        check(make_model(), x, y, jit_compile=False)


def test_equal_logits_are_ranked_as_by_keras():
    """All logits are equal: the first id is the best, and each label is within the top k."""
    x, y = make_data()
    model = make_model()
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    trainer = fa.Trainer(model, "sgd", fa.LinearCrossEntropy(chunk_size=CHUNK), make_metrics())
    evaluated = trainer.evaluate(
        x, np.where(y < 25, 0, y), batch_size=B, return_dict=True, verbose=0
    )
    expected = of_logits(
        make_metrics(), model, x, np.where(y < 25, 0, y), counted=np.ones(y.shape, bool)
    )
    assert 0 < expected["sparse_categorical_accuracy"] < 1 == expected["top_7"]
    for name, value in expected.items():
        np.testing.assert_allclose(evaluated[name], value, rtol=1e-5, err_msg=name)


def test_names_stand_for_them_and_labels_may_have_a_last_axis_of_one():
    x, y = make_data()
    y = np.maximum(y, 0)
    values = []
    for loss in (
        fa.LinearCrossEntropy(chunk_size=CHUNK),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ):
        metrics = [
            "accuracy",
            keras.metrics.sparse_top_k_categorical_accuracy,
            *make_perplexity(True, 3),
        ]
        trainer = fa.Trainer(make_model(), "sgd", loss, metrics, jit_compile=False)
        values.append(
            trainer.evaluate(x, y[..., None] if len(values) else y, batch_size=B, verbose=0)
        )
    np.testing.assert_allclose(*values, rtol=1e-5)


class Own(keras.metrics.SparseCategoricalAccuracy):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true, -y_pred, sample_weight)


@pytest.mark.parametrize(
    "metric",
    [
        keras.metrics.SparseCategoricalCrossentropy(name="refused"),  # of probabilities
        keras.metrics.SparseCategoricalCrossentropy(
            name="refused", from_logits=True, ignore_class=7
        ),
        keras.metrics.SparseTopKCategoricalAccuracy(name="refused", from_sorted_ids=True),
        keras.metrics.Accuracy(name="refused"),
        Own(name="refused"),
    ],
)
def test_others_are_refused_by_name(metric):
    x, y = make_data()
    trainer = fa.Trainer(make_model(), "sgd", fa.LinearCrossEntropy(), ["accuracy", metric])
    with pytest.raises(
        ValueError, match=r"metrics \['refused'\] of output 'head' need the logits.*It takes Sparse"
    ):
        trainer.fit(x, y, verbose=0)


def test_a_perplexity_of_probabilities_is_refused():
    if not HAS_HUB:
        pytest.skip("without KerasHub")
    test_others_are_refused_by_name(*make_perplexity(name="refused"))
