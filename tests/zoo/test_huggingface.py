"""Hugging Face's TF models (transformers < 5, tf_keras): a loss given, and the model's own."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from zoo import Case, Steps, row

import fastaccum as fa
from fastaccum.families import adapt_model
from fastaccum.legacy import huggingface
from fastaccum.legacy.tf_keras_models import PretrainedModel

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS, TIME = 40, 6, 8
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
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
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
            **config,
        )
    )


def distilbert(head, **config):
    return getattr(transformers, f"TFDistilBertFor{head}")(
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=16,
            hidden_dim=32,
            n_layers=1,
            n_heads=2,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            initializer_range=0.2,
            **config,
        )
    )


def vit():
    config = {
        name: value
        for name, value in TINY.items()
        if name not in ("vocab_size", "max_position_embeddings")
    }
    return transformers.TFViTForImageClassification(
        transformers.ViTConfig(**config, image_size=16, patch_size=8, num_labels=3)
    )


def images():
    return np.random.default_rng(3).normal(size=(ROWS, 3, 16, 16)).astype("float32")


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
    labels = np.where(
        (x["attention_mask"] > 0) & (rng.random(labels.shape) < share), labels, ignored
    )
    labels[-2:] = ignored
    return labels.astype("int64")


def classes(n=3):
    return np.random.default_rng(2).integers(0, n, ROWS).astype("int64")


def cross_entropy(**options):
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


FAMILY = "Hugging Face"


@row(FAMILY, "BERT, sequence classification: loss given", quick=True)
def test_bert_classes():
    return Case(
        bert("SequenceClassification", num_labels=3),
        text(),
        classes(),
        loss=cross_entropy(),
        metrics=["accuracy"],
    )


@row(FAMILY, "BERT, sequence classification: loss given, weights, ragged tail")
def test_bert_weights():
    weights = np.array([1.0, 0.5, 0.0, 2.0, 1.0, 3.0], "float32")
    return Case(
        bert("SequenceClassification", num_labels=3),
        text(),
        classes(),
        sample_weight=weights,
        loss=cross_entropy(),
        weighted_metrics=["accuracy"],
        micro_batches=4,
    )


@row(FAMILY, "BERT, token classification: loss given, labels of -100 by ignore_class")
def test_bert_tokens():
    x = text()
    model = bert("TokenClassification", num_labels=5)
    return Case(model, x, words(x, of=5), loss=cross_entropy(ignore_class=-100), micro_batches=3)


KEYS = (
    "The largest error is in the biases of attention's keys. Their exact gradient is 0; both "
    "steps compute rounding errors of 2e-10."
)
NO_GRADIENT = (
    "The largest error is in the last layer's bias. Its exact gradient is 0, because of a "
    "softmax over time; both steps compute rounding errors of 3e-9."
)


@row(FAMILY, "BERT, question answering: losses given", tolerance=3e-4, note=NO_GRADIENT)
def test_bert_answers():
    y = {"start_logits": classes(), "end_logits": classes() + 1}
    return Case(
        bert("QuestionAnswering"),
        text(),
        y,
        loss={"start_logits": cross_entropy(), "end_logits": cross_entropy()},
    )


@row(FAMILY, "GPT-2, language model: loss given, weights per token")
def test_gpt2_words():
    x = text()
    y, weights = (
        np.roll(x["input_ids"], -1, axis=1),
        np.roll(x["attention_mask"], -1, axis=1).astype("float32"),
    )
    return Case(gpt2(use_cache=False), x, y, weights, loss=cross_entropy())


@row(FAMILY, "GPT-2, language model: loss given, past_key_values among the outputs")
def test_gpt2_cache():
    x = text()
    return Case(gpt2(), x, np.roll(x["input_ids"], -1, axis=1), loss=cross_entropy())


@row(FAMILY, "DistilBERT, sequence classification: loss given")
def test_distilbert_classes():
    return Case(
        distilbert("SequenceClassification", num_labels=3), text(), classes(), loss=cross_entropy()
    )


@row(FAMILY, "RoBERTa, sequence classification: loss given")
def test_roberta_classes():
    config = transformers.RobertaConfig(**TINY, num_labels=3)
    return Case(
        transformers.TFRobertaForSequenceClassification(config),
        text(),
        classes(),
        loss=cross_entropy(),
    )


@row(FAMILY, "ViT, image classification: loss given", tolerance=3e-5, note=KEYS)
def test_vit_classes():
    x = {"pixel_values": images()}
    return Case(vit(), x, classes(), loss=cross_entropy(), metrics=["accuracy"])


@row(FAMILY, "BERT, sequence classification: its own loss", mixed=True, quick=True)
def test_bert_classes_own():
    return Case(bert("SequenceClassification", num_labels=3), text(), classes(), micro_batches=4)


@row(FAMILY, "BERT, masked language model: its own loss, labels of -100", quick=True)
def test_bert_masked():
    x = text()
    return Case(bert("MaskedLM"), {**x, "labels": words(x, 0.3)}, micro_batches=3)


@row(FAMILY, "BERT, token classification: its own loss, labels of -100 as y")
def test_bert_tokens_own():
    x = text()
    return Case(bert("TokenClassification", num_labels=5), x, words(x, of=5), micro_batches=3)


@row(FAMILY, "BERT, question answering: its own loss", tolerance=3e-4, note=NO_GRADIENT)
def test_bert_answers_own():
    return Case(
        bert("QuestionAnswering"),
        {**text(), "start_positions": classes(), "end_positions": classes() + 1},
    )


@row(FAMILY, "BERT, pretraining of words and sentences: its own loss of two means")
def test_bert_pretraining():
    x = text()
    sentences = np.array([0, 1, -100, 1, -100, -100])
    return Case(
        bert("PreTraining"),
        {**x, "labels": words(x), "next_sentence_label": sentences},
        micro_batches=3,
    )


@row(FAMILY, "BERT, regression: its own loss")
def test_bert_regression():
    model = bert("SequenceClassification", num_labels=1)
    return Case(model, text(), classes().astype("float32"))


@row(FAMILY, "GPT-2, language model: its own loss, shifted labels of -100", mixed=True, quick=True)
def test_gpt2_own():
    x = text()
    return Case(gpt2(), {**x, "labels": words(x)}, micro_batches=3)


@row(FAMILY, "GPT-2, sequence classification: its own loss")
def test_gpt2_classes():
    return Case(gpt2("ForSequenceClassification", num_labels=3, pad_token_id=0), text(), classes())


@row(FAMILY, "DistilBERT, masked language model: its own loss")
def test_distilbert_masked():
    x = text()
    return Case(distilbert("MaskedLM"), {**x, "labels": words(x, 0.3)})


@row(FAMILY, "T5: its own loss, labels of -100")
def test_t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    x = text()
    return Case(
        transformers.TFT5ForConditionalGeneration(config),
        {**x, "labels": words(x)},
        micro_batches=3,
    )


@row(
    FAMILY,
    "BART, summarisation: its own loss, labels of -100",
    tolerance=3e-5,
    note=KEYS,
)
def test_bart():
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        init_std=0.2,
    )
    x = text()
    return Case(
        transformers.TFBartForConditionalGeneration(config),
        {**x, "labels": words(x)},
        micro_batches=3,
    )


@row(FAMILY, "OPT, language model: its own loss")
def test_opt():
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=32,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
    )
    x = text()
    return Case(transformers.TFOPTForCausalLM(config), {**x, "labels": words(x)})


@row(FAMILY, "ALBERT, masked language model with one block for all layers: its own loss")
def test_albert():
    config = transformers.AlbertConfig(**TINY, embedding_size=8, classifier_dropout_prob=0.0)
    x = text()
    return Case(transformers.TFAlbertForMaskedLM(config), {**x, "labels": words(x, 0.3)})


@row(FAMILY, "ELECTRA, discriminator as sequence classification: its own loss")
def test_electra():
    config = transformers.ElectraConfig(**TINY, embedding_size=8, num_labels=3)
    return Case(transformers.TFElectraForSequenceClassification(config), text(), classes())


@row(FAMILY, "ViT, image classification: its own loss", tolerance=3e-5, note=KEYS)
def test_vit_own():
    return Case(vit(), {"pixel_values": images(), "labels": classes()})


@row(
    FAMILY,
    "SegFormer: its own loss, pixels without a label, batch statistics",
    tolerance=1e-4,
    note="The largest error is in biases before BatchNormalization. Their exact gradient is 0; both steps "
    "compute rounding errors of 7e-10.",
)
def test_segformer():
    model, x = _segformer()
    return _by_micro_batch(model, x, lambda part: float(np.sum(part["labels"] != 3)))


@row(
    FAMILY,
    "CLIP: a contrastive loss of its own",
    note="The loss compares the rows of a micro-batch with each other, as a warning says. Compared with a loop"
    " over micro-batches.",
)
def test_clip():
    config = transformers.CLIPConfig(
        text_config={**TINY, "projection_dim": 8, "eos_token_id": 2},
        vision_config={**TINY, "image_size": 16, "patch_size": 8, "projection_dim": 8},
        projection_dim=8,
    )
    model, x = transformers.TFCLIPModel(config), {**text(), "pixel_values": images()}
    return _by_micro_batch(
        model,
        x,
        lambda part: len(part["input_ids"]),
        warns="returns its loss as a scalar",
        return_loss=True,
    )


def _by_micro_batch(model, x, weight, warns=None, **options):
    """The model's own step by a loop over micro-batches, whose losses count by their weights."""
    model(x, **options)

    def theirs():
        total, weights, mean = None, 0.0, 0.0
        for start in range(0, ROWS, 3):
            part = {name: value[start : start + 3] for name, value in x.items()}
            with tf.GradientTape() as tape:
                loss = weight(part) * tf.reduce_sum(model(part, training=True, **options).loss)
            each = _arrays(tape.gradient(loss, model.trainable_variables))
            total = each if total is None else _added(total, each)
            weights, mean = weights + weight(part), mean + float(loss)
        variables = model.trainable_variables
        gradients = [
            np.broadcast_to(g, v.shape) / weights for g, v in zip(total, variables, strict=True)
        ]
        pairs = [(tf.cast(g, tf.float32), v) for g, v in zip(gradients, variables, strict=True)]
        tf_keras.optimizers.SGD(0.1).apply_gradients(pairs)
        return {"loss": mean / weights}

    def ours():
        with pytest.warns(UserWarning, match=warns) if warns else contextlib.nullcontext():
            trainer = fa.Trainer(model, tf_keras.optimizers.SGD(0.1), gradient_accumulation_steps=2)
            logs = trainer.fit(x, batch_size=3, shuffle=False, verbose=0).history
        return {"loss": logs["loss"][-1]}

    return Steps(model.trainable_variables, ours, theirs, model.non_trainable_variables)


@row(FAMILY, "create_optimizer: AdamWeightDecay with warm-up, no decay of biases and LayerNorm")
def test_create_optimizer():
    def make():
        optimizer, _ = transformers.create_optimizer(
            1e-2, num_train_steps=20, num_warmup_steps=4, weight_decay_rate=0.1, adam_epsilon=1e-2
        )
        optimizer.iterations.assign(2)
        return optimizer

    return Case(bert("SequenceClassification", num_labels=3), text(), classes(), optimizer=make)


@row(
    FAMILY,
    "BERT, from tf.data as prepare_tf_dataset makes it: its own loss, and accuracy",
    quick=True,
)
def test_bert_dataset():
    model, x, y = bert("SequenceClassification", num_labels=3), text(), classes()
    model(x)

    def data(size):
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)

    def ours():
        trainer = fa.Trainer(
            model, tf_keras.optimizers.SGD(0.1), metrics=["accuracy"], gradient_accumulation_steps=3
        )
        logs = trainer.fit(data(2), epochs=1, verbose=0).history
        return {name: values[-1] for name, values in logs.items()}

    def theirs():
        model.compile(tf_keras.optimizers.SGD(0.1), metrics=["accuracy"])
        logs = model.fit(data(ROWS), epochs=1, verbose=0).history
        return {name: values[-1] for name, values in logs.items()}

    return Steps(model.trainable_variables, ours, theirs)


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
    """A model and inputs with labels among them, of which the last micro-batch has none that
    counts.
    """
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
        return bert("SequenceClassification", num_labels=1), {
            **x,
            "labels": classes().astype("float32"),
        }
    if kind == "answers":
        return bert("QuestionAnswering"), {
            **x,
            "start_positions": classes(),
            "end_positions": classes() + 1,
        }
    if kind == "next sentence":
        return bert("NextSentencePrediction"), {
            **x,
            "next_sentence_label": np.array([0, 1, -100, 1, -100, -100]),
        }
    if kind == "choices":
        choices = {name: np.stack([value, value[::-1]], axis=1) for name, value in x.items()}
        return bert("MultipleChoice"), {**choices, "labels": classes(2)}
    if kind == "pretraining":
        sentences = np.array([0, 1, -100, 1, -100, -100])
        return bert("PreTraining"), {**x, "labels": words(x), "next_sentence_label": sentences}
    if kind == "albert":
        config = transformers.AlbertConfig(
            **{**TINY, "embedding_size": 8, "classifier_dropout_prob": 0.0}
        )
        sentences = np.array([0, 1, 1, 1, 0, 1])
        model = transformers.TFAlbertForPreTraining(config)
        return model, {**x, "labels": words(x), "sentence_order_label": sentences}
    return _segformer()


def _arrays(gradients):
    return [0.0 if g is None else tf.convert_to_tensor(g).numpy() for g in gradients]


def _added(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


KINDS = [
    *(
        "causal",
        "masked",
        "tokens",
        "classes",
        "regression",
        "answers",
        "next sentence",
        "choices",
        "pretraining",
    ),
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
            part = {
                name: np.concatenate([value, value[:2] * 0 + 1]) for name, value in part.items()
            }
            valid = tf.constant([True, True, False, False])
        rows = len(part["labels"]) if "labels" in part else 2 * (1 + padded)
        with (
            tf.GradientTape(persistent=True) as tape,
            huggingface.observe_losses(model, valid) as seen,
        ):
            outputs = model(part, training=training)
            terms = huggingface.make_terms(model, outputs, seen, rows, valid)
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
    assert isinstance(adapt_model(model), PretrainedModel)
    y = classes(2)
    assert huggingface.merge_labels(model, x["input_ids"], y) == {
        "input_ids": x["input_ids"],
        "labels": y,
    }
    assert huggingface.merge_labels(model, x, {"labels": y}) == {**x, "labels": y}
    given = {**x, "labels": y + 1}
    assert huggingface.merge_labels(model, given, y) == given
    assert huggingface.merge_labels(model, given, None) is given
    outputs = model({**x, "labels": y})
    for targets, inputs in ((y, x), ({"labels": y}, x), (None, {**x, "labels": y})):
        y_true, y_pred = huggingface.match(model, inputs, targets, outputs)
        assert y_true is y
        assert y_pred is outputs.logits
    answers = bert("QuestionAnswering")
    outputs = answers(x)
    y_true, y_pred = huggingface.match(
        answers, x, {"start_positions": 1, "end_positions": 2}, outputs
    )
    assert y_true == {"start_logits": 1, "end_logits": 2}
    assert y_pred["end_logits"] is outputs.end_logits
    assert huggingface.merge_labels(answers, x, {"start_logits": 1}) == {**x, "start_positions": 1}
    with pytest.raises(
        ValueError, match=r"takes the labels \['start_positions', 'end_positions'\]"
    ):
        huggingface.merge_labels(answers, x, y)


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
    with huggingface.observe_losses(model) as seen:
        outputs = model({**x, "labels": words(x)})
        with pytest.warns(UserWarning, match="Twice returns its loss as a scalar"):
            (term,) = huggingface.make_terms(model, outputs, seen, ROWS)
    assert float(term.value) == pytest.approx(2 * float(seen[0].value))
    assert float(term.weight_sum) == ROWS
    with (
        huggingface.observe_losses(model) as seen,
        pytest.raises(ValueError, match="returned no loss"),
    ):
        huggingface.make_terms(model, model(x), seen, ROWS)


@pytest.mark.zoo
def test_what_its_own_loss_does_not_know_is_refused():
    x, y = text(), classes()

    def fit(x, y, jit_compile=False, **options):
        trainer = fa.Trainer(
            bert("SequenceClassification", num_labels=3), "sgd", jit_compile=jit_compile
        )
        return trainer.fit(x, y, batch_size=3, verbose=0, **options)

    for weights in ({"sample_weight": np.ones(ROWS)}, {"class_weight": {0: 2.0}}):
        with pytest.raises(
            ValueError, match="returns by itself takes no sample_weight or class_weight"
        ):
            fit(x, y, **weights)
    with pytest.raises(ValueError, match=r"takes the labels \['labels'\]: pass y as a dict"):
        fit(x, [y, y])
    with pytest.raises(ValueError, match="ids given to embedding 'embeddings': values from"):
        # XLA drops the model's own check
        fit({**x, "input_ids": x["input_ids"] + VOCABULARY}, y, jit_compile=True)


@pytest.mark.zoo
def test_a_loss_of_ones_own_that_is_a_scalar_counts_as_a_mean_with_a_warning():
    class Own(transformers.TFBertForSequenceClassification):
        def hf_compute_loss(self, labels, logits):
            return 2 * tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            )

    model, x, y = Own(transformers.BertConfig(**TINY, num_labels=3)), text(), classes()
    expected = float(model({**x, "labels": y}).loss)
    trainer = fa.Trainer(
        model, tf_keras.optimizers.SGD(0.1), gradient_accumulation_steps=2, jit_compile=False
    )
    with pytest.warns(UserWarning, match="Own returns its loss as a scalar"):
        history = trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert history.history["loss"] == pytest.approx([expected], rel=1e-5)
