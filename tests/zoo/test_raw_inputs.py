"""Raw inputs: strings to KerasHub's tasks, which preprocess them, and to models that encode
text.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from zoo import Case, row

import fastaccum as fa

keras_hub = pytest.importorskip("keras_hub")

TEXT = ["the quick brown fox", "the fox", "a quick dog", "brown dog the"] * 2
LABELS = np.array([0, 1, 1, 1] * 2)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "dog", "a"]


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=1,
        num_heads=2,
        hidden_dim=4,
        intermediate_dim=8,
        max_sequence_length=8,
        dropout=0.0,
    )
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0
    )


def causal_lm():
    keras.utils.set_random_seed(0)
    vocabulary = {
        token: i for i, token in enumerate(["<|endoftext|>", "a", "b", "c", "Ġ", "ab", "Ġa", "Ġb"])
    }
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["a b", "Ġ a", "Ġ b"])
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=8,
        num_layers=1,
        num_heads=2,
        hidden_dim=4,
        intermediate_dim=8,
        max_sequence_length=6,
        dropout=0.0,
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=6)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor)


@row("KerasHub", "BERT, text classifier, strings through its own preprocessor", fused=True)
def test_bert_from_strings():
    return Case(
        classifier(), TEXT, LABELS, loss=cross_entropy(), metrics=["sparse_categorical_accuracy"]
    )


@row("KerasHub", "GPT-2, causal language model, strings alone", quick=True, fused=True)
def test_gpt2_from_strings():
    text = ["a b ab", "b a", "ab ab ab", "c"] * 2
    return Case(
        causal_lm(), text, loss=cross_entropy(), weighted_metrics=["sparse_categorical_accuracy"]
    )


@row("keras.io", "Text classification, TextVectorization in the model (jit_compile=False)")
def test_text_vectorization():
    keras.utils.set_random_seed(0)
    vectorize = keras.layers.TextVectorization(max_tokens=12, output_sequence_length=4)
    vectorize.adapt(TEXT)
    inputs = keras.Input((1,), dtype="string")
    h = keras.layers.Embedding(12, 4)(vectorize(inputs))
    h = keras.layers.GlobalAveragePooling1D()(h)
    model = keras.Model(inputs, keras.layers.Dense(2)(h))
    return Case(
        model, np.array(TEXT, dtype=object), LABELS, loss=cross_entropy(), jit_compile=False
    )


def dataset(size, labels=True):
    return tf.data.Dataset.from_tensor_slices((TEXT, LABELS) if labels else TEXT).batch(size)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("data", "reference", "fit"),
    [
        (lambda: (TEXT, LABELS.tolist()), None, {}),
        (
            lambda: (np.array(TEXT), LABELS),
            None,
            {"sample_weight": np.arange(1.0, 9.0, dtype="float32")},
        ),
        (lambda: (dataset(4),), lambda: (dataset(8),), {"class_weight": {0: 1.0, 1: 3.0}}),
        (lambda: (np.array(TEXT), LABELS), None, {"validation_split": 0.25}),
        (lambda: (TEXT, LABELS), None, {"validation_data": dataset(3)}),
    ],
    ids=["lists", "weights", "dataset", "split", "validation dataset"],
)
def test_a_task_takes_what_its_own_fit_takes(data, reference, fit):
    theirs = classifier()
    metrics = ["sparse_categorical_accuracy"]
    theirs.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=cross_entropy(),
        metrics=None,
        weighted_metrics=metrics,
        jit_compile=False,
    )
    given = data() if reference is None else reference()
    size = {} if len(given) == 1 else {"batch_size": 6 if "validation_split" in fit else 8}
    expected = theirs.fit(*given, **size, epochs=2, verbose=0, **fit).history
    optimizer = keras.optimizers.SGD(0.1)
    options = {"weighted_metrics": metrics, "gradient_accumulation_steps": 2, "jit_compile": False}
    ours = fa.Trainer(classifier(), optimizer, cross_entropy(), **options)
    size = {name: value // 2 for name, value in size.items()}
    found = ours.fit(*data(), **size, epochs=2, verbose=0, **fit).history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    for a, b in zip(ours.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    weight = {"sample_weight": fit["sample_weight"]} if "sample_weight" in fit else {}
    evaluated = theirs.evaluate(*data(), **weight, verbose=0)
    assert ours.evaluate(*data(), **weight, verbose=0) == pytest.approx(evaluated, rel=1e-5)
    np.testing.assert_allclose(
        ours.predict(TEXT, verbose=0), theirs.predict(TEXT, verbose=0), atol=1e-6
    )
