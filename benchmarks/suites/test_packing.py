"""An epoch of texts of mixed length: packed, in buckets of like lengths, and padded.

The model is KerasHub's Llama of 1 million parameters. All three train with ours, in a process of
their own, and count what they compile. And the packer alone, in tokens a second.
"""

import functools
import importlib.util
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.support.processes import in_new_process

LENGTH = 2048
VOCABULARY = 512
TEXTS = 100
TEXTS_OF_PACKER = 20_000
ROUNDS = 3


def lengths_of(count):
    """Draws log-normal lengths: median 180 tokens, sigma 1, at most a row."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(180), 1, count))
    return np.clip(lengths, 2, LENGTH).astype(int)


def texts_of(count):
    """Draws texts as vectors of ids, with the inputs and targets of a causal language model."""
    random = np.random.default_rng(1)
    for length in lengths_of(count):
        ids = random.integers(1, VOCABULARY, length).astype("int32")
        x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        yield x, np.append(ids[1:], 0).astype("int32"), np.append(np.ones(length - 1), 0)


def llama():
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=4,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=128,
        intermediate_dim=384,
    )
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def padded(texts):
    """Batches of two texts, each padded to a row."""
    shapes = {"token_ids": [LENGTH], "padding_mask": [LENGTH]}, [LENGTH], [LENGTH]
    return texts.padded_batch(2, shapes)


def bucketed(texts):
    """Batches of texts of like lengths, of some 4,096 tokens with their padding."""
    bounds = [64, 128, 256, 512, 1024]
    sizes = [4096 // bound for bound in (*bounds, LENGTH)]
    return texts.bucket_by_sequence_length(
        lambda x, y, weights: tf.size(y),
        bounds,
        sizes,
        pad_to_bucket_boundary=False,
    )


def packed(texts):
    import fastaccum as fa

    return fa.pack(texts, LENGTH).batch(2)


FORMS = {"packed": packed, "in buckets": bucketed, "padded": padded}


def train(form, count):
    """Trains an epoch, two batches to an update; returns its seconds, with all that it compiles."""
    import fastaccum as fa

    keras.utils.set_random_seed(0)
    signature = (
        {name: tf.TensorSpec([None], tf.int32) for name in ("token_ids", "padding_mask")},
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.float32),
    )
    examples = list(texts_of(count))
    texts = tf.data.Dataset.from_generator(lambda: examples, output_signature=signature)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    trainer = fa.Trainer(llama(), keras.optimizers.Adam(1e-3), loss, gradient_accumulation_steps=2)
    data = FORMS[form](texts)
    started = time.perf_counter()
    trainer.fit(data, verbose=0)
    return time.perf_counter() - started


def test_an_epoch_of_texts_of_mixed_length(benchmark, report):
    if not importlib.util.find_spec("keras_hub"):
        pytest.skip("needs keras-hub")
    count = 4 if benchmark.disabled else TEXTS
    seconds = {}

    def run_all():
        for form in FORMS:
            seconds[form] = in_new_process(functools.partial(train, form, count))

    benchmark.pedantic(run_all, rounds=1)
    if benchmark.disabled:
        return
    workload = types.SimpleNamespace(name=f"KerasHub Llama, {TEXTS} texts")
    for form in ("padded", "in buckets"):
        note = ", ".join(f"{name} {time_of_form:.1f} s" for name, time_of_form in seconds.items())
        report(
            f"texts, an epoch: {form} / packed", workload, seconds[form] / seconds["packed"], note
        )


def test_packer(benchmark, report):
    import fastaccum as fa

    count = 100 if benchmark.disabled else TEXTS_OF_PACKER
    lengths = lengths_of(count)
    ids = np.arange(lengths.sum(), dtype="int32")
    texts = tf.RaggedTensor.from_row_lengths(ids, lengths)
    rows = fa.pack(texts, LENGTH)

    def read():
        return sum(1 for _ in rows)

    number_of_rows = benchmark.pedantic(read, rounds=ROUNDS)
    assert lengths.sum() <= number_of_rows * LENGTH
    if benchmark.disabled:
        return
    workload = types.SimpleNamespace(name=f"{count} texts")
    rate = lengths.sum() / benchmark.stats.stats.median / 1e6
    report("packer: millions of tokens a second", workload, rate)
    share = lengths.sum() / (number_of_rows * LENGTH)
    report("packer: real tokens in rows", workload, share)
