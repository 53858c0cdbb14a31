"""The idioms of keras.io's examples: language."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from zoo import Case, Steps, entry

import fastaccum as fa

FAMILY = "keras.io: language"


def _padded_tokens(rows, length, vocabulary, seed=0):
    """Sentences of very different lengths, 0 after their end."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocabulary, (rows, length))
    lengths = 2 + np.arange(rows) * 5 % (length - 1)
    return np.where(np.arange(length) < lengths[:, None], tokens, 0).astype("int32")


class PositionalEmbedding(layers.Layer):
    def __init__(self, sequence_length, vocab_size, embed_dim, **kwargs):
        super().__init__(**kwargs)
        self.token_embeddings = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.position_embeddings = layers.Embedding(input_dim=sequence_length, output_dim=embed_dim)

    def call(self, inputs):
        length = ops.shape(inputs)[-1]
        positions = ops.arange(0, length, 1)
        return self.token_embeddings(inputs) + self.position_embeddings(positions)

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class TransformerEncoder(layers.Layer):
    def __init__(self, embed_dim, dense_dim, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.dense_proj = keras.Sequential(
            [layers.Dense(dense_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        padding_mask = None if mask is None else ops.cast(mask[:, None, :], dtype="int32")
        attention_output = self.attention(
            query=inputs, value=inputs, key=inputs, attention_mask=padding_mask
        )
        proj_input = self.layernorm_1(inputs + attention_output)
        return self.layernorm_2(proj_input + self.dense_proj(proj_input))


class TransformerDecoder(layers.Layer):
    def __init__(self, embed_dim, latent_dim, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.attention_1 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.attention_2 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.dense_proj = keras.Sequential(
            [layers.Dense(latent_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()
        self.layernorm_3 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        inputs, encoder_outputs = inputs
        causal_mask = self.get_causal_attention_mask(inputs)
        inputs_padding_mask, encoder_outputs_padding_mask = (None, None) if mask is None else mask
        attention_output_1 = self.attention_1(
            query=inputs,
            value=inputs,
            key=inputs,
            attention_mask=causal_mask,
            query_mask=inputs_padding_mask,
        )
        out_1 = self.layernorm_1(inputs + attention_output_1)
        attention_output_2 = self.attention_2(
            query=out_1,
            value=encoder_outputs,
            key=encoder_outputs,
            query_mask=inputs_padding_mask,
            key_mask=encoder_outputs_padding_mask,
        )
        out_2 = self.layernorm_2(out_1 + attention_output_2)
        return self.layernorm_3(out_2 + self.dense_proj(out_2))

    def get_causal_attention_mask(self, inputs):
        input_shape = ops.shape(inputs)
        batch_size, sequence_length = input_shape[0], input_shape[1]
        i = ops.arange(sequence_length)[:, None]
        j = ops.arange(sequence_length)
        mask = ops.reshape(ops.cast(i >= j, dtype="int32"), (1, sequence_length, sequence_length))
        return ops.tile(mask, [batch_size, 1, 1])


def _translator(vocabulary=17, length=6, embed_dim=8):
    encoder_inputs = keras.Input(shape=(None,), dtype="int64", name="encoder_inputs")
    x = PositionalEmbedding(length, vocabulary, embed_dim)(encoder_inputs)
    encoder_outputs = TransformerEncoder(embed_dim, 16, 2)(x)
    decoder_inputs = keras.Input(shape=(None,), dtype="int64", name="decoder_inputs")
    encoded_seq_inputs = keras.Input(shape=(None, embed_dim), name="decoder_state_inputs")
    x = PositionalEmbedding(length, vocabulary, embed_dim)(decoder_inputs)
    x = TransformerDecoder(embed_dim, 16, 2)([x, encoder_outputs])
    x = layers.Dropout(0.0)(x)
    decoder_outputs = layers.Dense(vocabulary, activation="softmax")(x)
    del encoded_seq_inputs
    return keras.Model(
        {"encoder_inputs": encoder_inputs, "decoder_inputs": decoder_inputs}, decoder_outputs
    )


@entry(
    FAMILY, "translation: sequence-to-sequence Transformer, padding masks", mixed=True, fused=True
)
def translation_transformer():
    source, target = _padded_tokens(10, 6, 17), _padded_tokens(10, 7, 17, seed=1)
    x = {"encoder_inputs": source, "decoder_inputs": target[:, :-1]}
    return Case(
        _translator(),
        x,
        target[:, 1:],
        loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
        metrics=["accuracy"],
        micro_batches=4,
        trainer={"loss_scale": 256.0},
    )


@entry(FAMILY, "text classification: bidirectional LSTM, mask_zero", mixed=True)
def bidirectional_lstm():
    inputs = keras.Input(shape=(None,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    x = _padded_tokens(10, 7, 30)
    y = np.arange(10) % 3 == 0
    return Case(
        model,
        x,
        y.astype("float32"),
        loss="binary_crossentropy",
        metrics=["accuracy"],
        micro_batches=4,
    )


def _by_padded_batches(length):
    tokens = _padded_tokens(12, 9, 20)
    y = (np.arange(12) % 3 == 0).astype("float32")[:, None]
    inputs = keras.Input(shape=(None,), dtype="int32")
    h = layers.Bidirectional(layers.GRU(4))(layers.Embedding(20, 6, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(h))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)

    def batches(size):
        sentences = tf.data.Dataset.from_tensor_slices(
            (tf.RaggedTensor.from_tensor(tokens, padding=0), y)
        )
        dense = sentences.map(lambda x, y: (tf.convert_to_tensor(x), y))
        return dense.padded_batch(size, padded_shapes=([length], [1]))

    def theirs():
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
        return {k: v[-1] for k, v in model.fit(batches(12), verbose=0).history.items()}

    def ours():
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), loss, gradient_accumulation_steps=3)
        return {k: v[-1] for k, v in trainer.fit(batches(4), verbose=0).history.items()}

    return Steps(model.trainable_variables, ours, theirs)


@entry(
    FAMILY,
    "text classification: padded_batch to the longest sentence of each micro-batch",
)
def padded_batches_of_other_lengths():
    return _by_padded_batches(None)


@entry(FAMILY, "text classification: padded_batch to one length, bidirectional GRU, mask_zero")
def padded_batches():
    return _by_padded_batches(9)


@entry(FAMILY, "text classification: Transformer block", mixed=True, fused=True)
def transformer_block():
    inputs = keras.Input(shape=(6,), dtype="int32")
    x = PositionalEmbedding(6, 20, 8)(inputs)
    x = TransformerEncoder(8, 8, 2)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dense(8, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    x = _padded_tokens(9, 6, 20)
    return Case(
        model,
        x,
        np.arange(9) % 2,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        micro_batches=2,
    )


@entry(
    FAMILY,
    "lstm_seq2seq: LSTM(return_state=True) into the decoder's initial_state, mask_zero on both "
    "sides",
)
def lstm_seq2seq():
    encoder_inputs = keras.Input(shape=(None,), dtype="int32")
    encoded = layers.Embedding(11, 6, mask_zero=True)(encoder_inputs)
    _, state_h, state_c = layers.LSTM(5, return_state=True)(encoded)
    decoder_inputs = keras.Input(shape=(None,), dtype="int32")
    decoded = layers.Embedding(13, 6, mask_zero=True)(decoder_inputs)
    decoder_outputs, _, _ = layers.LSTM(5, return_sequences=True, return_state=True)(
        decoded, initial_state=[state_h, state_c]
    )
    decoder_outputs = layers.Dense(13, activation="softmax")(decoder_outputs)
    model = keras.Model([encoder_inputs, decoder_inputs], decoder_outputs)
    target = _padded_tokens(10, 6, 13, seed=3)
    return Case(
        model,
        [_padded_tokens(10, 5, 11), target[:, :-1]],
        keras.utils.to_categorical(target[:, 1:], 13),
        loss="categorical_crossentropy",
        metrics=["accuracy"],
        micro_batches=4,
    )


@entry(FAMILY, "addition_rnn: RepeatVector and TimeDistributed")
def addition_rnn():
    model = keras.Sequential(
        [
            layers.Input((5, 7)),
            layers.LSTM(6),
            layers.RepeatVector(3),
            layers.LSTM(6, return_sequences=True),
            layers.TimeDistributed(layers.Dense(7, activation="softmax")),
        ]
    )
    rng = np.random.default_rng(0)
    x = keras.utils.to_categorical(rng.integers(0, 7, (9, 5)), 7)
    y = keras.utils.to_categorical(rng.integers(0, 7, (9, 3)), 7)
    return Case(model, x, y, loss="categorical_crossentropy", metrics=["accuracy"], micro_batches=2)


@entry(
    FAMILY,
    "miniature GPT: outputs [logits, features], loss=[fn, None], one y",
    quick=True,
    fused=True,
)
def miniature_gpt():
    inputs = keras.Input(shape=(5,), dtype="int32")
    x = PositionalEmbedding(5, 12, 8)(inputs)
    attention = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attention)
    outputs = layers.Dense(12)(x)
    model = keras.Model(inputs=inputs, outputs=[outputs, x])
    tokens = np.random.default_rng(0).integers(1, 12, (7, 6)).astype("int32")
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(
        model,
        tokens[:, :-1],
        tokens[:, 1:],
        loss=[loss_fn, None],
        micro_batches=3,
        compare_logs=False,
    )


class MaskedLanguageModel(keras.Model):
    """masked_language_modeling.py"""

    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
    loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = self.loss_fn(y, y_pred, sample_weight)
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return keras.ops.sum(loss)

    def compute_metrics(self, x, y, y_pred, sample_weight):
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def _masked_language_data():
    rng = np.random.default_rng(0)
    y = rng.integers(3, 14, (8, 6)).astype("int32")
    hidden = rng.random((8, 6)) < np.linspace(0.1, 0.6, 8)[:, None]
    hidden[:, 0] = True
    return np.where(hidden, 2, y), y, hidden.astype("float32")


def _masked_language_model(model_class):
    inputs = keras.Input((6,), dtype="int64")
    x = PositionalEmbedding(6, 14, 8)(inputs)
    x = TransformerEncoder(8, 16, 2)(x)
    return model_class(inputs, layers.Dense(14, activation="softmax")(x), name="masked_bert_model")


@entry(FAMILY, "masked language model: weights mark the masked tokens", mixed=True, fused=True)
def masked_language_model():
    x, y, weight = _masked_language_data()
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    return Case(
        _masked_language_model(keras.Model), x, y, sample_weight=weight, loss=loss, micro_batches=4
    )


@entry(
    FAMILY,
    "token classification: a loss that returns sum(loss * mask) / sum(mask)",
    note="The ratio is that of each micro-batch, as a warning says. Compared with a loop over micro-batches.",
    fused=True,
)
def non_padding_token_loss():
    class CustomNonPaddingTokenLoss(keras.losses.Loss):
        def __init__(self, name="custom_ner_loss"):
            super().__init__(name=name)

        def call(self, y_true, y_pred):
            loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
            loss = loss_fn(y_true, y_pred)
            mask = ops.cast((y_true > 0), dtype="float32")
            loss = loss * mask
            return ops.sum(loss) / ops.sum(mask)

    case = _token_classifier(CustomNonPaddingTokenLoss())
    return dataclasses.replace(case, micro_batches=2, by_micro_batch=True)


def _token_classifier(loss, **options):
    inputs = keras.Input((6,), dtype="int64")
    x = PositionalEmbedding(6, 14, 8)(inputs)
    x = TransformerEncoder(8, 16, 2)(x)
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
    x = _padded_tokens(10, 6, 14)
    y = np.where(x > 0, 1 + x % 4, 0)
    return Case(model, x, y, loss=loss, micro_batches=4, **options)


@entry(FAMILY, "token classification: the same with the mask as sample_weight", fused=True)
def non_padding_token_weights():
    case = _token_classifier(
        keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    )
    case.sample_weight = (case.y > 0).astype("float32")
    return case


@entry(FAMILY, "token classification: ignore_class=-100", fused=True)
def ignore_class():
    case = _token_classifier(keras.losses.SparseCategoricalCrossentropy(ignore_class=-100))
    case.y = np.where(case.y == 0, -100, case.y)
    return case


def _sentences(rows=10):
    words = ["good", "bad", "film", "plot", "actor", "great", "poor", "fine", "dull", "story"]
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, 2 + i % 5)) for i in range(rows)], (
        np.arange(rows) % 2
    ).astype("float32")


def _vectorizer():
    vectorizer = layers.TextVectorization(
        max_tokens=20, output_mode="int", output_sequence_length=6
    )
    vectorizer.adapt(tf.constant(_sentences()[0]))
    return vectorizer


def _text_cnn(inputs):
    x = layers.Embedding(20, 6)(inputs)
    x = layers.Conv1D(5, 3, padding="valid", activation="relu", strides=1)(x)
    x = layers.GlobalMaxPooling1D()(x)
    return layers.Dense(1, activation="sigmoid", name="predictions")(x)


@entry(FAMILY, "text classification from scratch: TextVectorization in tf.data", quick=True)
def vectorization_in_the_pipeline():
    texts, labels = _sentences()
    vectorizer = _vectorizer()
    inputs = keras.Input(shape=(None,), dtype="int64")
    model = keras.Model(inputs, _text_cnn(inputs))

    def dataset(size):
        raw = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(size)
        return (
            raw.map(lambda text, label: (vectorizer(tf.expand_dims(text, -1)), label))
            .cache()
            .prefetch(1)
        )

    def theirs():
        model.compile(
            loss="binary_crossentropy", optimizer="sgd", metrics=["accuracy"], jit_compile=False
        )
        return {k: v[-1] for k, v in model.fit(dataset(10), verbose=0).history.items()}

    def ours():
        trainer = fa.Trainer(
            model, "sgd", "binary_crossentropy", ["accuracy"], gradient_accumulation_steps=3
        )
        return {k: v[-1] for k, v in trainer.fit(dataset(4), verbose=0).history.items()}

    return Steps(model.trainable_variables, ours, theirs)


def _end_to_end_text_model():
    inputs = keras.Input(shape=(1,), dtype="string")
    return keras.Model(inputs, _text_cnn(_vectorizer()(inputs)))


@entry(
    FAMILY,
    "text classification from scratch: TextVectorization in the model",
    refused="TextVectorization",
    why="Refused with `jit_compile=True`, as here; the default trains the model without XLA.",
)
def vectorization_in_the_model():
    texts, labels = _sentences()
    return Case(
        _end_to_end_text_model(), tf.constant(texts)[:, None], labels, loss="binary_crossentropy"
    )


@entry(
    FAMILY, "text classification from scratch: TextVectorization in the model, jit_compile=False"
)
def vectorization_in_the_model_without_xla():
    texts, labels = _sentences()
    return Case(
        _end_to_end_text_model(),
        tf.constant(texts)[:, None],
        labels,
        loss="binary_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
        micro_batches=4,
    )


@entry(FAMILY, "FNet encoder: Fourier transforms in place of attention")
def fnet():
    class FNetEncoder(layers.Layer):
        def __init__(self, embed_dim, dense_dim, **kwargs):
            super().__init__(**kwargs)
            self.dense_proj = keras.Sequential(
                [layers.Dense(dense_dim, activation="relu"), layers.Dense(embed_dim)]
            )
            self.layernorm_1 = layers.LayerNormalization()
            self.layernorm_2 = layers.LayerNormalization()

        def call(self, inputs):
            real_part, _ = ops.fft2((inputs, ops.zeros_like(inputs)))
            proj_input = self.layernorm_1(inputs + real_part)
            return self.layernorm_2(proj_input + self.dense_proj(proj_input))

    inputs = keras.Input(shape=(8,), dtype="int32")
    x = FNetEncoder(8, 16)(PositionalEmbedding(8, 20, 8)(inputs))
    model = keras.Model(inputs, layers.Dense(20)(x))
    tokens = np.random.default_rng(0).integers(1, 20, (6, 9)).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(
        model, tokens[:, :-1], tokens[:, 1:], loss=loss, metrics=["accuracy"], micro_batches=3
    )


def _load_balanced_loss(router_probs, expert_mask):
    num_experts = ops.shape(expert_mask)[-1]
    density = ops.mean(expert_mask, axis=0)
    density_proxy = ops.mean(router_probs, axis=0)
    return ops.mean(density_proxy * density) * ops.cast((num_experts**2), "float32")


class Router(layers.Layer):
    def __init__(self, num_experts, expert_capacity):
        super().__init__()
        self.num_experts = num_experts
        self.route = layers.Dense(units=num_experts)
        self.expert_capacity = expert_capacity

    def call(self, inputs, training=False):
        router_probs = keras.activations.softmax(self.route(inputs), axis=-1)
        expert_gate, expert_index = ops.top_k(router_probs, k=1)
        expert_mask = ops.one_hot(expert_index, self.num_experts)
        self.add_loss(_load_balanced_loss(router_probs, expert_mask))
        position_in_expert = ops.cast(ops.cumsum(expert_mask, axis=0) * expert_mask, "int32")
        expert_mask *= ops.cast(
            ops.less(ops.cast(position_in_expert, "int32"), self.expert_capacity), "float32"
        )
        expert_mask_flat = ops.sum(expert_mask, axis=-1)
        expert_gate *= expert_mask_flat
        combined_tensor = ops.expand_dims(
            expert_gate
            * expert_mask_flat
            * ops.squeeze(ops.one_hot(expert_index, self.num_experts), 1),
            -1,
        ) * ops.squeeze(ops.one_hot(position_in_expert, self.expert_capacity), 1)
        return ops.cast(combined_tensor, "float32"), combined_tensor


class Switch(layers.Layer):
    def __init__(self, num_experts, embed_dim, num_tokens_per_batch):
        super().__init__()
        self.num_experts, self.embed_dim = num_experts, embed_dim
        self.experts = [
            keras.Sequential([layers.Dense(embed_dim, activation="relu"), layers.Dense(embed_dim)])
            for _ in range(num_experts)
        ]
        self.expert_capacity = num_tokens_per_batch // num_experts
        self.router = Router(num_experts, self.expert_capacity)
        self.num_tokens_per_batch = num_tokens_per_batch

    def call(self, inputs):
        batch_size = ops.shape(inputs)[0]
        num_tokens_per_example = ops.shape(inputs)[1]
        inputs = ops.reshape(inputs, [self.num_tokens_per_batch, self.embed_dim])
        dispatch_tensor, combine_tensor = self.router(inputs)
        expert_inputs = ops.einsum("ab,acd->cdb", inputs, dispatch_tensor)
        expert_inputs = ops.reshape(
            expert_inputs, [self.num_experts, self.expert_capacity, self.embed_dim]
        )
        expert_outputs = [
            self.experts[idx](expert_input)
            for idx, expert_input in enumerate(ops.unstack(expert_inputs, axis=0))
        ]
        combined = ops.einsum("abc,xba->xc", ops.stack(expert_outputs, axis=1), combine_tensor)
        return ops.reshape(combined, [batch_size, num_tokens_per_example, self.embed_dim])


@entry(
    FAMILY,
    "Switch Transformer: mixture of experts with a load-balancing add_loss",
    note="The experts' load and capacity depend on the micro-batch. Compared with a loop over micro-batches.",
    fused=True,
)
def switch_transformer():
    inputs = keras.Input(shape=(4,), dtype="int32")
    x = PositionalEmbedding(4, 20, 8)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    x = layers.LayerNormalization()(x + Switch(2, 8, 4 * 4)(x))
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    x = np.random.default_rng(0).integers(1, 20, (8, 4)).astype("int32")
    return Case(
        model, x, np.arange(8) % 2, loss="sparse_categorical_crossentropy", by_micro_batch=True
    )


@entry(
    FAMILY,
    "babi memory network: attention over an embedded story, then an LSTM",
    tolerance=1e-4,
    note="Keras updates an embedding's row once for each time that its id occurs, and rounds each time. Its "
    "step differs from float64 by 3e-6, ours by 4e-8.",
)
def memory_network():
    story_maxlen, query_maxlen, vocab_size = 6, 3, 12
    input_sequence = keras.Input((story_maxlen,), dtype="int32")
    question = keras.Input((query_maxlen,), dtype="int32")
    input_encoded_m = layers.Embedding(vocab_size, 8)(input_sequence)
    input_encoded_c = layers.Embedding(vocab_size, query_maxlen)(input_sequence)
    question_encoded = layers.Embedding(vocab_size, 8)(question)
    match = layers.Dot(axes=(2, 2))([input_encoded_m, question_encoded])
    match = layers.Activation("softmax")(match)
    response = layers.Permute((2, 1))(layers.Add()([match, input_encoded_c]))
    answer = layers.LSTM(6)(layers.Concatenate()([response, question_encoded]))
    model = keras.Model(
        [input_sequence, question], layers.Dense(vocab_size, activation="softmax")(answer)
    )
    rng = np.random.default_rng(0)
    x = [rng.integers(0, vocab_size, (9, n)).astype("int32") for n in (story_maxlen, query_maxlen)]
    y = rng.integers(0, vocab_size, 9)
    return Case(
        model, x, y, loss="sparse_categorical_crossentropy", metrics=["accuracy"], micro_batches=2
    )


@entry(FAMILY, "pretrained word embeddings: a frozen Embedding under Conv1D")
def pretrained_embeddings():
    matrix = np.random.default_rng(0).normal(size=(15, 6)).astype("float32")
    embedding_layer = layers.Embedding(15, 6, trainable=False)
    embedding_layer.build((1,))
    embedding_layer.set_weights([matrix])
    inputs = keras.Input(shape=(None,), dtype="int32")
    x = layers.Conv1D(5, 3, activation="relu")(embedding_layer(inputs))
    x = layers.GlobalMaxPooling1D()(x)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    return Case(
        model,
        _padded_tokens(8, 7, 15),
        np.arange(8) % 3,
        loss="sparse_categorical_crossentropy",
        metrics=["acc"],
        optimizer=lambda: keras.optimizers.RMSprop(1e-2, epsilon=1e-3),
        micro_batches=3,
    )


@entry(FAMILY, "sentence embeddings: a shared encoder, cosine similarity of two sentences")
def siamese_sentences():
    inputs = keras.Input((6,), dtype="int32")
    h = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8, mask_zero=True)(inputs))
    encoder = keras.Model(inputs, layers.UnitNormalization(axis=1)(layers.Dense(5)(h)))
    sentences = keras.Input((2, 6), dtype="int32", name="sentences")
    u, v = encoder(sentences[:, 0]), encoder(sentences[:, 1])
    model = keras.Model(sentences, layers.Dot(axes=1)([u, v]))
    x = _padded_tokens(20, 6, 20).reshape(10, 2, 6)
    y = np.random.default_rng(0).uniform(-1, 1, (10, 1)).astype("float32")
    return Case(model, x, y, loss="mse", micro_batches=4)


@entry(FAMILY, "masked language model: compute_loss that sums weighted losses, compute_metrics")
def masked_language_model_compute_loss():
    x, y, weight = _masked_language_data()
    return Case(
        _masked_language_model(MaskedLanguageModel),
        x,
        y,
        sample_weight=weight,
        trainer={"own_loss_reduction": "sum"},
        micro_batches=4,
    )
