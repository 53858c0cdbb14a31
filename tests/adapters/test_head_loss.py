"""Training with `LinearCrossEntropy`: the steps of Keras's own loss, without the logits."""

import contextlib
import re
import unittest.mock

import h200
import keras
import numpy as np
import pytest

import fastaccum as fa
from fastaccum.kernels import cross_entropy

K, B, T, V, D = 3, 4, 6, 50, 8
IGNORED = -100
CHUNK = 16  # 24 tokens x 50 classes: 8 chunks, with an overlap each way


def make_model(dtype="float32", bias=True):
    keras.utils.set_random_seed(1)
    ids = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(V, D, mask_zero=True, dtype=dtype, name="tokens")(ids)
    x = keras.layers.Dense(D, activation="tanh", dtype=dtype)(x)
    # As the reference GPT's: float32 whatever the rest computes in.
    return keras.Model(ids, keras.layers.Dense(V, use_bias=bias, dtype="float32", name="head")(x))


def theirs(**options):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=IGNORED, **options
    )


def ours(**options):
    return fa.LinearCrossEntropy(chunk_size=CHUNK, **options)


def make_trainer(loss, dtype="float32", **options):
    model = make_model(dtype, bias=dtype == "float32")
    return fa.Trainer(
        model, keras.optimizers.SGD(1.0), loss, gradient_accumulation_steps=K, **options
    )


def make_data(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, V, (rows, T)).astype("int32")
    return x, np.where(rng.random((rows, T)) < 0.2, IGNORED, rng.integers(0, V, (rows, T))).astype(
        "int32"
    )


def make_weights(kind, rows):
    rng = np.random.default_rng(5)
    return {"none": None, "rows": rng.random(rows), "tokens": rng.random((rows, T))}[kind]


@pytest.mark.parametrize(
    ("dtype", "reduction", "weights"),
    [
        pytest.param("float32", "sum_over_batch_size", "rows", marks=pytest.mark.slow),
        ("float32", "mean_with_sample_weight", "tokens"),
        ("mixed_float16", "sum", "none"),
    ],
)
def test_fit_and_evaluate_are_those_of_keras_own_loss(dtype, reduction, weights):
    """Covers ignored labels, masked ids, sample weights, a short last stack and a short last micro-
    batch.
    """
    rows = 2 * K * B + B + 1
    x, y = make_data(rows)
    sample_weight = make_weights(weights, rows)
    outcomes = []
    for loss in (ours(reduction=reduction), theirs(reduction=reduction)):
        trainer = make_trainer(
            loss, dtype, clip_norm=1.0, jit_compile=isinstance(loss, fa.LinearCrossEntropy)
        )
        history = trainer.fit(
            x, y, sample_weight=sample_weight, batch_size=B, shuffle=False, verbose=0
        ).history
        evaluated = trainer.evaluate(x, y, sample_weight=sample_weight, batch_size=B, verbose=0)
        outcomes.append((history["loss"][0], evaluated, trainer.model.get_weights()))
    (loss, evaluated, got), (their_loss, their_evaluated, expected) = outcomes
    # The head's kernel is rounded to float16 in ours, not in theirs.
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    np.testing.assert_allclose([loss, evaluated], [their_loss, their_evaluated], rtol=tolerance)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def as_stack(rows):
    return [each.reshape(K, B, T) for each in make_data(rows)]


def test_options_reach_the_loss():
    """Smoothing as Keras's loss of one-hot labels has it, and a z-loss that is felt."""
    x, y = as_stack(K * B)
    y = np.maximum(y, 0)
    one_hot = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

    def loss_of(loss, labels):
        return float(make_trainer(loss, jit_compile=False).train_step((x, labels)).loss)

    expected = loss_of(one_hot, np.eye(V, dtype="float32")[y])
    np.testing.assert_allclose(loss_of(ours(label_smoothing=0.1), y), expected, rtol=1e-5)
    assert loss_of(ours(label_smoothing=0.1, z_loss=0.1), y) > expected + 1


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(ours(), "mixed_float16")


def test_the_program_has_no_logits_and_multiplies_in_float16(trainer):
    stack = as_stack(K * B)
    hlo = trainer.compiler_ir(stack, stage="hlo")
    logits = rf"f(16|32)\[({B},{T}|{B * T}),{V}\]"
    assert not re.search(logits, hlo)
    dots = re.findall(r"= (\w+\[[\d,]+\])\S* dot\((\w+)\[\S* \S+ (\w+)\[", hlo)
    # logits, the gradients of hidden and kernel
    for shape in ((CHUNK, CHUNK), (CHUNK, D), (D, CHUNK)):
        assert ("f32[{},{}]".format(*shape), "f16", "f16") in dots
    control = make_trainer(theirs(), "mixed_float16").compiler_ir(stack, stage="hlo")
    assert re.search(logits, control)


def test_without_xla_and_with_labels_of_a_last_axis_of_one():
    x, y = as_stack(K * B)
    expected = make_trainer(ours()).train_step((x, y))
    got = make_trainer(ours(), jit_compile=False).train_step((x, y[..., np.newaxis]))
    np.testing.assert_allclose(
        [got.loss, got.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-5
    )


def test_the_model_stays_an_ordinary_one(trainer, tmp_path):
    x, y = make_data(8)
    trainer.fit(x, y, batch_size=B, verbose=0)
    head = trainer.model.get_layer("head")
    assert "call" not in vars(head) and head.autocast
    logits = trainer.predict(x, verbose=0)
    assert logits.shape == (8, T, V)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), logits)
    # Keras's own evaluate, with the loss that was saved with the model.
    np.testing.assert_allclose(
        loaded.evaluate(x, y, verbose=0), trainer.evaluate(x, y, batch_size=8, verbose=0), rtol=1e-3
    )


def test_labels_out_of_range_are_named_and_nothing_moves():
    trainer = make_trainer(ours(), jit_compile=False)
    x, y = as_stack(K * B)
    y[1, 2, 3] = V
    before = [w.tobytes() for w in trainer.model.get_weights()]
    with pytest.raises(
        ValueError, match=rf"labels of output 'head': values from 0 to {V} were seen"
    ):
        trainer.train_step((x, y))
    with pytest.raises(ValueError, match="labels of output 'head'"):
        trainer.evaluate(x[0], y[1], verbose=0)
    assert [w.tobytes() for w in trainer.model.get_weights()] == before


@keras.saving.register_keras_serializable("tests")
class Tied(keras.layers.Layer):
    """Logits from the transposed table of an embedding."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    @property
    def kernel(self):
        return keras.ops.transpose(self.embedding.embeddings)

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


class Subclassed(keras.Model):
    """Returns two linear outputs, of which one has the loss; its head is tied to the embedding.

    The model has no graph.
    """

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(V, D)
        self.tied = Tied(self.table, name="tied")
        self.score = keras.layers.Dense(1, name="score")

    def call(self, ids):
        x = self.table(ids)
        return {"score": self.score(x), "next": self.tied(x)}


def test_a_tied_head_of_one_of_several_outputs():
    x, y = as_stack(K * B)
    targets = {"next": y, "score": np.ones((K, B, T, 1), "float32")}
    weights = []
    for loss in (ours(head="tied"), theirs()):
        keras.utils.set_random_seed(2)
        losses = {"next": loss, "score": "mse"}
        trainer = fa.Trainer(Subclassed(), keras.optimizers.SGD(1.0), losses, jit_compile=False)
        trainer.train_step((x, targets))
        weights.append(trainer.model.get_weights())
    for got, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "mixed_bfloat16"]
)
def test_a_step_as_on_a_gpu_is_that_of_keras_own_loss(dtype, monkeypatch):
    """Losses and gradients in one pass, the head a table by rows, with masks, sample weights and
    padded rows.
    """
    monkeypatch.setattr(cross_entropy, "_is_small", lambda head, chunk_size: False)
    one_pass = unittest.mock.Mock(wraps=cross_entropy._one_pass)
    monkeypatch.setattr(cross_entropy, "_one_pass", one_pass)
    x, y = make_data(K * B - 1)
    weights = []
    for loss in (fa.LinearCrossEntropy(), theirs()):
        keras.utils.set_random_seed(1)
        ids = keras.Input((T,), dtype="int32")
        # As KerasHub's: the logits of a table without autocast are float32 whatever the rest
        # computes in.
        table = keras.layers.ReversibleEmbedding(
            V, D, mask_zero=True, reverse_dtype="float32", dtype=dtype
        )
        hidden = keras.layers.Dense(D, activation="tanh", dtype=dtype)(table(ids))
        model = keras.Model(ids, table(hidden, reverse=True))
        options = {"gradient_accumulation_steps": K, "clip_norm": 1.0, "jit_compile": not weights}
        trainer = fa.Trainer(model, keras.optimizers.SGD(1.0), loss, **options)
        with h200.as_on_a_gpu():
            trainer.fit(
                x,
                y,
                sample_weight=make_weights("tokens", len(x)),
                batch_size=B,
                shuffle=False,
                verbose=0,
            )
            evaluated = trainer.evaluate(x, y, batch_size=B, verbose=0)
        weights.append([evaluated, *model.get_weights()])
    assert one_pass.call_count == 1 and one_pass.call_args.args[0].transposed
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for got, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def reversible(layer, dtype, **options):
    keras.utils.set_random_seed(1)
    ids = keras.Input((T,), dtype="int32")
    options = {
        "embeddings_initializer": "normal",
        "reverse_dtype": "float32",
        "dtype": dtype,
        **options,
    }
    table = layer(V, D, mask_zero=True, **options)
    hidden = keras.layers.Dense(D, activation="tanh", dtype=dtype)(table(ids))
    return keras.Model(ids, table(100 * hidden, reverse=True))


@pytest.mark.parametrize(
    ("tie_weights", "dtype", "on_a_gpu"),
    [
        (True, "float32", False),
        (False, "mixed_bfloat16", True),
        pytest.param(True, "float32", True, marks=pytest.mark.slow),
        pytest.param(False, "float32", False, marks=pytest.mark.slow),
        pytest.param(False, "float32", True, marks=pytest.mark.slow),
        pytest.param(False, "mixed_bfloat16", False, marks=pytest.mark.slow),
    ],
)
def test_a_soft_cap(tie_weights, dtype, on_a_gpu, monkeypatch):
    """Caps logits, many of which exceed the cap, with the embedding's own table or another one."""
    monkeypatch.setattr(cross_entropy, "_is_small", lambda head, chunk_size: False)
    x, y = make_data(K * B - 1)
    outcomes = []
    options = {"tie_weights": tie_weights, "logit_soft_cap": 3.0}
    for loss in (fa.LinearCrossEntropy(chunk_size=None if on_a_gpu else CHUNK), theirs()):
        model = reversible(keras.layers.ReversibleEmbedding, dtype, **options)
        logits = keras.ops.convert_to_numpy(model(x))
        assert 2.0 < np.abs(logits).max() < 3.0 and np.median(np.abs(logits)) > 0.3
        trainer = fa.Trainer(
            model, keras.optimizers.SGD(1.0), loss, clip_norm=1.0, jit_compile=not outcomes
        )
        with h200.as_on_a_gpu() if on_a_gpu else contextlib.nullcontext():
            trainer.fit(
                x,
                y,
                sample_weight=make_weights("tokens", len(x)),
                batch_size=B,
                shuffle=False,
                verbose=0,
            )
            outcomes.append([trainer.evaluate(x, y, batch_size=B, verbose=0), *model.get_weights()])
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for got, expected in zip(*outcomes, strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_smoothing_with_a_soft_cap_is_refused():
    x, y = make_data(4)
    model = reversible(keras.layers.ReversibleEmbedding, "float32", logit_soft_cap=3.0)
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1 with soft_cap=3\.0"):
        fa.Trainer(model, "sgd", fa.LinearCrossEntropy(label_smoothing=0.1)).fit(x, y, verbose=0)


def test_it_trains_a_tf_keras_model():
    tf_keras = pytest.importorskip("tf_keras")
    x, y = as_stack(K * B)
    losses = []
    for loss in (ours(), theirs()):
        tf_keras.utils.set_random_seed(3)
        layers = [
            tf_keras.layers.Embedding(V, D, input_length=T),
            tf_keras.layers.Dense(V, name="head"),
        ]
        trainer = fa.Trainer(
            tf_keras.Sequential(layers), tf_keras.optimizers.SGD(1.0), loss, jit_compile=False
        )
        losses.append([float(trainer.train_step((x, y)).loss) for _ in range(2)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_it_is_rebuilt_from_its_configuration():
    loss = fa.LinearCrossEntropy(
        "head",
        ignore_index=3,
        label_smoothing=0.2,
        z_loss=1e-4,
        chunk_size=7,
        reduction="sum",
        name="other",
    )
    config = keras.losses.serialize(loss)
    again = keras.losses.deserialize(config)
    assert isinstance(again, fa.LinearCrossEntropy)
    assert keras.losses.serialize(again) == config
    assert (again.head, again.options["z_loss"], again.chunk_size, again.reduction) == (
        "head",
        1e-4,
        7,
        "sum",
    )


def ends_in(*layers):
    return keras.Sequential(
        [keras.Input((T,), dtype="int32"), keras.layers.Embedding(V, D), *layers]
    )


@pytest.mark.parametrize(
    ("model", "loss", "metrics", "message"),
    [
        (
            lambda: make_model(),
            {},
            [keras.metrics.Accuracy()],
            r"\['accuracy'\] of output 'head' need the logits",
        ),
        (lambda: make_model(), {"head": "haed"}, (), "head='haed' names no layer"),
        (
            lambda: make_model(),
            {"head": "tokens"},
            (),
            r"head 'tokens' \(Embedding\) has kernel shape None",
        ),
        (lambda: ends_in(), {}, (), "finds no Dense layer"),
        (
            lambda: ends_in(keras.layers.Dense(V, activation="softmax", name="p")),
            {},
            (),
            r"head 'p' \(Dense\) has activation='softmax'",
        ),
        (
            lambda: ends_in(keras.layers.Dense(V, name="inner"), keras.layers.ReLU()),
            {},
            (),
            "not what layer 'inner' returns",
        ),
        (
            lambda: ends_in(keras.layers.Dense(D, name="inner"), keras.layers.UpSampling1D(1)),
            {"head": "inner"},
            (),
            "not what layer 'inner' returns",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_named(model, loss, metrics, message):
    trainer = fa.Trainer(model(), "sgd", fa.LinearCrossEntropy(**loss), metrics)
    with pytest.raises(ValueError, match=message):
        trainer.train_step(as_stack(K * B))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"head": 3}, TypeError),
        ({"ignore_index": None}, TypeError),
        ({"label_smoothing": 1.0}, ValueError),
        ({"z_loss": -1.0}, ValueError),
        ({"chunk_size": 0}, ValueError),
        ({"reduction": "median"}, ValueError),
        ({"reduction": []}, TypeError),
        ({"name": 3}, TypeError),
    ],
)
def test_bad_options_are_named(options, error):
    with pytest.raises(error, match=next(iter(options))):
        fa.LinearCrossEntropy(**options)


@pytest.mark.parametrize(
    "labels, logits", [([2], [1, 2, 5]), ([3], [2, 5]), ([2], [2, 0]), ([], []), ([2, 1], [3, 5])]
)
def test_labels_that_do_not_fit_the_logits(labels, logits):
    with pytest.raises(ValueError, match=r"y_pred"):
        fa.LinearCrossEntropy()(np.zeros(labels, "int32"), np.zeros(logits))


class Tempered(keras.layers.Dense):
    def call(self, x):
        return super().call(x) / 10


HIDDEN, CLASSES = 6, 9


def model_with(*ends):
    inputs = keras.Input((HIDDEN,))
    outputs = inputs
    for layer in ends:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def fit(model, loss, metrics=()):
    x = np.random.default_rng(0).normal(size=(4, HIDDEN)).astype("float32")
    fa.Trainer(model, "sgd", loss, metrics).fit(x, np.arange(4), batch_size=2, verbose=0)


def test_logits_that_something_else_reads_are_missed():
    inputs = keras.Input((HIDDEN,))
    logits = keras.layers.Dense(CLASSES, name="lm")(inputs)
    regularised = keras.Model(inputs, keras.layers.ActivityRegularization(l2=1.0)(logits))
    with pytest.raises(ValueError, match=r"'lm'.*(also read by|is not what)"):
        fit(regularised, fa.LinearCrossEntropy("lm"))
    both = keras.Model(inputs, {"lm": logits, "probabilities": keras.layers.Softmax()(logits)})
    losses = {"lm": fa.LinearCrossEntropy(), "probabilities": "sparse_categorical_crossentropy"}
    x, y = np.zeros((4, HIDDEN), "float32"), np.arange(4)
    with pytest.raises(ValueError, match="'lm' are also read by"):
        fa.Trainer(both, "sgd", losses).fit(x, {"lm": y, "probabilities": y}, verbose=0)


def test_a_head_that_computes_something_else_is_refused():
    capped = Tempered(CLASSES, name="head")
    capped.logit_soft_cap = 0.5
    with pytest.raises(ValueError, match="soft cap of its own"):
        fit(model_with(capped), fa.LinearCrossEntropy("head"))
    with pytest.raises(ValueError, match="finds no Dense layer"):
        fit(model_with(Tempered(CLASSES, name="head")), fa.LinearCrossEntropy())
    with pytest.raises(ValueError, match=r"'head' \(Tempered\) does not return"):
        fit(model_with(Tempered(CLASSES, name="head")), fa.LinearCrossEntropy("head"))
    scaled = keras.layers.Dense(CLASSES, name="head")
    model, call = model_with(scaled), scaled.call
    scaled.call = lambda x, training=None: 3 * call(x)
    with pytest.raises(ValueError, match=r"'head' \(Dense\) does not return"):
        fit(model, fa.LinearCrossEntropy())
    transposed = keras.layers.EinsumDense("bc,dc->bd", HIDDEN, name="head")
    with pytest.raises(ValueError, match=r"'head' \(EinsumDense\) does not return"):
        fit(model_with(transposed), fa.LinearCrossEntropy("head"))
    fit(
        model_with(keras.layers.EinsumDense("bc,cd->bd", CLASSES, name="head")),
        fa.LinearCrossEntropy("head"),
    )


def test_one_hot_labels_are_told_apart():
    x = np.zeros((4, 3, HIDDEN), "float32")
    model = keras.Sequential([keras.Input((3, HIDDEN)), keras.layers.Dense(CLASSES)])
    with pytest.raises(ValueError, match="class indices"):
        fa.Trainer(model, "sgd", fa.LinearCrossEntropy()).fit(
            x, np.zeros((4, 3, CLASSES)), verbose=0
        )


def test_a_causal_lm_of_keras_hub_with_a_soft_cap():
    """Trains a causal language model with Gemma 2's soft cap."""
    hub = pytest.importorskip("keras_hub").models
    x, y = make_data(K * B)
    x = {"token_ids": x, "padding_mask": np.ones_like(x)}
    sizes = {
        "vocabulary_size": V,
        "hidden_dim": D,
        "intermediate_dim": 16,
        "head_dim": 4,
        "num_layers": 1,
    }
    outcomes = []
    for loss in (ours(), theirs()):
        keras.utils.set_random_seed(1)
        backbone = hub.GemmaBackbone(
            num_query_heads=2, num_key_value_heads=1, final_logit_soft_cap=1.0, **sizes
        )
        trainer = fa.Trainer(
            hub.GemmaCausalLM(backbone), keras.optimizers.SGD(1.0), loss, jit_compile=False
        )
        trainer.fit(x, y, batch_size=B, shuffle=False, verbose=0)
        outcomes.append(trainer.model.get_weights())
    for got, expected in zip(*outcomes, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def masked_lm(tied=True, dtype="float32", **options):
    """Builds a masked language model with positions and weights as its preprocessor makes them."""
    hub = pytest.importorskip("keras_hub")
    keras.utils.set_random_seed(1)
    sizes = {
        "num_layers": 1,
        "num_heads": 1,
        "hidden_dim": D,
        "intermediate_dim": 8,
        "dropout": 0.0,
    }
    backbone = hub.models.BertBackbone(V, **sizes, max_sequence_length=T, dtype=dtype)
    if tied and not options:
        model = hub.models.BertMaskedLM(backbone)
    else:
        table = {"token_embedding": backbone.token_embedding} if tied else {"vocabulary_size": V}
        head = hub.layers.MaskedLMHead(**table, **options, dtype=dtype, name="mlm_head")
        positions = keras.Input((2,), dtype="int32", name="mask_positions")
        logits = head(backbone.output["sequence_output"], positions)
        model = keras.Model({**backbone.input, "mask_positions": positions}, logits)
    rng, rows = np.random.default_rng(0), 2 * B + 1
    ids, weights = rng.integers(1, V, (rows, T)), np.arange(2) < rng.integers(1, 3, (rows, 1))
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    x["mask_positions"] = np.stack([rng.choice(T, 2, replace=False) for _ in ids]) * weights
    return model, x, rng.integers(0, V, (rows, 2)) * weights, weights.astype("float32")


@pytest.mark.parametrize(
    ("tied", "dtype"), [(True, "float32"), (False, "float32"), (True, "mixed_bfloat16")]
)
def test_a_masked_lm_of_keras_hub(tied, dtype):
    """Loss, accuracy, evaluation and weights are those of Keras's loss, which has the logits."""
    outcomes = []
    for loss in (ours(), theirs()):
        model, *data = masked_lm(tied, dtype)
        options = {
            "weighted_metrics": ["accuracy"],
            "gradient_accumulation_steps": 2,
            "jit_compile": False,
        }
        trainer = fa.Trainer(model, keras.optimizers.SGD(1.0), loss, **options)
        history = trainer.fit(
            *data[:2], sample_weight=data[2], batch_size=B, shuffle=False, verbose=0
        ).history
        evaluated = trainer.evaluate(*data[:2], sample_weight=data[2], batch_size=B, verbose=0)
        outcomes.append([*history.values(), *evaluated, *model.get_weights()])
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for got, expected in zip(*outcomes, strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_a_masked_lm_holds_no_logits():
    model, x, y, _ = masked_lm()
    trainer = fa.Trainer(model, "sgd", ours())
    hlo = trainer.compiler_ir(
        tuple(keras.tree.map_structure(lambda t: t[None, :8], each) for each in (x, y)), stage="hlo"
    )
    assert not re.search(rf"f32\[(8,2|16),{V}\]", hlo) and re.search(
        rf"f32\[{CHUNK},{CHUNK}\]", hlo
    )


def test_a_masked_lm_whose_head_returns_probabilities_is_refused():
    model, x, y, _ = masked_lm(activation="softmax")
    with pytest.raises(ValueError, match=r"'mlm_head' \(MaskedLMHead\) has activation='softmax'"):
        fa.Trainer(model, "sgd", fa.LinearCrossEntropy()).fit(x, y, verbose=0)
