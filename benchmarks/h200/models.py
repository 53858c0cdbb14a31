"""Train steps of models of Keras and KerasHub, with their attention fused and unfused.

All but Keras's own need KerasHub (`pip install -e ".[test,h200,zoo]"`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

import fastaccum as fa
from benchmarks.h200 import programs, roofline
from benchmarks.support.stablehlo import FLOAT8_FLAGS, h200

Policy = str | Sequence[str] | None  # of `fa.remat`
VOCABULARY = 50_304
WIDTH = 2048
HEADS = 16
BERT_VOCABULARY = 30_522
SIZES = {"vocabulary_size": VOCABULARY, "hidden_dim": WIDTH, "intermediate_dim": 4 * WIDTH}
GROUPED = {"num_query_heads": HEADS, "num_key_value_heads": 4}


def keras_gpt(layers: int, context: int) -> keras.Model:
    """Builds a GPT of `keras.layers.MultiHeadAttention`."""
    ids = keras.Input((context,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(ids)
    for _ in range(layers):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h, use_causal_mask=True)
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(h))
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(ids, keras.layers.Dense(VOCABULARY, use_bias=False)(x))


def _hub(name: str, **options: Any) -> Callable[[int, int], keras.Model]:
    def make(layers: int, context: int) -> keras.Model:
        from keras_hub import models

        length = {"max_sequence_length": context} if name == "GPT2" else {}
        backbone = getattr(models, f"{name}Backbone")(
            num_layers=layers, **SIZES, **options, **length
        )
        return getattr(models, f"{name}CausalLM")(backbone)

    return make


def bert(layers: int, context: int, dropout: float = 0.1) -> keras.Model:
    """Builds KerasHub's classifier of BERT base's width; 0.1 is its default dropout."""
    from keras_hub import models

    sizes = {
        "vocabulary_size": BERT_VOCABULARY,
        "num_heads": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
    }
    backbone = models.BertBackbone(
        num_layers=layers, **sizes, max_sequence_length=context, dropout=dropout
    )
    return models.BertTextClassifier(backbone, num_classes=2, dropout=dropout)


def own_gpt(layers: int, context: int) -> keras.Model:
    """Builds `fa.gpt` of plain layers, for comparison."""
    return fa.gpt(VOCABULARY, context, WIDTH, layers, HEADS, tied=True, stacked=False)


OF_IDS = ("keras-gpt", "fa.gpt")  # models whose only input is ids
MODELS: dict[str, Callable[[int, int], keras.Model]] = {
    "fa.gpt": own_gpt,
    "keras-gpt": keras_gpt,
    "gpt2": _hub("GPT2", num_heads=HEADS, dropout=0.0),
    "gpt2-dropout": _hub("GPT2", num_heads=HEADS),  # 0.1 by default
    "bert": functools.partial(bert, dropout=0.0),
    "bert-dropout": bert,
    "llama": _hub("Llama", num_query_heads=HEADS, num_key_value_heads=HEADS),
    "mistral": _hub("Mistral", **GROUPED, sliding_window=4096),
    "qwen": _hub("Qwen", **GROUPED),
    "gemma2": _hub(
        "Gemma",
        num_query_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        attention_logit_soft_cap=50,
        use_sliding_window_attention=True,
    ),
    "gemma": _hub("Gemma", num_query_heads=8, num_key_value_heads=4, head_dim=256),
}


def compile_step(
    name: str,
    layers: int,
    batch: int,
    context: int,
    flash_attention: Any = "auto",
    policy: Policy = None,
    float8: bool = False,
) -> programs.Compiled:
    """Compiles a train step of 8 micro-batches in mixed_bfloat16, with AdamW, clipping, accuracy.

    Args:
        name: of a model.
        layers, batch, context: the sizes.
        flash_attention: of the trainer.
        policy: of `fa.remat`.
        float8: of the trainer.
    """
    flags = FLOAT8_FLAGS if float8 else {}
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with h200.weightless():
            model = fa.remat(MODELS[name](layers, context), policy)
            ids = np.zeros((8, batch, context), "int32")
            is_classifier = name.startswith("bert")
            x: Any = ids
            y = ids
            loss = fa.LinearCrossEntropy()
            if name not in OF_IDS:
                x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
            if is_classifier:
                x["segment_ids"] = ids
                y = ids[..., 0]
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainer = fa.Trainer(
                model,
                keras.optimizers.AdamW(3e-4, weight_decay=0.1),
                loss,
                weighted_metrics=["accuracy"],
                clip_norm=1.0,
                flash_attention=flash_attention,
                float8=float8,
            )
            program = programs.of_trainer(trainer, (x, y), **flags)
            inner = 0  # parameters of products, without the head's
            for weight in model.trainable_variables:
                if weight.path.endswith("kernel") and VOCABULARY not in weight.shape:
                    inner += math.prod(weight.shape)
    finally:
        keras.config.set_dtype_policy(before)
        keras.backend.clear_session()
    # A token takes 6 for each parameter of a product, and 6 for each layer, channel and position of
    # causal attention.
    per_token = 6 * (inner + VOCABULARY * WIDTH) + 6 * layers * WIDTH * context
    if is_classifier:  # no head over the vocabulary, and every token sees every other
        per_token = 6 * inner + 12 * layers * 768 * context
    return dataclasses.replace(program, flops=float(ids.size * per_token))


def table(
    names: Iterable[str],
    rates: roofline.Rates,
    sizes: Sequence[int],
    policies: Sequence[Policy] = (),
) -> Iterator[str]:
    """Yields a table in Markdown: MFU and temporary memory of each model, unfused and fused.

    With policies of `fa.remat`, the table has the fused model with each of them instead.
    """
    forms: dict[str, dict[str, Any]] = {_title(policy): {"policy": policy} for policy in policies}
    if not forms:
        forms = {"unfused": {"flash_attention": False}, "fused": {}}
    layers, batch, context = sizes
    header = [f"{layers} layers, {batch} x {context:,} tokens"]
    header += [f"MFU, {form}" for form in forms]
    header += [f"temp GB, {form}" for form in forms]
    yield f"| {' | '.join(header)} |"
    yield f"| --- |{' ---: |' * (len(header) - 1)}"
    for name in names:
        mfu = []
        gigabytes = []
        for form in forms.values():
            step = compile_step(name, layers, batch, context, **form)
            prediction = roofline.predict(step.kernels, rates)
            mfu.append(f"{prediction.mfu(step.flops or 0):.0%}")
            gigabytes.append(f"{step.memory.temp_bytes / 1e9:.1f}")
        yield f"| {' | '.join([name, *mfu, *gigabytes])} |"


def _title(policy: Policy) -> str:
    if isinstance(policy, str):
        return policy
    return ", ".join(policy or ["nothing recomputed"])
