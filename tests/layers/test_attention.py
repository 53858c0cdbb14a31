"""Fused attention in layers of Keras: against Keras's full batch, mask by mask."""

import contextlib
import functools
import re

import h200
import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels import attention, private
from fastaccum.layers import attention as adapter
from fastaccum.layers.attention_masks import Mask, read_mask

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = [pytest.mark.slow, pytest.mark.long]

TIMES = 24
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Asks(keras.layers.Layer):
    """Calls `keras.ops.dot_product_attention` with one projection."""

    def __init__(self, heads=4, groups=2, mask=None, **options):
        super().__init__()
        self.heads, self.groups, self.mask, self.options = heads, groups, mask, options
        self.query, self.key = keras.layers.Dense(4 * heads), keras.layers.Dense(4 * groups)

    def call(self, x):
        query, key = (
            keras.ops.reshape(dense(x), (-1, x.shape[1], heads, 4))
            for dense, heads in ((self.query, self.heads), (self.key, self.groups))
        )
        mask = None if self.mask is None else self.mask(x)
        output = keras.ops.dot_product_attention(query, key, key, mask=mask, **self.options)
        return keras.ops.reshape(output, (-1, x.shape[1], 4 * self.heads))


def stock(attend, mask_zero=False, times=TIMES, blocks=2):
    """Builds a model of residual blocks; `attend()` makes a function of the embedded tokens."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((times,), dtype="int32")
    x = keras.layers.Embedding(11, 16, mask_zero=mask_zero)(ids)
    for _ in range(blocks):
        x = x + attend()(x)  # Keras hands the mask of padding to the first of them alone
    return keras.Model(ids, keras.layers.Dense(11)(x))


def stock_attention(kind=keras.layers.MultiHeadAttention, causal=False, **options):
    def make():
        sizes = {"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2}
        sizes = (
            sizes if kind is keras.layers.GroupQueryAttention else {"num_heads": 2, "key_dim": 4}
        )
        layer = kind(**sizes | options)
        return lambda x: layer(x, x, use_causal_mask=causal)

    return make


def padded(left=False, times=TIMES):
    """Returns token ids, 0 where a row is padded, and labels."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 11, (8, times), "int32")
    for row, length in zip(x, rng.integers(times // 2, times + 1, 8), strict=True):
        row[length:] = 0
    return (x[:, ::-1].copy() if left else x), rng.integers(0, 11, (8, times), "int32")


def in_keras(model, x, y):
    """Trains Keras's full batch for one update, and returns the weights."""
    model.compile(keras.optimizers.SGD(0.5), LOSS, run_eagerly=True)
    model.fit(x, y, batch_size=len(x), verbose=0)
    return model.get_weights()


def trained(model, x, y, flash_attention=True, **options):
    """Trains one update of two micro-batches, and returns the weights and what was chosen for each
    layer.
    """
    options = {"jit_compile": False, **options}
    trainer = fa.Trainer(
        model,
        keras.optimizers.SGD(0.5),
        LOSS,
        gradient_accumulation_steps=2,
        flash_attention=flash_attention,
        **options,
    )
    trainer.fit(x, y, batch_size=len(x) // 2, shuffle=False, verbose=0)
    fused = trainer._builder.engine.objective.attention
    return model.get_weights(), list(fused.choices.values()) if fused else []


@contextlib.contextmanager
def keras_policy(name):
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def largest_difference(some, others):
    return max(np.abs(a - b).max() for a, b in zip(some, others, strict=True))


def no_row_sees(x):
    """Makes a mask of padding that leaves the first queries of a causal layer without a key."""
    positions = tf.range(x.shape[1])
    return (
        (positions[:, None] >= positions)
        & (positions > 5)[None, None, None, :]
        & (x[:, None, None, :, 0] < 9e9)
    )


CASES = {
    "causal": (stock_attention(causal=True), False),
    "of all": (stock_attention(), False),
    "causal and padded": (stock_attention(causal=True), True),
    "padded": (stock_attention(), True),
    "grouped queries, causal and padded": (
        stock_attention(keras.layers.GroupQueryAttention, causal=True),
        True,
    ),
    "a window, causal and padded": (stock_attention(causal=True, sliding_window=3), True),
    "a window to both sides, padded": (stock_attention(sliding_window=5), True),
    "a window, grouped queries": (
        stock_attention(keras.layers.GroupQueryAttention, sliding_window=9),
        False,
    ),
    "keras.ops, grouped": (lambda: Asks(is_causal=True, scale=0.3), False),
    "keras.ops, some see nothing": (lambda: Asks(4, 4, mask=no_row_sees), False),
}


@functools.cache
def expected(case, left):
    return in_keras(stock(*CASES[case]), *padded(left))


@pytest.mark.parametrize(
    ("case", "left"),
    [
        *((case, False) for case in CASES if case not in ("of all", "causal and padded")),
        pytest.param("of all", False, marks=pytest.mark.slow),
        pytest.param("causal and padded", False, marks=pytest.mark.slow),
        ("causal and padded", True),
        ("a window, causal and padded", True),
        pytest.param("a window to both sides, padded", True, marks=pytest.mark.slow),
        pytest.param("padded", True, marks=pytest.mark.slow),
        pytest.param("grouped queries, causal and padded", True, marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_kerass_full_batch(case, left):
    weights, choices = trained(stock(*CASES[case]), *padded(left))
    assert choices == ["fused: blockwise"] * 2
    assert largest_difference(weights, expected(case, left)) < 2e-7


def test_in_xla_and_mixed_precision_too():
    x, y = padded()
    with keras_policy("mixed_bfloat16"):
        of_layers, _ = trained(stock(stock_attention(causal=True), True), x, y, False)
        fused, choices = trained(stock(stock_attention(causal=True), True), x, y, jit_compile=True)
    whole = expected("causal and padded", False)
    assert choices == ["fused: blockwise"] * 2
    assert largest_difference(fused, whole) < 1.5 * largest_difference(of_layers, whole) + 1e-6


@pytest.mark.parametrize("part", ["after", "keys"])
def test_a_part_of_the_mask_that_is_dropped_is_seen(monkeypatch, part):
    def without_a_part(*arguments, **options):
        return read_mask(*arguments, **options)._replace(**{part: Mask()._asdict()[part]})

    monkeypatch.setattr(adapter, "read_mask", without_a_part)
    weights, _ = trained(stock(*CASES["causal and padded"]), *padded(left=True))
    assert largest_difference(weights, expected("causal and padded", True)) > 1e-4


def test_a_causal_flag_on_an_encoder_is_seen(monkeypatch):
    monkeypatch.setattr(
        adapter, "read_mask", lambda *of, **options: read_mask(*of, **options)._replace(after=0)
    )
    weights, _ = trained(stock(*CASES["padded"]), *padded(left=True))
    assert largest_difference(weights, expected("padded", True)) > 1e-4


def test_a_window_that_is_off_by_one_is_seen(monkeypatch):
    def wider(*arguments, **options):
        found = read_mask(*arguments, **options)
        return found._replace(before=found.before + 1)

    case = "a window, causal and padded"
    monkeypatch.setattr(adapter, "read_mask", wider)
    weights, _ = trained(stock(*CASES[case]), *padded(left=True))
    assert largest_difference(weights, expected(case, True)) > 1e-4


def test_mean_of_all_values_where_nothing_is_seen(monkeypatch):
    """Tests a negative control of the case in which some queries see nothing."""
    fuse = adapter.FusedAttention._fuse
    monkeypatch.setattr(adapter.FusedAttention, "_fuse", lambda *a, **k: (fuse(*a, **k)[0], None))
    weights, _ = trained(stock(*CASES["keras.ops, some see nothing"]), *padded())
    assert largest_difference(weights, expected("keras.ops, some see nothing", False)) > 1e-4


def biased(x):
    return tf.zeros([1, 1, x.shape[1], x.shape[1]])


class Biased(Asks):
    def call(self, x):
        self.options = {"bias": biased(x)}
        return super().call(x)


class Crossed(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def call(self, x):
        return self.attention(x, x[:, :7], use_causal_mask=True)


class Scored(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.5, seed=1)

    def call(self, x):
        return self.attention(x, x, return_attention_scores=True)[0]


def in_fours(x):
    places = tf.range(x.shape[1]) // 4
    return places[:, None] == places


LEFT = {
    "a mask that cannot be read as causal, a window, padding or documents": lambda: Asks(
        mask=in_fours
    ),
    "a bias": Biased,
    "a causal mask of 24 queries and 7 keys": Crossed,
    "a formula of the layer's own": Scored,
    "shapes of query (4, 24, 2, 4), key (4, 24, 2, 4) and value (4, 24, 2, 3)": stock_attention(
        value_dim=3
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_attention_that_kernels_cannot_compute_is_refused(reason):
    with pytest.raises(
        ValueError, match="flash_attention=True: the kernels do not compute the attention of"
    ) as told:
        trained(stock(LEFT[reason]), *padded())
    assert reason in str(told.value) and 'flash_attention="auto"' in str(told.value)


def test_attention_that_kernels_cannot_compute_is_left_to_the_layer(monkeypatch):
    """Calls layers that the kernels cannot compute, one after the other in one model."""

    def every():
        made = [attend() for attend in LEFT.values()]
        return lambda x: functools.reduce(lambda x, layer: x + layer(x), made, x)

    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    plain, _ = trained(stock(every, blocks=1), *padded(), False)
    weights, choices = trained(stock(every, blocks=1), *padded(), "auto")
    assert choices == [f"unfused: {reason}" for reason in LEFT]
    assert largest_difference(weights, plain) == 0


@pytest.mark.parametrize("kind", [keras.layers.Attention, keras.layers.AdditiveAttention])
def test_attention_of_another_kind_is_named_and_left(kind):
    def attend():
        layer = kind()
        return lambda x: layer([x, x])

    plain, _ = trained(stock(attend, blocks=1), *padded(), False)
    weights, choices = trained(stock(attend, blocks=1), *padded(), "auto")
    assert (
        choices == ["unfused: a formula of the layer's own"]
        and largest_difference(weights, plain) == 0
    )
    with pytest.raises(
        ValueError, match="flash_attention=True: the kernels do not compute the attention of"
    ):
        trained(stock(attend, blocks=1), *padded(), True)


DROPPING = functools.partial(stock_attention, dropout=0.3, seed=5)
DROPOUT = {
    "causal and padded": (DROPPING(causal=True), True),
    "grouped queries": (DROPPING(keras.layers.GroupQueryAttention, causal=True), False),
    "padded": (DROPPING(), True),
}


@pytest.mark.parametrize(
    "case",
    [
        name if name == "causal and padded" else pytest.param(name, marks=pytest.mark.slow)
        for name in DROPOUT
    ],
)
def test_dropout_is_that_of_the_unfused_formula_with_the_same_draw(monkeypatch, case):
    def unfused(*tensors, implementation, **options):
        assert implementation == "blockwise"
        return attention(*tensors, implementation="reference", **options)

    x, y = padded()
    weights, choices = trained(stock(*DROPOUT[case]), x, y)
    plain, _ = trained(stock(*DROPOUT[case]), x, y, False)
    monkeypatch.setattr(adapter, "attention", unfused)
    same_draw, _ = trained(stock(*DROPOUT[case]), x, y)
    assert choices == ["fused: blockwise"] * 2
    assert largest_difference(weights, same_draw) < 2e-7
    assert largest_difference(weights, plain) > 1e-4  # Keras draws other numbers


def test_dropout_is_fair():
    """A gradient of 4,000 rows, all alike, is that of Keras's layer to what chance explains."""
    x = np.repeat(np.random.default_rng(0).normal(size=(1, 6, 8)), 4_000, 0).astype("float32")

    def fit(flash_attention, **options):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6, 8))
        model = keras.Model(
            inputs, keras.layers.MultiHeadAttention(2, 4, seed=2, **options)(inputs, inputs)
        )
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(1.0),
            "mse",
            jit_compile=False,
            flash_attention=flash_attention,
        )
        trainer.fit(x, x, batch_size=len(x), verbose=0)
        return model.get_weights()

    fused, plain, undropped = fit(True, dropout=0.5), fit(False, dropout=0.5), fit(False)
    assert 1e-6 < largest_difference(fused, plain) < largest_difference(plain, undropped) / 5


def test_dropout_takes_the_layers_own_seeds_and_is_resumed(tmp_path):
    x, y = padded()

    def fit(epochs, flash_attention=True, **options):
        model = stock(*DROPOUT["causal and padded"])
        trainer = fa.Trainer(
            model,
            "adam",
            LOSS,
            gradient_accumulation_steps=2,
            flash_attention=flash_attention,
            jit_compile=False,
        )
        trainer.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, **options)
        seeds = [
            layer._dropout_layer.seed_generator.state.numpy().tolist()
            for layer in model.layers
            if dropping(layer)
        ]
        return trainer, model.get_weights(), seeds

    def dropping(layer):
        return isinstance(layer, keras.layers.MultiHeadAttention)

    trainer, weights, seeds = fit(2)
    loss = trainer.evaluate(x, y, batch_size=4, verbose=0)
    assert seeds == fit(2, flash_attention=False)[2]  # as many draws as Keras makes
    fit(1, checkpoint_dir=tmp_path)
    _, again, _ = fit(2, checkpoint_dir=tmp_path)
    assert largest_difference(again, weights) == 0
    model = stock(*DROPOUT["causal and padded"])
    model.set_weights(weights)
    model.compile(loss=LOSS)
    # nothing is dropped
    np.testing.assert_allclose(loss, model.evaluate(x, y, batch_size=8, verbose=0), rtol=1e-6)


class Sharpened(keras.layers.MultiHeadAttention):
    """Attention with a scale of its own, as muP has it."""

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        self._inverse_sqrt_key_dim = 2.0


class Squared(keras.layers.MultiHeadAttention):
    """Attention with weights of its own."""

    def _masked_softmax(self, attention_scores, attention_mask=None):
        return super()._masked_softmax(attention_scores, attention_mask) ** 2


@pytest.mark.parametrize(
    ("kind", "choice"),
    [(Sharpened, "fused: blockwise"), (Squared, "unfused: a formula of the layer's own")],
)
def test_the_own_attention_of_a_subclass_is_computed(monkeypatch, kind, choice):
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    monkeypatch.setattr(adapter, "_SHORT_ON_CPU", 0)
    x, y = padded()
    found = []
    for flash_attention in ("auto", False):
        model = stock(DROPPING(kind))
        trainer = fa.Trainer(model, "sgd", LOSS, flash_attention=flash_attention, jit_compile=False)
        found.append(trainer.evaluate(x, y, batch_size=4, verbose=0))
        if flash_attention == "auto":
            assert [*trainer._builder.engine.objective.attention.choices.values()] == [choice] * 2
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize("times", [24, pytest.param(528, marks=pytest.mark.slow)])
def test_on_a_cpu_dropout_of_few_tokens_is_left_to_the_layer(monkeypatch, times):
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    x, y = padded(times=times)
    weights, choices = trained(stock(DROPPING(), times=times), x, y, "auto")
    left = "unfused: dropout, a window or a soft cap, of 512 tokens at most"
    expected = left if times <= 512 else "fused: blockwise"
    assert choices == [expected] * 2
    if times <= 512:
        assert (
            largest_difference(weights, trained(stock(DROPPING(), times=times), x, y, False)[0])
            == 0
        )


def test_small_scores_are_left_to_the_layer():
    _, choices = trained(stock(stock_attention(causal=True)), *padded(), "auto")
    assert choices == ["unfused: its scores take 0.0176 MiB, less than 256"] * 2


def program_of_512_tokens(attend, flash_attention):
    """Returns what XLA is given, without numbers of functions and places in the source."""
    x, y = (t.reshape(2, 4, -1) for t in padded(times=512))
    keras.backend.clear_session()  # which counts layers of a name
    model = stock(attend, True, 512)
    trainer = fa.Trainer(
        model, "sgd", LOSS, gradient_accumulation_steps=2, flash_attention=flash_attention
    )
    text = trainer.compiler_ir((x, y), stage="stablehlo")
    return re.sub(r"_\d+_", "_", re.sub(r"loc\([^()]*\)", "", text))


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.1, "seed": 1}])
def test_on_a_cpu_the_program_of_512_tokens_is_that_without_fused_attention(options):
    attend = stock_attention(**options)
    assert program_of_512_tokens(attend, "auto") == program_of_512_tokens(attend, False)


def test_another_program_of_512_tokens_is_seen():
    attend = stock_attention(causal=True)
    assert program_of_512_tokens(attend, True) != program_of_512_tokens(attend, False)


class Packed(keras.layers.Layer):
    """Attends within documents of a row, of which an id of 4 or less begins one."""

    def __init__(
        self, compare=keras.ops.equal, swapped=False, padded=False, dtype="int32", **options
    ):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.compare, self.swapped, self.padded = compare, swapped, padded
        self.dtype_of_ids, self.options = dtype, options

    def call(self, x):
        documents = keras.ops.cumsum(keras.ops.cast(x[..., 0] > 0, self.dtype_of_ids), 1) // 4
        of_key, of_query = (keras.ops.expand_dims(documents, axis) for axis in (1, 2))
        mask = self.compare(of_query, of_key) if self.swapped else self.compare(of_key, of_query)
        if self.padded:
            mask = mask & keras.ops.expand_dims(x[..., 1] > x[..., 2], 1)
        return self.attention(x, x, attention_mask=mask, **self.options)


@pytest.mark.parametrize(
    "options",
    [
        {"use_causal_mask": True},
        {},
        {"swapped": True, "dtype": "int64"},
        {"padded": True},
        {"padded": True, "use_causal_mask": True},
    ],
    ids=str,
)
def test_documents_in_a_row_see_themselves_alone(monkeypatch, options):
    """Attends within packed documents, with padding too. A query without a visible key gets 0."""
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    model = functools.partial(stock, functools.partial(Packed, **options))
    whole = in_keras(model(), *padded())
    weights, choices = trained(model(), *padded())
    assert choices == ["fused: blockwise"] * 2
    assert largest_difference(weights, whole) < 2e-7
    # Negative control: the mask dropped is another update.
    make = functools.partial(Packed, lambda a, b: (a == a) & (b == b), **options)
    unmasked, _ = trained(stock(make), *padded(), "auto")
    assert largest_difference(unmasked, whole) > 1e-4


@pytest.mark.parametrize("padding", [False, True])
def test_no_two_documents_of_large_ids_become_one(monkeypatch, padding):
    """Ids of 64 bits need no other id beside them, but for padding, with which they are left to the
    layer.
    """
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)

    def make():
        return Packed(
            lambda a, b: tf.bitwise.left_shift(a, 62) == tf.bitwise.left_shift(b, 62),
            False,
            padding,
            "int64",
        )

    whole = in_keras(stock(make), *padded())
    weights, choices = trained(stock(make), *padded(), "auto")
    reason = (
        "unfused: 64-bit segment ids beside padding, which takes a segment id of its own: cast "
        "the ids to int32"
    )
    assert choices == [reason if padding else "fused: blockwise"] * 2
    assert largest_difference(weights, whole) < 2e-7


@pytest.mark.parametrize(
    "compare", [keras.ops.not_equal, lambda a, b: abs(a - b) < 2], ids=["others", "neighbours"]
)
def test_another_comparison_of_documents_is_left_to_the_layer(monkeypatch, compare):
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    make = functools.partial(Packed, compare)
    whole = in_keras(stock(make), *padded())
    weights, choices = trained(stock(make), *padded(), "auto")
    assert (
        choices
        == ["unfused: a mask that cannot be read as causal, a window, padding or documents"] * 2
    )
    assert largest_difference(weights, whole) < 2e-7


@pytest.mark.slow
@pytest.mark.sample
def test_no_scores_of_all_tokens_are_held(monkeypatch):
    times, scores = 512, "512,512]"
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 2**20)
    x, y = padded(times=times)

    def program(flash_attention):
        model = stock(stock_attention(causal=True), True, times)
        trainer = fa.Trainer(
            model, "sgd", LOSS, gradient_accumulation_steps=2, flash_attention=flash_attention
        )
        found = trainer.summary(x, y, batch_size=4)
        return found, trainer.compiler_ir((x.reshape(2, 4, -1), y.reshape(2, 4, -1)), stage="hlo")

    (unfused, table), (fused, no_table) = program(False), program("auto")
    assert scores in table and scores not in no_table
    assert fused.memory.peak_bytes < unfused.memory.peak_bytes / 2
    assert set(fused.attention.values()) == {"fused: blockwise"} and not unfused.attention
    assert "attention, layers: 2" in str(fused)


@pytest.mark.slow
@pytest.mark.parametrize(("mask_zero", "bias"), [(False, ""), (True, "ScaleBias")])
def test_a_gpus_program_calls_cudnn_once_each_way(mask_zero, bias):
    """Compiles for an H200 and runs nothing.

    Padding is a mask that is added, and causal attention has none.
    """
    x, y = (t.reshape(2, 4, -1) for t in padded(times=128))
    with keras_policy("mixed_bfloat16"):
        model = stock(stock_attention(causal=True, key_dim=64), mask_zero, 128)
    trainer = fa.Trainer(model, "sgd", LOSS, gradient_accumulation_steps=2)
    hlo, _ = h200.compile_for_h200(h200.export_step(trainer, (x, y)))
    called = re.findall(r'custom_call_target="(__cudnn.*?)"', hlo)
    assert sorted(called) == sorted(
        f"__cudnn$fmha{kind}Softmax{way}" for kind in (bias, "") for way in ("", "Backward")
    )
    assert set(re.findall(r'"mask_type": ?"(\w+)"', hlo)) == {"CAUSAL"}


@pytest.mark.slow
@pytest.mark.parametrize("mask_zero", [False, True])
@pytest.mark.parametrize(("policy", "forward"), [("nothing_saveable", 5), (["attention"], 3)])
def test_recomputed_blocks_call_cudnn_on_a_gpu(policy, forward, mask_zero):
    """Calls cuDNN once more in the backward pass, unless attention's output is kept.

    The last block is not recomputed.
    """
    x, y = (t.reshape(2, 4, -1) for t in padded(times=512))
    with keras_policy("mixed_bfloat16"):
        model = stock(stock_attention(causal=True, key_dim=64), mask_zero, 512, blocks=3)
    trainer = fa.Trainer(fa.remat(model, policy), "sgd", LOSS, gradient_accumulation_steps=2)
    hlo, _ = h200.compile_for_h200(h200.export_step(trainer, (x, y)))
    called = re.findall(r'custom_call_target="__cudnn\$fmha(?:ScaleBias)?Softmax(Backward)?"', hlo)
    assert (called.count(""), called.count("Backward")) == (forward, 3)


def test_a_layer_that_is_called_twice_has_both_choices(monkeypatch):
    class Twice(Crossed):
        def call(self, x):
            return self.attention(x, x) + self.attention(x, x[:, :7], use_causal_mask=True)

    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    x, y = padded()
    plain, _ = trained(stock(Twice), x, y, False)
    weights, choices = trained(stock(Twice), x, y, "auto")
    assert choices == ["fused: blockwise; unfused: a causal mask of 24 queries and 7 keys"] * 2
    assert largest_difference(weights, plain) < 2e-7


class Penalised(keras.Model):
    """Adds the squared gradient of its output by its input, which takes second derivatives."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = keras.layers.MultiHeadAttention(2, 4), keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.attention(x, x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(self(x))
        return tf.reduce_mean(y_pred**2) + tf.reduce_mean(tape.gradient(total, x) ** 2)


def test_second_derivatives_of_a_models_own_loss(monkeypatch):
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    x = np.random.default_rng(0).normal(size=(8, 6, 4)).astype("float32")

    def fit(flash_attention):
        keras.utils.set_random_seed(1)
        model = Penalised()
        fa.Trainer(model, "sgd", jit_compile=False, flash_attention=flash_attention).fit(
            x, batch_size=8, verbose=0
        )
        return model.get_weights()

    assert largest_difference(fit("auto"), fit(False)) == 0
    with pytest.raises(Exception, match=r"no second derivatives.*flash_attention=False"):
        fit(True)


def test_a_layer_with_the_name_of_one_of_keras_hub(monkeypatch):
    class LlamaAttention(Crossed):
        def _compute_attention(self, query, key, value, attention_mask=None):
            return query + value

        def call(self, x):
            return self._compute_attention(x, x, x)

    LlamaAttention.__module__, LlamaAttention.__qualname__ = (
        "llama.llama_attention",
        "LlamaAttention",
    )
    monkeypatch.setattr(adapter, "_SMALL_ON_CPU", 0)
    _, choices = trained(stock(LlamaAttention), *padded(), "auto")
    assert choices == ["unfused: a formula of the layer's own"] * 2


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (
            stock_attention(flash_attention=True),
            "Flash attention is not supported in tensorflow backend",
        ),
        (
            lambda: Asks(attn_logits_soft_cap=2.0),
            "attn_logits_soft_cap is only supported for JAX on TPU",
        ),
    ],
)
def test_what_keras_refuses_on_tensorflow_raises_as_in_keras(attend, message):
    with pytest.raises(ValueError, match=message):
        trained(stock(attend), *padded(), "auto")


def test_arguments_by_position():
    class ByPosition(Asks):
        def call(self, x):
            query = keras.ops.reshape(self.query(x), (-1, x.shape[1], 4, 4))
            if isinstance(query, keras.KerasTensor):
                return x
            output = private.nn.dot_product_attention(query, query, query, None, None, 0.5)
            return keras.ops.reshape(output, (-1, x.shape[1], 16))

    plain, _ = trained(stock(ByPosition), *padded(), False)
    weights, choices = trained(stock(ByPosition), *padded())
    assert choices == ["fused: blockwise"] * 2 and largest_difference(weights, plain) < 2e-7


# The masks themselves.


def positions(times=6):
    return tf.range(times)


def numbers(padding):
    """Returns padding as integers, some of which are negative, or larger than 1."""
    return tf.where(padding, 2, -1)[:, None, None]


def of_hub(padding, times=6):
    """Makes the mask of a KerasHub decoder: a causal one of floats, and padding, joined as
    integers.
    """
    i = tf.range(times, dtype=tf.float32) + tf.cast(0, tf.float32)
    causal = tf.broadcast_to(
        (i[:, None] >= tf.range(times, dtype=tf.float32))[None], (2, times, times)
    )
    joined = keras.ops.minimum(keras.ops.cast(padding[:, None], "int32"), causal)
    return keras.ops.cast(keras.ops.expand_dims(joined, 1), "bool")


HELD = tf.constant(np.tri(6, dtype=bool))  # as by a layer
MASKS = {
    "of KerasHub": (of_hub, (None, 0, False, True)),
    "band_part": (
        lambda p: tf.linalg.band_part(tf.ones([6, 6], tf.bool), -1, 0),
        (None, 0, False, False),
    ),
    "a band": (lambda p: tf.linalg.band_part(tf.ones([6, 6], tf.bool), 3, 1), (3, 1, False, False)),
    "a band of pairs": (
        lambda p: abs(positions()[:, None] - positions()) < 3,
        (2, 2, False, False),
    ),
    "a number before distances": (
        lambda p: keras.ops.greater(3, abs(positions()[:, None] - positions())),
        (2, 2, False, False),
    ),
    "a scalar tensor before distances": (
        lambda p: keras.ops.less_equal(tf.constant(-1), positions()[:, None] - positions()),
        (None, 1, False, False),
    ),
    "a scalar input before distances": (
        lambda p: tf.reduce_sum(tf.cast(p, tf.int32)) > positions()[:, None] - positions(),
        None,
    ),
    "keys without an axis of queries": (
        lambda p: (positions()[:, None] >= 0) & (positions() < 3),
        None,
    ),
    "of a loop": (lambda p: tf.map_fn(tf.identity, positions()[:, None] >= positions()), None),
    "a window of KerasHub's Mistral": (
        lambda p: (
            tf.minimum(
                tf.cast(positions()[:, None] < positions() + 3, tf.int32), np.tri(6, dtype="int32")
            )
            > 0
        ),
        (2, 0, False, False),
    ),
    "two bands": (
        lambda p: (
            (positions()[:, None] < positions() + 3) & (positions()[:, None] > positions() - 5)
        ),
        (2, 4, False, False),
    ),
    "a band that misses a place": (
        lambda p: tf.constant(np.tri(6) - np.tri(6, k=-3) > 0) & (positions() != 4),
        None,
    ),
    "of later keys": (lambda p: positions()[:, None] < positions(), None),
    "of earlier keys": (lambda p: positions()[:, None] > positions(), None),
    "tril": (lambda p: keras.ops.tril(keras.ops.ones((6, 6), "bool")), (None, 0, False, False)),
    "NumPy's": (lambda p: tf.constant(np.tri(6, dtype=bool))[None, None], (None, 0, False, False)),
    "a tensor that is held": (lambda p: HELD, (None, 0, False, False)),
    "all": (lambda p: tf.ones([1, 1, 6, 6], tf.bool), (None, None, False, False)),
    "keys": (lambda p: p[:, None, None], (None, None, False, True)),
    "queries and keys": (
        lambda p: p[:, None, None] & p[:, None, :, None],
        (None, None, True, True),
    ),
    "integers": (lambda p: tf.minimum(numbers(p), np.tri(6, dtype="int32")), None),
    "integers of which Keras asks whether they are 0": (
        lambda p: tf.cast(
            tf.minimum(numbers(p), tf.cast(np.tri(6, dtype=bool), tf.int32)), tf.bool
        ),
        None,
    ),
    "integers, and a causal mask of booleans": (
        lambda p: tf.minimum(numbers(p), tf.cast(np.tri(6, dtype=bool), tf.int32)),
        (None, 0, False, True),
    ),
    "a window as long as the sequence": (
        lambda p: positions()[:, None] < positions() + 6,
        (None, None, False, False),
    ),
    "a window": (lambda p: positions()[:, None] < positions() + 5, (4, None, False, False)),
    "greater": (lambda p: positions()[:, None] > positions() - 1, (None, 0, False, False)),
    "keys before queries": (
        lambda p: positions()[None, :] <= positions()[:, None],
        (None, 0, False, False),
    ),
    "another window": (lambda p: positions()[:, None] >= positions() - 1, (None, 1, False, False)),
    "reversed": (lambda p: (positions()[:, None] >= positions())[:, ::-1], None),
    "anti-causal": (lambda p: positions()[:, None] <= positions(), (0, None, False, False)),
    "of pairs": (lambda p: p[:, None, :, None] == p[:, None, None], None),
    "of heads": (lambda p: p[None, :, None], None),
    "joined by or": (lambda p: p[:, None, None] | (positions()[:, None] >= positions()), None),
    "drawn": (lambda p: tf.random.uniform([6, 6]) > -1.0, None),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_read(name):
    make, expected = MASKS[name]
    found = []

    def trace(padding):
        mask = make(padding)
        parts = read_mask(mask, 6, 6)
        found.append(parts and (*parts[:2], parts.queries is not None, parts.keys is not None))
        if parts is None:
            return True, True
        queries = tf.ones([1, 6], tf.bool) if parts.queries is None else parts.queries
        keys = tf.ones([1, 6], tf.bool) if parts.keys is None else parts.keys
        again = queries[:, None, :, None] & keys[:, None, None]
        before, after = (-1 if bound is None else bound for bound in parts[:2])
        return mask, again & tf.linalg.band_part(tf.ones([6, 6], tf.bool), before, after)

    padding = tf.constant([[True] * 4 + [False] * 2, [False] + [True] * 5])
    mask, again = tf.function(trace, autograph=False)(padding)
    assert found == [expected]
    assert np.array_equal(
        np.broadcast_to(mask, [2, 1, 6, 6]) > 0, np.broadcast_to(again, [2, 1, 6, 6])
    )


def test_a_mask_is_read_however_long_it_is():
    """Compares 30,000 positions without a table of 900 million."""

    def trace(padding):
        parts = read_mask(of_hub(padding, 30_000), 30_000, 30_000)
        assert parts[:2] == (None, 0) and parts.keys is not None

    tf.function(trace, autograph=False).get_concrete_function(tf.TensorSpec([2, 30_000], tf.bool))
