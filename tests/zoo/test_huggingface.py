"""Hugging Face's TF models (transformers < 5, tf_keras): a loss given, and the model's own."""

import numpy as np
import pytest
import tensorflow as tf

from fastaccum.adapters import huggingface

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS, TIME = 40, 6, 8
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}


def bert(head, **config):
    return getattr(transformers, f"TFBertFor{head}")(transformers.BertConfig(**TINY, **config))


def gpt2(head="LMHeadModel", **config):
    return getattr(transformers, f"TFGPT2{head}")(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
            **config,
        )
    )


def text(rows=ROWS, time=TIME):
    """Sentences of different lengths, padded, and their lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, time + 1, rows)
    attention_mask = (np.arange(time) < lengths[:, None]).astype("int32")
    ids = rng.integers(1, VOCABULARY, (rows, time)).astype("int32") * attention_mask
    return {"input_ids": ids, "attention_mask": attention_mask}


def words(x, share=1.0, ignored=-100, of=VOCABULARY):
    """A label for some words of each sentence, none of them in the last two rows."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, of, x["input_ids"].shape)
    labels = np.where((x["attention_mask"] > 0) & (rng.random(labels.shape) < share), labels, ignored)
    labels[-2:] = ignored
    return labels.astype("int64")


def classes(n=3):
    return np.random.default_rng(2).integers(0, n, ROWS).astype("int64")


def _segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=4,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        semantic_loss_ignore_index=3,
    )
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (ROWS, 16, 16))
    labels[-2:] = 3
    x = {"pixel_values": rng.normal(size=(ROWS, 3, 16, 16)).astype("float32"), "labels": labels}
    return transformers.TFSegformerForSemanticSegmentation(config), x


def _with_own_loss(kind):
    """A model and inputs with labels among them, of which the last micro-batch has none that counts."""
    x = text()
    if kind == "causal":
        return gpt2(), {**x, "labels": words(x)}
    if kind == "masked":
        return bert("MaskedLM"), {**x, "labels": words(x, 0.3)}
    if kind == "tokens":
        labels = words(x, of=5)
        labels[0, 0] = -1
        return bert("TokenClassification", num_labels=5), {**x, "labels": labels}
    if kind == "classes":
        return bert("SequenceClassification", num_labels=3), {**x, "labels": classes()}
    if kind == "regression":
        return bert("SequenceClassification", num_labels=1), {**x, "labels": classes().astype("float32")}
    if kind == "answers":
        return bert("QuestionAnswering"), {**x, "start_positions": classes(), "end_positions": classes() + 1}
    if kind == "next sentence":
        return bert("NextSentencePrediction"), {**x, "next_sentence_label": np.array([0, 1, -100, 1, -100, -100])}
    if kind == "choices":
        choices = {name: np.stack([value, value[::-1]], axis=1) for name, value in x.items()}
        return bert("MultipleChoice"), {**choices, "labels": classes(2)}
    if kind == "pretraining":
        sentences = np.array([0, 1, -100, 1, -100, -100])
        return bert("PreTraining"), {**x, "labels": words(x), "next_sentence_label": sentences}
    if kind == "albert":
        config = transformers.AlbertConfig(**{**TINY, "embedding_size": 8, "classifier_dropout_prob": 0.0})
        sentences = np.array([0, 1, 1, 1, 0, 1])
        model = transformers.TFAlbertForPreTraining(config)
        return model, {**x, "labels": words(x), "sentence_order_label": sentences}
    return _segformer()


def _arrays(gradients):
    return [0.0 if g is None else tf.convert_to_tensor(g).numpy() for g in gradients]


def _added(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


KINDS = [
    *("causal", "masked", "tokens", "classes", "regression", "answers", "next sentence", "choices", "pretraining"),
    *("albert", "segmentation"),
]


@pytest.mark.zoo
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_to_the_loss_that_a_model_returns(kind, padded):
    model, x = _with_own_loss(kind)
    training = kind != "segmentation"  # which has batch statistics
    with tf.GradientTape() as tape:
        expected = tf.reduce_mean(model(x, training=training).loss)
    gradients = _arrays(tape.gradient(expected, model.trainable_variables))
    size = 2
    sums, denominators, total = [], [], None
    for start in range(0, ROWS, size):
        part = {name: value[start : start + size] for name, value in x.items()}
        valid = None
        if padded:  # two rows more, which count nowhere
            part = {name: np.concatenate([value, value[:2] * 0 + 1]) for name, value in part.items()}
            valid = tf.constant([True, True, False, False])
        rows = len(part["labels"]) if "labels" in part else 2 * (1 + padded)
        with tf.GradientTape(persistent=True) as tape, huggingface.observed_losses(model, valid) as seen:
            outputs = model(part, training=training)
            terms = huggingface.terms(model, outputs, seen, rows, valid)
            values = [term.value * term.weight_sum for term in terms]
        sums.append(values)
        denominators.append([term.weight_sum for term in terms])
        each = [_arrays(tape.gradient(value, model.trainable_variables)) for value in values]
        total = each if total is None else [_added(*both) for both in zip(total, each, strict=True)]
    assert "hf_compute_loss" not in vars(model)
    sums, denominators = np.sum(sums, axis=0), np.sum(denominators, axis=0)
    assert len(sums) == (2 if kind in ("pretraining", "albert") else 1)
    assert np.sum(sums / denominators) == pytest.approx(float(expected), rel=1e-6)
    largest = max(np.max(np.abs(g)) for g in gradients)
    for i, gradient in enumerate(gradients):
        ours = sum(t[i] / d for t, d in zip(total, denominators, strict=True))
        np.testing.assert_allclose(ours, gradient, rtol=0, atol=3e-6 * largest)


@pytest.mark.zoo
def test_labels_are_merged_and_matched_as_in_its_train_step():
    model, x = bert("SequenceClassification"), text()
    assert huggingface.is_pretrained(model)
    y = classes(2)
    assert huggingface.with_labels(model, x["input_ids"], y) == {"input_ids": x["input_ids"], "labels": y}
    assert huggingface.with_labels(model, x, {"labels": y}) == {**x, "labels": y}
    given = {**x, "labels": y + 1}
    assert huggingface.with_labels(model, given, y) == given
    assert huggingface.with_labels(model, given, None) is given
    outputs = model({**x, "labels": y})
    for targets, inputs in ((y, x), ({"labels": y}, x), (None, {**x, "labels": y})):
        y_true, y_pred = huggingface.matched(model, inputs, targets, outputs)
        assert y_true is y
        assert y_pred is outputs.logits
    answers = bert("QuestionAnswering")
    outputs = answers(x)
    y_true, y_pred = huggingface.matched(answers, x, {"start_positions": 1, "end_positions": 2}, outputs)
    assert y_true == {"start_logits": 1, "end_logits": 2}
    assert y_pred["end_logits"] is outputs.end_logits
    assert huggingface.with_labels(answers, x, {"start_logits": 1}) == {**x, "start_positions": 1}
    with pytest.raises(ValueError, match=r"takes the labels \['start_positions', 'end_positions'\]"):
        huggingface.with_labels(answers, x, y)


@pytest.mark.zoo
def test_a_loss_of_unknown_denominator_says_so():
    class Twice(transformers.TFBertForMaskedLM):
        def call(self, *args, **kwargs):
            outputs = super().call(*args, **kwargs)
            if outputs.loss is not None:
                outputs.loss = 2 * outputs.loss
            return outputs

    model, x = Twice(transformers.BertConfig(**TINY)), text()
    model(x)
    with huggingface.observed_losses(model) as seen:
        outputs = model({**x, "labels": words(x)})
        with pytest.warns(UserWarning, match="Twice reduces its loss to a scalar by itself"):
            (term,) = huggingface.terms(model, outputs, seen, ROWS)
    assert float(term.value) == pytest.approx(2 * float(seen[0].value))
    assert float(term.weight_sum) == ROWS
    with huggingface.observed_losses(model) as seen, pytest.raises(ValueError, match="returned no loss"):
        huggingface.terms(model, model(x), seen, ROWS)
