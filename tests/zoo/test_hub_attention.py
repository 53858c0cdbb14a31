"""Fused attention in KerasHub's decoders: one update with it and without, padded on either side."""

import math

import h200
import hlo
import keras
import numpy as np
import pytest

import fastaccum as fa
from fastaccum.kernels import attention
from fastaccum.layers import attention as adapter

hub = pytest.importorskip("keras_hub").models
pytestmark = [pytest.mark.zoo, pytest.mark.sample]

LENGTH, ROWS = 7, 8
SIZES = {"vocabulary_size": 23, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
HEADS, GROUPED = (
    {"num_heads": 2, "max_sequence_length": LENGTH},
    {"num_query_heads": 4, "num_key_value_heads": 2},
)
EXPERTS = {"num_experts": 3, "top_k": 2, "moe_intermediate_dim": 8}

FUSED = {
    "GPT-2": lambda: hub.GPT2Backbone(**SIZES, **HEADS, dropout=0.0),
    "GPT-NeoX": lambda: hub.GPTNeoXBackbone(**SIZES, **HEADS),
    "Gemma": lambda: hub.GemmaBackbone(**SIZES, **GROUPED, head_dim=4),
    "Gemma 2": lambda: hub.GemmaBackbone(
        **SIZES,
        **GROUPED,
        head_dim=4,
        attention_logit_soft_cap=0.5,
        use_sliding_window_attention=True,
        sliding_window_size=3,
    ),
    "Gemma 3 with a window": lambda: hub.Gemma3Backbone(
        **SIZES, **GROUPED, image_size=16, head_dim=4, vision_encoder=None, sliding_window_size=3
    ),
    "Gemma 3": lambda: hub.Gemma3Backbone(
        **SIZES,
        **GROUPED,
        image_size=16,
        head_dim=4,
        vision_encoder=None,
        sliding_window_size=LENGTH,
    ),
    "Llama": lambda: hub.LlamaBackbone(**SIZES, **GROUPED),
    "Llama 3": lambda: hub.Llama3Backbone(**SIZES, **GROUPED),
    "Mistral": lambda: hub.MistralBackbone(**SIZES, **GROUPED, sliding_window=LENGTH),
    "Mistral with a window": lambda: hub.MistralBackbone(**SIZES, **GROUPED, sliding_window=3),
    "Mixtral": lambda: hub.MixtralBackbone(
        **SIZES, **GROUPED, num_experts=3, sliding_window=LENGTH
    ),
    "Phi-3": lambda: hub.Phi3Backbone(**SIZES, **GROUPED),
    "Qwen": lambda: hub.QwenBackbone(**SIZES, **GROUPED),
    "Qwen with a window": lambda: hub.QwenBackbone(
        **SIZES, **GROUPED, use_sliding_window_attention=True, sliding_window_size=3
    ),
    "Qwen 3": lambda: hub.Qwen3Backbone(**SIZES, **GROUPED, head_dim=4),
}
DROPPING = {
    "GPT-2": lambda: hub.GPT2Backbone(**SIZES, **HEADS),
    "BERT": lambda: hub.BertBackbone(**SIZES, **HEADS),
    "GPT-NeoX": lambda: hub.GPTNeoXBackbone(**SIZES, **HEADS, dropout=0.1),
    "Gemma": lambda: hub.GemmaBackbone(**SIZES, **GROUPED, head_dim=4, dropout=0.1),
}


def trained(make, flash_attention, side="right", policy=None):
    """Trains one update, in XLA under a policy of `fa.remat`; returns the weights and what was
    chosen for layers.
    """
    keras.utils.set_random_seed(1)
    rng, backbone = np.random.default_rng(0), make()
    ids, present = (
        rng.integers(1, 23, (ROWS, LENGTH)),
        np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (ROWS, 1)),
    )
    present = present[:, ::-1] if side == "left" else present
    inputs = {
        "token_ids": ids,
        "padding_mask": present.astype("int32"),
        "segment_ids": np.zeros_like(ids),
    }
    inputs = {name: inputs[name] for name in backbone.input}
    output = (
        backbone.output["sequence_output"] if isinstance(backbone.output, dict) else backbone.output
    )
    logits = backbone.token_embedding(output, reverse=True)
    trainer = fa.Trainer(
        fa.remat(keras.Model(backbone.input, logits), policy),
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        gradient_accumulation_steps=2,
        jit_compile=policy is not None,
        flash_attention=flash_attention,
    )
    trainer.fit(inputs, ids, batch_size=ROWS // 2, shuffle=False, verbose=0)
    fused = trainer._builder.engine.objective.attention
    return backbone.get_weights(), set(fused.choices.values()) if fused else set()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FUSED)
def test_an_update_is_that_of_the_layers_own_formula(name, side):
    expected, _ = trained(FUSED[name], False, side)
    weights, choices = trained(FUSED[name], True, side)
    assert choices == {"fused: blockwise"}
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_that_of_the_unfused_formula_with_the_same_draw(monkeypatch, name):
    def unfused(*tensors, implementation, **options):
        assert options["dropout"] == 0.1
        return attention(*tensors, implementation="reference", **options)

    weights, choices = trained(DROPPING[name], True)
    monkeypatch.setattr(adapter, "attention", unfused)
    expected, _ = trained(DROPPING[name], True)
    assert choices == {"fused: blockwise"}
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Gemma 2", {"soft_cap": None}),
        ("Gemma 2", {"window": 4}),
        ("Mistral with a window", {"window": 4}),
        ("Qwen with a window", {"window": 2}),
    ],
)
def test_a_cap_that_is_dropped_and_a_window_off_by_one_are_seen(monkeypatch, name, wrong):
    monkeypatch.setattr(
        adapter, "attention", lambda *tensors, **options: attention(*tensors, **options | wrong)
    )
    weights, _ = trained(FUSED[name], True)
    expected, _ = trained(FUSED[name], False)
    assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) > 1e-4


@pytest.mark.parametrize("name", ["BERT", "Gemma 2", "GPT-2", "Llama"])
def test_attention_that_remat_keeps_changes_no_bit(name):
    """Padded, and with dropout where the model has it; XLA rounds a soft cap's tanh otherwise in
    another fusion.
    """
    (kept, choices), (again, _) = (
        trained((FUSED | DROPPING)[name], True, "left", policy)
        for policy in (["attention"], "nothing_saveable")
    )
    assert choices == {"fused: blockwise"}
    for a, b in zip(kept, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7 if name == "Gemma 2" else 0)


WIDE = {"vocabulary_size": 96, "num_layers": 1, "hidden_dim": 128, "intermediate_dim": 192}
TWO, ONE_OF_KEYS = {"num_heads": 2}, {"num_query_heads": 2, "num_key_value_heads": 1}
ON_A_GPU = {
    "GPT-2": lambda times: hub.GPT2Backbone(**WIDE, **TWO, max_sequence_length=times, dropout=0.0),
    "Gemma": lambda times: hub.GemmaBackbone(**WIDE, **ONE_OF_KEYS, head_dim=64),
    "Llama": lambda times: hub.LlamaBackbone(**WIDE, **ONE_OF_KEYS),
    "Mistral": lambda times: hub.MistralBackbone(**WIDE, **ONE_OF_KEYS, sliding_window=times),
    "Qwen": lambda times: hub.QwenBackbone(**WIDE, **ONE_OF_KEYS),
    "GPT-2 with dropout": lambda times: hub.GPT2Backbone(**WIDE, **TWO, max_sequence_length=times),
    "BERT with dropout": lambda times: hub.BertBackbone(**WIDE, **TWO, max_sequence_length=times),
}


def elements_of_pairs(name, flash_attention="auto"):
    """Compiles a padded step of 3 rows for an H200; returns the tokens, and of values of two axes
    of tokens the elements of the largest and the operations that compute them.
    """
    times = 320
    keras.config.set_dtype_policy("mixed_bfloat16")
    backbone = ON_A_GPU[name](times)
    output = (
        backbone.output["sequence_output"] if isinstance(backbone.output, dict) else backbone.output
    )
    model = keras.Model(backbone.input, backbone.token_embedding(output, reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(
        model, "sgd", loss, gradient_accumulation_steps=2, flash_attention=flash_attention
    )
    ids = np.ones((2, 3, times), "int32")
    text, _ = h200.compile_for_h200(
        h200.export_step(trainer, (dict.fromkeys(backbone.input, ids), ids))
    )
    if flash_attention:
        assert set(trainer._builder.engine.objective.attention.choices.values()) == {"fused: cudnn"}
    pairs = [value for value in hlo.Program(text).values if value.shape.count(times) > 1]
    return (
        times,
        max(math.prod(value.shape) for value in pairs),
        {value.instruction.opcode for value in pairs},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_GPU)
def test_no_scores_of_all_tokens_are_computed_on_a_gpu(name):
    """cuDNN reads a mask of two axes of tokens, of padding without an axis of heads, of dropout
    with one.
    """
    times, elements, opcodes = elements_of_pairs(name)
    assert elements == 3 * (2 if "dropout" in name else 1) * times**2 and "dot" not in opcodes


@pytest.mark.slow
def test_scores_of_all_tokens_are_seen_where_attention_is_unfused():
    times, elements, opcodes = elements_of_pairs("Llama", False)
    assert elements == 3 * 2 * times**2 and "dot" in opcodes


class Called(keras.layers.Layer):
    """Calls an attention layer of KerasHub."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return keras.ops.sum(
            self.layer(x, attention_mask=keras.ops.ones((x.shape[0] or 1, LENGTH, LENGTH))), 1
        )


def test_a_window_to_both_sides_is_left_to_the_layer():
    from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention

    options = {
        "use_sliding_window_attention": True,
        "use_bidirectional_attention": True,
        "sliding_window_size": LENGTH,
    }
    layer = CachedGemma3Attention(head_dim=4, num_query_heads=4, num_key_value_heads=2, **options)
    model = keras.Sequential([keras.Input((LENGTH, 8)), Called(layer)])
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False, flash_attention=True)
    x = np.random.default_rng(0).normal(size=(4, LENGTH, 8)).astype("float32")
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        trainer.fit(x, x[:, 0], batch_size=4, verbose=0)
