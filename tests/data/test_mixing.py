"""`fa.mix`: rows of several sources, in shares of the tokens."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

LENGTH = 16
# Ids tell the sources apart.
FIRST_IDS = {"code": 1, "text": 101}


def rows_of(name, documents=300, length=LENGTH):
    """Packed rows of documents of 2 to 12 tokens, numbered from the first id of the source on."""
    random = np.random.default_rng(FIRST_IDS[name])
    lengths = random.integers(2, 12, documents)
    first = FIRST_IDS[name]
    return fa.pack([first + np.arange(n, dtype="int32") for n in lengths], length)


SOURCES = {"code": rows_of("code"), "text": rows_of("text", 400)}
WEIGHTS = {"code": 6, "text": 2}


def name_of(x):
    """The source of a row, by its first id; and what the row itself says."""
    name = "code" if int(x.inputs[0]) < FIRST_IDS["text"] else "text"
    assert {key: bool(value) for key, value in x.sources.items()} == {
        "code": name == "code",
        "text": name == "text",
    }
    return name


def ids_of(dataset, name=None):
    """The ids of rows, of one source alone or of all; a mix's rows say of which they are."""
    return [x.inputs.numpy() for x, y in dataset if name is None or name_of(x) == name]


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "restart"])
def test_each_source_keeps_its_order_and_its_share(stop):
    mixed = fa.mix(SOURCES, WEIGHTS, stop=stop, seed=3)
    if stop == "restart":
        assert mixed.cardinality() == tf.data.INFINITE_CARDINALITY
        mixed = mixed.take(1000)
    rows = list(mixed)
    until_first_ends = 0
    for name, source in SOURCES.items():
        of_source = ids_of(source)
        mixed_ids = ids_of(rows, name)
        if stop == "all_exhausted":
            assert len(mixed_ids) == len(of_source)
        elif stop == "restart":
            assert len(mixed_ids) > len(of_source)
            of_source = of_source * (1 + len(mixed_ids) // len(of_source))
        else:
            until_first_ends += len(mixed_ids) == len(of_source)
        np.testing.assert_array_equal(mixed_ids, of_source[: len(mixed_ids)])
    if stop == "first_exhausted":
        assert until_first_ends == 1
    if stop != "all_exhausted":
        share = len(ids_of(rows, "code")) / len(rows)
        assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / len(rows))


def test_the_seed_alone_decides():
    def names(seed):
        return [name_of(x) for x, y in fa.mix(SOURCES, WEIGHTS, seed=seed)]

    tf.random.set_seed(1)
    drawn = names(seed=0)
    tf.random.set_seed(2)
    assert names(seed=0) == drawn
    assert names(seed=1) != drawn


def test_rows_differ_only_in_their_sources():
    x, y = next(iter(fa.mix(SOURCES, WEIGHTS)))
    of_source, y_of_source = next(iter(SOURCES[name_of(x)]))
    tf.nest.map_structure(
        np.testing.assert_array_equal, (x._replace(sources={}), y), (of_source, y_of_source)
    )


REFUSED = {
    "one source": (lambda: ({"code": rows_of("code")}, {"code": 1}), ValueError, "two or more"),
    "a list": (lambda: (list(SOURCES.values()), [1, 1]), ValueError, "must be a dict"),
    "other names": (lambda: (SOURCES, {"code": 1, "prose": 1}), ValueError, r"\['code', 'text'\]"),
    "no weight": (lambda: (SOURCES, {**WEIGHTS, "text": 0}), ValueError, "leave out a source"),
    "NaN": (lambda: (SOURCES, {**WEIGHTS, "text": np.nan}), ValueError, "positive number"),
    "a name for no log": (
        lambda: ({"a b": SOURCES["code"], "c": SOURCES["text"]}, {"a b": 1, "c": 1}),
        TypeError,
        "'a b'",
    ),
    "documents": (
        lambda: ({**SOURCES, "text": tf.data.Dataset.range(3)}, WEIGHTS),
        TypeError,
        r"pass fa.pack\(\.\.\., length\) as 'text'",
    ),
    "batches": (
        lambda: ({**SOURCES, "text": SOURCES["text"].batch(2)}, WEIGHTS),
        TypeError,
        r"mix before .batch",
    ),
    "another length": (
        lambda: ({**SOURCES, "text": rows_of("text", length=8)}, WEIGHTS),
        TypeError,
        "pack all to one length",
    ),
    "a mix": (
        lambda: ({**SOURCES, "text": fa.mix(SOURCES, WEIGHTS)}, WEIGHTS),
        TypeError,
        "is a mix itself",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fa.mix(*make())


def test_an_unknown_stop_is_refused():
    with pytest.raises(ValueError, match="stop='first'"):
        fa.mix(SOURCES, WEIGHTS, stop="first")


def expected_shares(batches):
    """Counts tokens by NumPy: the share of real ones, and of these that of each source."""
    rows = [x for x, y in batches.unbatch()]
    real = dict.fromkeys(SOURCES, 0)
    for x in rows:
        real[name_of(x)] += np.count_nonzero(x.documents)
    total = sum(real.values())
    shares = {f"tokens_of_{name}": count / total for name, count in real.items()}
    return {"real_tokens": total / (LENGTH * len(rows)), **shares}


def test_fit_logs_the_shares_of_each_epoch(tmp_path):
    ids = keras.Input([None], dtype="int32")
    embedded = keras.layers.Embedding(128, 4)(ids)
    attended = keras.layers.MultiHeadAttention(1, 4)(embedded, embedded, use_causal_mask=True)
    model = keras.Model(ids, keras.layers.Dense(128)(attended))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(model, "sgd", loss, gradient_accumulation_steps=2)
    # The last batch is short, and the last update has one micro-batch.
    batches = fa.mix(SOURCES, WEIGHTS).take(27).batch(4)

    class End(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            batches, verbose=0, callbacks=[End()], checkpoint_dir=tmp_path, checkpoint_every=1
        )
    # The counts of the epoch are part of the checkpoint.
    history = trainer.fit(batches, epochs=2, verbose=0, checkpoint_dir=tmp_path).history
    for name, share in expected_shares(batches).items():
        assert history[name] == pytest.approx([share] * 2, rel=1e-6), name

    summary = trainer.summary(batches, batch_size=4, verbose=False)
    (choice,) = summary.attention.values()
    assert choice.endswith(", documents apart")

    # Rows of one source have no shares; what is not packed has no share of real tokens.
    history = trainer.fit(SOURCES["code"].batch(4), verbose=0).history
    assert "real_tokens" in history and "tokens_of_code" not in history
    x, y = np.ones((4, LENGTH), "int32"), np.ones((4, LENGTH), "int32")
    assert "real_tokens" not in trainer.fit(x, y, verbose=0).history
    summary = trainer.summary(x, y, batch_size=4, verbose=False)
    assert "apart" not in str(summary)
