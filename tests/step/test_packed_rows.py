"""Training on packed rows: an update equals that on the documents, each in a row of its own."""

import documents_alone
import keras
import numpy as np
import pytest
import tensorflow as tf
from documents_alone import update_error

import fastaccum as fa

layers = keras.layers
ops = keras.ops
VOCABULARY, WIDTH, LENGTH = 16, 8, 12
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RNG = np.random.default_rng(0)
# Of one token, of a whole row, of more; rows that are full and that are not.
DOCUMENTS = [
    RNG.integers(1, VOCABULARY, length).astype("int32") for length in (4, 1, 7, 12, 3, 2, 17, 5)
]


class Positions(layers.Layer):
    """Token and position embeddings, as examples of keras.io have them."""

    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(VOCABULARY, WIDTH)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, ids):
        return self.tokens(ids) + self.places(ops.arange(ops.shape(ids)[-1]))


class Attention(layers.Layer):
    """Code of one's own around `keras.ops.dot_product_attention`."""

    def build(self, shape):
        self.qkv = layers.Dense(3 * WIDTH)
        self.qkv.build(shape)

    def call(self, x):
        batch, length = ops.shape(x)[:2]
        qkv = ops.reshape(self.qkv(x), (batch, length, 6, WIDTH // 2))
        q, k, v = ops.split(qkv, 3, axis=2)
        return ops.reshape(
            ops.dot_product_attention(q, k, v, is_causal=True), (batch, length, WIDTH)
        )


def blocks(attend, depth=2, embed=None):
    """A transformer of Keras's layers."""
    ids = keras.Input((None,), dtype="int32")
    x = (embed or layers.Embedding(VOCABULARY, WIDTH))(ids)
    for _ in range(depth):
        x = x + attend()(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH, "gelu")(layers.LayerNormalization()(x))
    return keras.Model(ids, layers.Dense(VOCABULARY)(x))


def multi_head(**options):
    """Causal self-attention of Keras's layer."""
    options = {"use_causal_mask": True, **options}

    def attend():
        layer = layers.MultiHeadAttention(2, WIDTH // 2)
        return lambda x: layer(x, x, **options)

    return attend


def grouped():
    layer = layers.GroupQueryAttention(WIDTH // 2, 2, 1)
    return lambda x: layer(x, x, use_causal_mask=True)


def with_lora():
    model = blocks(multi_head())
    for layer in model.layers:
        if isinstance(layer, layers.Dense):
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(np.full(layer.lora_kernel_b.shape, 0.1))
    return model


def gpt(**options):
    return fa.gpt(VOCABULARY, LENGTH, WIDTH, 2, 2, **options)


MODELS = {
    "multi-head": lambda: blocks(multi_head()),
    "bidirectional": lambda: blocks(multi_head(use_causal_mask=False)),
    "grouped": lambda: blocks(grouped),
    "dot_product_attention": lambda: blocks(Attention),
    "learned positions": lambda: blocks(multi_head(), embed=Positions()),
    "lora": with_lora,
    "fa.gpt": gpt,
    "fa.gpt, learned positions": lambda: gpt(positions="learned"),
    "fa.gpt, stacked": lambda: gpt(stacked=True),
}


def expected_update(model):
    return documents_alone.expected_update(model, DOCUMENTS, LENGTH)


def trainer_of(model, rows, loss=LOSS, **options):
    options = {"gradient_accumulation_steps": rows, **options}
    return fa.Trainer(model, keras.optimizers.SGD(documents_alone.RATE), loss, **options)


def rows_of(documents=DOCUMENTS):
    dataset = fa.pack(documents, LENGTH)
    return dataset, len(list(dataset))


def weights_of(model):
    return [variable.numpy() for variable in model.trainable_variables]


def some_slow(names, quick=(), sample=()):
    """Parameters of which those not in `quick` are slow, and run in CI if they are in `sample`."""
    parameters = []
    for name in names:
        marks = [] if name in quick else [pytest.mark.slow]
        if name in sample:
            marks.append(pytest.mark.sample)
        parameters.append(pytest.param(name, marks=marks, id=str(name)))
    return parameters


@pytest.mark.parametrize("name", some_slow(MODELS, ("learned positions",), ("fa.gpt, stacked",)))
def test_an_update_is_that_of_the_documents_alone(name):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    before = weights_of(model)
    expected, loss = expected_update(model)
    rows, count = rows_of()
    logs = trainer_of(model, count).fit(rows.batch(1), verbose=0).history
    assert update_error(before, expected, model) < 2e-5
    assert logs["loss"][0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": fa.LinearCrossEntropy()},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"jit_compile": False},
                {"scan_layers": True},
                {"flash_attention": True},
                {"flash_attention": False},
                {"remat": True},
            )
        ),
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_the_trainer_keep_documents_apart(options):
    keras.utils.set_random_seed(0)
    model = blocks(multi_head(), embed=Positions())
    before = weights_of(model)
    expected, _ = expected_update(model)
    rows, count = rows_of()
    options = {**options}
    if options.pop("remat", False):
        fa.remat(model)
    trainer_of(model, count, **options).fit(rows.batch(1), verbose=0)
    assert update_error(before, expected, model) < 2e-5


@pytest.mark.parametrize("batch_size", some_slow([1, 2, 3], [2]))
def test_rows_in_micro_batches_of_any_size_make_the_same_update(batch_size):
    keras.utils.set_random_seed(0)
    model = blocks(multi_head(), depth=1)
    before = weights_of(model)
    expected, _ = expected_update(model)
    rows, count = rows_of()
    trainer_of(model, -(-count // batch_size), jit_compile=False).fit(
        rows.batch(batch_size), verbose=0
    )
    assert update_error(before, expected, model) < 2e-5


def test_weights_and_metrics_count_tokens():
    keras.utils.set_random_seed(0)
    model = blocks(multi_head(), depth=1)
    examples = [(d, np.roll(d, -1), np.linspace(0, 2, len(d)).astype("float32")) for d in DOCUMENTS]
    losses, hits, weighted_hits, weights = [], [], [], []
    for x, y, weight in examples:
        for start in range(0, len(x), LENGTH):
            part = slice(start, start + LENGTH)
            logits = model(x[None, part]).numpy()[0]
            losses += (
                keras.losses.sparse_categorical_crossentropy(y[part], logits, from_logits=True)
                .numpy()
                .tolist()
            )
            hits += (logits.argmax(-1) == y[part]).tolist()
            weights += weight[part].tolist()
    weighted_hits = np.dot(hits, weights) / np.sum(weights)
    trainer = fa.Trainer(
        model,
        keras.optimizers.SGD(0.1),
        LOSS,
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
    )
    logs = trainer.evaluate(fa.pack(examples, LENGTH).batch(2), return_dict=True, verbose=0)
    assert logs["loss"] == pytest.approx(np.dot(losses, weights) / len(losses), rel=1e-5)
    assert logs["accuracy"] == pytest.approx(np.mean(hits), rel=1e-5)
    assert logs["weighted"] == pytest.approx(weighted_hits, rel=1e-5)


def train_with(monkeypatch, change):
    """The error of an update on rows that `change` has spoiled, past the check of the model."""
    keras.utils.set_random_seed(0)
    model = blocks(multi_head(), depth=1, embed=Positions())
    before = weights_of(model)
    expected, _ = expected_update(model)
    rows, count = rows_of()
    trainer = trainer_of(model, count, jit_compile=False)
    monkeypatch.setattr("fastaccum.step.document_check.require_documents_apart", lambda *_: None)
    trainer.fit(rows.map(change).batch(1), verbose=0)
    return update_error(before, expected, model)


def test_the_control_passes(monkeypatch):
    assert train_with(monkeypatch, lambda x, y: (x, y)) < 2e-5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x._replace(documents=tf.ones_like(x.documents)),  # segments left out
        lambda x: x._replace(positions=tf.range(LENGTH)),  # positions that go on
        lambda x: x._replace(predicts=x.documents > 0),  # a target across a boundary
    ],
    ids=["segments", "positions", "targets"],
)
def test_wrong_rows_make_another_update(monkeypatch, spoil):
    assert train_with(monkeypatch, lambda x, y: (spoil(x), y)) > 1e-3


def test_a_mean_of_means_of_rows_is_another_update():
    keras.utils.set_random_seed(0)
    model = blocks(multi_head(), depth=1, embed=Positions())
    before = weights_of(model)
    expected, _ = expected_update(model)
    rows, count = rows_of()
    total = [0.0] * len(before)
    trainer = trainer_of(model, 1, jit_compile=False)
    for x, y in rows.batch(1):
        for variable, weight in zip(model.trainable_variables, before, strict=True):
            variable.assign(weight)
        trainer.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
        for i, weight in enumerate(weights_of(model)):
            total[i] = total[i] + (weight - before[i]) / count
    for variable, weight, update in zip(model.trainable_variables, before, total, strict=True):
        variable.assign(weight + update)
    assert update_error(before, expected, model) > 1e-3


class OwnAttention(layers.Layer):
    def build(self, shape):
        self.query = layers.Dense(WIDTH)
        self.query.build(shape)

    def call(self, x):
        return ops.softmax(self.query(x) @ ops.transpose(x, (0, 2, 1))) @ x


class Gated(layers.Layer):
    """Lets other tokens in by a gate that is 0 before the training."""

    def build(self, shape):
        self.gate = self.add_weight((), initializer="zeros")

    def call(self, x):
        return x + self.gate * ops.mean(x, axis=1, keepdims=True)


class Shifted(layers.Layer):
    def call(self, x):
        return ops.roll(x, 1, axis=1)


class Table(layers.Layer):
    """Positions of its own, which are 0 before the training."""

    def build(self, shape):
        self.table = self.add_weight((LENGTH, WIDTH), initializer="zeros")

    def call(self, x):
        return x + self.table[: ops.shape(x)[1]]


class Waves(layers.Layer):
    def call(self, x):
        return x + ops.sin(ops.arange(ops.shape(x)[1], dtype="float32"))[None, :, None]


MIXING = {
    "LSTM": lambda: layers.LSTM(WIDTH, return_sequences=True),
    "GRU": lambda: layers.GRU(WIDTH, return_sequences=True),
    "SimpleRNN": lambda: layers.SimpleRNN(WIDTH, return_sequences=True),
    "Conv1D": lambda: layers.Conv1D(WIDTH, 3, padding="same"),
    "Conv1D, causal": lambda: layers.Conv1D(WIDTH, 2, padding="causal"),
    "Conv1D, dilated": lambda: layers.Conv1D(WIDTH, 2, padding="causal", dilation_rate=5),
    "DepthwiseConv1D": lambda: layers.DepthwiseConv1D(3, padding="same"),
    "AveragePooling1D": lambda: layers.AveragePooling1D(3, 1, padding="same"),
    "MaxPooling1D": lambda: layers.MaxPooling1D(3, 1, padding="same"),
    "BatchNormalization": lambda: layers.BatchNormalization(),
    "GroupNormalization": lambda: layers.GroupNormalization(2),
    "Attention": lambda: lambda x: layers.Attention()([x, x]),
    "AdditiveAttention": lambda: lambda x: layers.AdditiveAttention()([x, x]),
    "GlobalAveragePooling1D": lambda: (
        lambda x: x + layers.Reshape((1, WIDTH))(layers.GlobalAveragePooling1D()(x))
    ),
    "OwnAttention": OwnAttention,
    "Gated": Gated,
    "Shifted": Shifted,
}


def refusal_of(make):
    """The error of a fit of a model with one layer between, which moved no weight."""
    keras.utils.set_random_seed(0)
    model = blocks(make, depth=1)
    before = weights_of(model)
    with pytest.raises(ValueError, match="packed rows") as raised:
        trainer_of(model, 2).fit(rows_of()[0].batch(1), verbose=0)
    for weight, variable in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(weight, variable.numpy())
    return str(raised.value)


@pytest.mark.parametrize(
    "name", some_slow(MIXING, ("LSTM", "Conv1D", "GlobalAveragePooling1D", "Gated"))
)
def test_a_layer_that_mixes_documents_is_refused_by_name(name):
    message = refusal_of(MIXING[name])
    kind = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell"}
    name = name.partition(",")[0]
    assert f"({kind.get(name, name)}) lets tokens of a row's documents see one another" in message


@pytest.mark.parametrize("kind", [Table, Waves])
def test_a_layer_that_computes_by_places_in_the_row_is_refused_by_name(kind):
    message = refusal_of(kind)
    assert f"({kind.__name__}) computes by the place of a token in its row" in message


class WithOwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight)


def with_activity_regularizer():
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(ids)
    x = layers.Dense(WIDTH, activity_regularizer="l2")(x)
    return keras.Model(ids, layers.Dense(VOCABULARY)(x))


def with_own_loss():
    model = blocks(multi_head(), depth=1)
    return WithOwnLoss(model.input, model.output)


@pytest.mark.parametrize(
    ("make", "loss", "message"),
    [
        (with_own_loss, LOSS, "overrides compute_loss"),
        (with_activity_regularizer, LOSS, "add losses, which are means over rows"),
        (
            lambda: blocks(multi_head(), depth=1),
            lambda y_true, y_pred: tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
            ),
            "no sum over tokens",
        ),
    ],
)
def test_what_counts_rows_is_refused(make, loss, message):
    model = make()
    before = weights_of(model)
    with pytest.raises(ValueError, match=message):
        trainer_of(model, 2, loss=loss).fit(rows_of()[0].batch(1), verbose=0)
    for weight, variable in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(weight, variable.numpy())


def test_dropout_and_rotary_positions_are_no_reason_to_refuse():
    ids = keras.Input((None,), dtype="int32")
    x = layers.Dropout(0.5)(layers.Embedding(VOCABULARY, WIDTH)(ids))
    x = layers.MultiHeadAttention(2, WIDTH, dropout=0.5)(x, x, use_causal_mask=True)
    model = keras.Model(ids, layers.Dense(VOCABULARY)(x))
    logs = trainer_of(model, 2).fit(rows_of()[0].batch(1), verbose=0).history
    assert np.isfinite(logs["loss"][0])


@pytest.mark.slow
@pytest.mark.sample
def test_rows_of_one_document_each_change_nothing():
    """Rows that one document fills are those of a dataset that was not packed."""
    documents = [RNG.integers(1, VOCABULARY, LENGTH).astype("int32") for _ in range(4)]
    examples = [(d, np.roll(d, -1)) for d in documents]
    results = []
    for packed in (True, False):
        keras.utils.set_random_seed(0)
        model = blocks(multi_head(), depth=1)
        plain = tf.data.Dataset.from_tensor_slices(
            tuple(map(np.stack, zip(*examples, strict=True)))
        )
        data = fa.pack(examples, LENGTH) if packed else plain
        trainer_of(model, 2, jit_compile=False).fit(data.batch(2), verbose=0)
        results.append(weights_of(model))
    for weight, other in zip(*results, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


class Killed(Exception):
    pass


@pytest.mark.parametrize("seed", some_slow([None, 0], sample=[0]))
def test_a_training_is_resumed_bit_for_bit(tmp_path, seed):
    def run(directory, kill_after=None):
        keras.utils.set_random_seed(0)
        model = blocks(multi_head(), depth=1)
        trainer = fa.Trainer(
            model,
            keras.optimizers.Adam(0.01),
            LOSS,
            gradient_accumulation_steps=2,
            jit_compile=False,
        )

        def kill(batch, logs):
            batches.append(batch)
            if batch == kill_after:
                raise Killed

        trainer.fit(
            fa.pack(DOCUMENTS, LENGTH, seed=seed).batch(1),
            epochs=2,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=kill)],
            checkpoint_dir=directory,
            checkpoint_every=1,
        )
        return weights_of(model)

    batches = []
    whole = run(tmp_path / "whole")
    of_whole = len(batches)
    with pytest.raises(Killed):
        run(tmp_path / "parts", kill_after=1)
    batches.clear()
    resumed = run(tmp_path / "parts")
    assert len(batches) < of_whole  # it did not begin again
    for weight, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.slow
@pytest.mark.sample
def test_half_precision_differs_by_its_rounding():
    errors = {}
    for policy in ("float32", "mixed_bfloat16"):
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        try:
            model = blocks(multi_head(), embed=Positions())
        finally:
            keras.config.set_dtype_policy("float32")
        before = weights_of(model)
        if policy == "float32":
            expected, _ = expected_update(model)
        rows, count = rows_of()
        trainer_of(model, count, jit_compile=False).fit(rows.batch(1), verbose=0)
        errors[policy] = update_error(before, expected, model)
    assert errors["float32"] < 2e-5
    assert errors["mixed_bfloat16"] < 0.05


class Latents(layers.Layer):
    """Tokens that attend to learned latents, which belong to no document."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2)

    def build(self, shape):
        self.latents = self.add_weight((1, 3, WIDTH), initializer="normal")
        self.attention.build(shape, (None, 3, WIDTH))

    def call(self, x):
        return self.attention(x, ops.tile(self.latents, (ops.shape(x)[0], 1, 1)))


def test_tokens_may_attend_to_what_belongs_to_no_document():
    keras.utils.set_random_seed(0)
    model = blocks(Latents, depth=1)
    before = weights_of(model)
    expected, _ = expected_update(model)
    rows, count = rows_of()
    trainer_of(model, count, jit_compile=False).fit(rows.batch(1), verbose=0)
    assert update_error(before, expected, model) < 2e-5


class Count(keras.metrics.Metric):
    """Counts elements, those that pad too."""

    def __init__(self):
        super().__init__(name="count")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.cast(ops.size(y_true), "float32"))

    def result(self):
        return self.total


def test_a_metric_that_may_count_padding_is_refused():
    model = blocks(multi_head(), depth=1)
    trainer = trainer_of(model, 2, metrics=[Count()], jit_compile=False)
    with pytest.raises(ValueError, match="the metric 'count' does not count by token"):
        trainer.fit(rows_of()[0].batch(1), verbose=0)


def cross_entropy(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def with_penalty(y, p):
    return cross_entropy(y, p) + ops.mean(ops.square(p - ops.roll(p, 1, axis=1)), -1)


def by_place(y, p):
    return cross_entropy(y, p) * ops.linspace(1.0, 0.0, ops.shape(y)[1])


def of_row_mean(y, p):
    loss = cross_entropy(y, p)
    return loss / ops.mean(loss, -1, keepdims=True)


def of_real_share(y, p):
    """The mean over the tags that are not 0, as for a document alone."""
    is_real = ops.cast(y > 0, "float32")
    return cross_entropy(y, p) * is_real / ops.mean(is_real, -1, keepdims=True)


def first_twice(y, p):
    loss = cross_entropy(y, p)
    return ops.concatenate([2 * loss[:, :1], loss[:, 1:]], 1)


def of_rows(y, p):
    return ops.mean(cross_entropy(y, p), -1)


def small_mean(y, p):
    return 1e-3 * of_row_mean(y, p)


MIXING_LOSSES = {
    small_mean: "lets tokens of a row's documents see one another",
    with_penalty: "lets tokens of a row's documents see one another",
    by_place: "computes by the place of a token",
    of_row_mean: "lets tokens of a row's documents see one another",
    of_real_share: "lets tokens of a row's documents see one another",
    first_twice: "computes by the place of a token",
    of_rows: "This failed: A mask of padding",
}


def in_pairs(y, p):
    loss = cross_entropy(y, p)
    return loss * ops.roll(loss, 1, axis=1)


class MeanOfRows(keras.metrics.Mean):
    """A mean of rows' means."""

    def update_state(self, y, p, sample_weight=None):
        loss = cross_entropy(y, p)
        weight = ops.ones_like(loss) if sample_weight is None else sample_weight
        super().update_state(ops.sum(loss * weight, -1) / (ops.sum(weight, -1) + 1e-7))


class OwnMean(keras.metrics.Mean):
    """A mean over tokens, by code of one's own."""

    def update_state(self, y, p, sample_weight=None):
        super().update_state(cross_entropy(y, p), sample_weight)


def refusal_by_loss(loss=LOSS, **options):
    keras.utils.set_random_seed(0)
    model = blocks(multi_head(), depth=1)
    before = weights_of(model)
    with pytest.raises(ValueError, match="packed rows") as raised:
        options = {"jit_compile": False, **options}
        trainer_of(model, 2, loss=loss, **options).fit(rows_of()[0].batch(1), verbose=0)
    for weight, variable in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(weight, variable.numpy())
    return str(raised.value)


@pytest.mark.parametrize("loss", MIXING_LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_that_does_not_count_by_token_is_refused(loss):
    assert MIXING_LOSSES[loss] in refusal_by_loss(loss)


@pytest.mark.parametrize("metric", [in_pairs, MeanOfRows(name="of_rows"), of_rows])
def test_a_metric_that_does_not_count_by_token_is_refused(metric):
    name = getattr(metric, "name", getattr(metric, "__name__", ""))
    message = refusal_by_loss(metrics=[metric])
    if metric is of_rows:
        assert "This failed" in message and f"metrics: {name!r}" in message
    else:
        assert f"the metric {name!r}" in message


@pytest.mark.parametrize("of_hub", [False, True])
def test_a_metric_of_another_class_that_counts_tokens_is_taken(of_hub):
    keras.utils.set_random_seed(0)
    model = blocks(multi_head(), depth=1)
    metric = OwnMean(name="mean")
    if of_hub:
        keras_hub = pytest.importorskip("keras_hub")
        metric = keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=0, name="mean")
    trainer = trainer_of(model, 2, metrics=[metric], jit_compile=False)
    rows = fa.pack([document[:LENGTH] for document in DOCUMENTS], LENGTH)
    logs = trainer.evaluate(rows.batch(2), return_dict=True, verbose=0)
    losses = []
    for document in DOCUMENTS:
        ids = document[:LENGTH]
        losses += cross_entropy(ids[None, 1:], model(ids[None])[:, :-1]).numpy().ravel().tolist()
    expected = np.exp(np.mean(losses)) if of_hub else np.mean(losses)
    assert logs["mean"] == pytest.approx(expected, rel=1e-5)


class PaddedVocabulary(layers.Layer):
    """Logits of which some are masked out by a large number."""

    def build(self, shape):
        self.head = layers.Dense(VOCABULARY + 8)
        self.head.build(shape)

    def call(self, x):
        is_used = ops.arange(VOCABULARY + 8) < VOCABULARY
        return ops.where(is_used, self.head(x), -1e9)


class WithSideResult(keras.Model):
    """A model whose output is not the last thing that it computes."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(VOCABULARY, WIDTH)
        self.places = Table()
        self.head = layers.Dense(VOCABULARY)
        self.side = layers.Dense(2)

    def call(self, ids):
        x = self.embed(ids)
        logits = self.head(self.places(x))
        self.side(x)
        return logits


def with_masked_logits():
    ids = keras.Input((None,), dtype="int32")
    x = Table()(layers.Embedding(VOCABULARY, WIDTH)(ids))
    return keras.Model(ids, PaddedVocabulary()(x))


class RootOfWeights(layers.Layer):
    """A gate whose weights must stay positive."""

    def build(self, shape):
        self.gate = self.add_weight((4,), initializer=keras.initializers.Constant(0.01))

    def call(self, x):
        return (x + ops.mean(x, 1, keepdims=True)) * ops.sum(ops.sqrt(self.gate))


class InferenceOnly(layers.Layer):
    def call(self, x, training=False):
        return x if training else x - ops.mean(x, 1, keepdims=True)


class TensorFlowNoise(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


HIDDEN = {
    "logits that a mask makes large": (with_masked_logits, "(Table) computes by the place"),
    "a result after the output": (WithSideResult, "(Table) computes by the place"),
    "weights under a root": (
        lambda: blocks(RootOfWeights, depth=1),
        "(RootOfWeights) lets tokens",
    ),
    "in inference alone": (lambda: blocks(InferenceOnly, depth=1), "(InferenceOnly) lets tokens"),
    "random numbers": (
        lambda: blocks(TensorFlowNoise, depth=1),
        "(TensorFlowNoise) draws random numbers that differ from call to call",
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_mixes_documents_is_found_where_it_hides(name):
    make, message = HIDDEN[name]
    keras.utils.set_random_seed(0)
    model = make()
    with pytest.raises(ValueError, match="packed rows") as raised:
        trainer_of(model, 2, jit_compile=False).fit(rows_of()[0].batch(1), verbose=0)
    assert message in str(raised.value)


def test_each_length_of_rows_is_tried_out():
    model = blocks(lambda: layers.Conv1D(WIDTH, 2, padding="causal", dilation_rate=LENGTH), depth=1)
    trainer = trainer_of(model, 2, jit_compile=False)
    trainer.fit(rows_of()[0].batch(1), verbose=0)
    with pytest.raises(ValueError, match="Conv1D"):
        trainer.fit(fa.pack(DOCUMENTS, 3 * LENGTH).batch(1), verbose=0)


class Rotary(keras.Model):
    """Rotary positions of its own, and the embedding's table as the head."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(VOCABULARY, WIDTH)
        self.qkv = layers.Dense(3 * WIDTH)

    def call(self, ids):
        x = self.embed(ids)
        batch, length = ops.shape(ids)
        q, k, v = ops.split(ops.reshape(self.qkv(x), (batch, length, 3, WIDTH)), 3, axis=2)
        angles = ops.arange(length, dtype="float32")[:, None] / 10 ** ops.arange(
            0, WIDTH // 2, dtype="float32"
        )
        sin, cos = ops.sin(angles)[:, None], ops.cos(angles)[:, None]

        def turned(t):
            a, b = ops.split(t, 2, axis=-1)
            return ops.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

        attended = ops.dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + ops.squeeze(attended, 2)
        return x @ ops.transpose(self.embed.embeddings)


class PlacesBy(layers.Layer):
    """Learned positions that are looked up by ids made in some way."""

    def __init__(self, make_ids):
        super().__init__()
        self.make_ids = make_ids
        self.tokens = layers.Embedding(VOCABULARY, WIDTH)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, ids):
        return self.tokens(ids) + self.places(self.make_ids(ids))


PLACES = {
    "tf.range": lambda ids: tf.range(tf.shape(ids)[-1]),
    "an axis of rows": lambda ids: ops.arange(ops.shape(ids)[1])[None],
    "expand_dims": lambda ids: ops.expand_dims(ops.arange(ops.shape(ids)[1]), 0),
    "broadcast_to": lambda ids: ops.broadcast_to(ops.arange(ops.shape(ids)[1]), ops.shape(ids)),
}


@pytest.mark.parametrize(
    "make",
    [
        Rotary,
        *(
            pytest.param(lambda f=f: blocks(multi_head(), 1, PlacesBy(f)), id=name)
            for name, f in PLACES.items()
        ),
    ],
)
def test_positions_of_ones_own_make_the_same_update(make):
    keras.utils.set_random_seed(0)
    model = make()
    model(np.ones((1, LENGTH), "int32"))
    before = weights_of(model)
    expected, _ = expected_update(model)
    rows, count = rows_of()
    trainer_of(model, count, jit_compile=False).fit(rows.batch(1), verbose=0)
    assert update_error(before, expected, model) < 2e-5


def test_rows_that_were_saved_and_loaded_are_packed_rows(tmp_path):
    model = blocks(multi_head(), depth=1)
    trainer = trainer_of(model, 2, jit_compile=False)
    rows, _ = rows_of()
    rows.save(str(tmp_path / "rows"))
    loaded = tf.data.Dataset.load(str(tmp_path / "rows"))
    expected = trainer.evaluate(rows.batch(2), verbose=0)
    assert trainer.evaluate(loaded.batch(2), verbose=0) == expected
    with pytest.raises(ValueError, match=r"one at a time: pass batches of them, x.batch\(8\)"):
        trainer.fit(rows, verbose=0)


def test_a_plan_and_batch_size_auto_take_packed_rows(capsys):
    keras.utils.set_random_seed(0)
    rows, count = rows_of(DOCUMENTS * 4)
    results = []
    for options in ({}, {"batch_size": "auto", "global_batch_size": count}):
        model = blocks(multi_head(), depth=1)
        model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
        before = weights_of(model)
        trainer = trainer_of(model, count)
        trainer.fit(rows.batch(1), verbose=0, **options)
        results.append(weights_of(model))
    plan = fa.plan(trainer, rows.batch(1), global_batch_size=count)
    assert plan.batch_size * plan.accumulation_steps >= count
    largest = max(np.abs(b - a).max() for a, b in zip(before, results[0], strict=True))
    for weight, other in zip(*results, strict=True):
        assert np.abs(weight - other).max() < 2e-5 * largest


@pytest.mark.slow
@pytest.mark.sample
def test_a_training_goes_on_in_other_pieces(tmp_path):
    """Four micro-batches of one row, then two of two: the same updates to rounding."""
    rows, _ = rows_of(DOCUMENTS * 2)
    rows = rows.take(8)

    def run(folder, batch_size, epochs):
        keras.utils.set_random_seed(0)
        model = blocks(multi_head(), depth=1)
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(0.1, momentum=0.9),
            LOSS,
            gradient_accumulation_steps=4 // batch_size,
            jit_compile=False,
        )
        trainer.fit(rows.batch(batch_size), epochs=epochs, verbose=0, checkpoint_dir=folder)
        return weights_of(model)

    whole = run(tmp_path / "whole", 1, 3)
    run(tmp_path / "parts", 1, 1)
    for weight, other in zip(whole, run(tmp_path / "parts", 2, 3), strict=True):
        np.testing.assert_allclose(weight, other, atol=1e-5)


def test_a_metric_with_the_name_of_a_share_is_refused():
    metric = keras.metrics.SparseCategoricalAccuracy(name="real_tokens")
    trainer = trainer_of(blocks(multi_head(), depth=1), 2, metrics=[metric], jit_compile=False)
    with pytest.raises(ValueError, match="called 'real_tokens'"):
        trainer.fit(rows_of()[0].batch(1), verbose=0)


def test_a_refusal_names_masked_ids_as_the_cause():
    """A query whose keys are all masked is a mean over the whole row, other documents' too."""
    model = blocks(multi_head(), depth=1, embed=layers.Embedding(VOCABULARY, WIDTH, mask_zero=True))
    documents = [np.array([3, 0, 5, 0, 7, 2, 0, 1, 4, 6, 8, 9], "int32")]
    with pytest.raises(ValueError, match="no document may hold that id"):
        trainer_of(model, 1, jit_compile=False).fit(rows_of(documents)[0].batch(1), verbose=0)
    trainer_of(model, 1, jit_compile=False).fit(rows_of()[0].batch(1), verbose=0)


def test_a_row_longer_than_a_table_of_positions_is_refused():
    keras_hub = pytest.importorskip("keras_hub")
    embed = keras_hub.layers.TokenAndPositionEmbedding(VOCABULARY, LENGTH // 2, WIDTH)
    model = blocks(multi_head(), depth=1, embed=embed)
    before = weights_of(model)
    trainer = trainer_of(model, 2, jit_compile=False)
    with pytest.raises(ValueError, match=f"pack rows of at most {LENGTH // 2} tokens"):
        trainer.fit(rows_of()[0].batch(1), verbose=0)
    for weight, variable in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(weight, variable.numpy())
