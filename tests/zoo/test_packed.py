"""Models of KerasHub on packed rows: an update is that on each document by itself."""

import documents_alone
import keras
import numpy as np
import pytest

import fastaccum as fa

hub = pytest.importorskip("keras_hub").models
VOCABULARY, LENGTH = 32, 24
SIZES = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 24,
}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
LEARNED = {"num_heads": 2, "dropout": 0.0, "max_sequence_length": LENGTH}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RNG = np.random.default_rng(0)
DOCUMENTS = [
    RNG.integers(1, VOCABULARY, length).astype("int32")
    for length in (5, 1, 9, 24, 3, 7, 12, 2, 30, 6, 8)
]


def _causal(name, **options):
    backbone = getattr(hub, f"{name}Backbone")(**SIZES, **options)
    return getattr(hub, f"{name}CausalLM")(backbone=backbone, preprocessor=None)


def _bert():
    backbone = hub.BertBackbone(**SIZES, **LEARNED)
    outputs = keras.layers.Dense(VOCABULARY)(backbone.output["sequence_output"])
    return keras.Model(backbone.input, outputs)


def _gemma2():
    return _causal(
        "Gemma",
        **GROUPED,
        head_dim=4,
        attention_logit_soft_cap=50,
        final_logit_soft_cap=30,
        use_sliding_window_attention=True,
        sliding_window_size=4,
    )


def _gemma_lora():
    model = _gemma2()
    model.backbone.enable_lora(rank=2)
    for weight in model.trainable_weights:  # lora_b starts at zero
        if "lora_kernel_b" in weight.path or "lora_embeddings_b" in weight.path:
            weight.assign(np.random.default_rng(0).normal(0, 0.1, weight.shape))
    return model


MODELS = {
    "Llama": lambda: _causal("Llama", **GROUPED),
    "Mistral": lambda: _causal("Mistral", **GROUPED, sliding_window=3),
    "Gemma 2": _gemma2,
    "Gemma 2, LoRA": _gemma_lora,
    "Gemma 3": lambda: _causal("Gemma3", **GROUPED, head_dim=4, image_size=16),
    "Qwen": lambda: _causal("Qwen", **GROUPED),
    "Qwen 3": lambda: _causal("Qwen3", **GROUPED, head_dim=4),
    "Phi-3": lambda: _causal("Phi3", **GROUPED),
    "GPT-2": lambda: _causal("GPT2", **LEARNED),
    "GPT-NeoX": lambda: _causal("GPTNeoX", **LEARNED),
    "OPT": lambda: _causal("OPT", **LEARNED),
    "Bloom": lambda: _causal("Bloom", num_heads=2),
    "Falcon": lambda: _causal(
        "Falcon",
        num_attention_heads=2,
        attention_dropout_rate=0.0,
        feedforward_dropout_rate=0.0,
    ),
    "BERT": _bert,
}


def _inputs(name, ids):
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    if name == "BERT":
        inputs["segment_ids"] = np.zeros_like(ids)
    return inputs


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.sample] if name in ("Llama", "GPT-2") else [])
        for name in MODELS
    ],
)
def test_an_update_is_that_of_the_documents_alone(name):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    before = [variable.numpy() for variable in model.trainable_variables]
    expected, _ = documents_alone.expected_update(
        model, DOCUMENTS, LENGTH, lambda ids: _inputs(name, ids)
    )
    rows = fa.pack([_inputs(name, document) for document in DOCUMENTS], LENGTH)
    trainer = fa.Trainer(
        model,
        keras.optimizers.SGD(documents_alone.RATE),
        LOSS,
        gradient_accumulation_steps=len(list(rows)),
    )
    trainer.fit(rows.batch(1), verbose=0)
    assert documents_alone.update_error(before, expected, model) < 1e-5
