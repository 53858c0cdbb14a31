"""Train steps of models that people bring, of Keras and KerasHub, with their attention fused and as
it is.

Needs KerasHub (`pip install -e ".[test,h200,zoo]"`) for all but Keras's own.
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
from benchmarks.support.stablehlo import h200

Policy = str | Sequence[str] | None  # of `fa.remat`
VOCABULARY, WIDTH, HEADS = 50_304, 2048, 16
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
    return keras.Model(
        ids, keras.layers.Dense(VOCABULARY, use_bias=False)(keras.layers.LayerNormalization()(x))
    )


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
    """Builds KerasHub's classifier of BERT base's width; the dropout of 0.1 is that which it has by
    default.
    """
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
    """Builds `fa.gpt` of plain layers, which the others are compared with."""
    return fa.gpt(VOCABULARY, context, WIDTH, layers, HEADS, tied=True, stacked=False)


OF_IDS = "keras-gpt", "fa.gpt"  # models whose one input is ids
MODELS: dict[str, Callable[[int, int], keras.Model]] = {
    "fa.gpt": own_gpt,
    "keras-gpt": keras_gpt,
    "gpt2": _hub("GPT2", num_heads=HEADS, dropout=0.0),
    "gpt2-dropout": _hub("GPT2", num_heads=HEADS),  # 0.1, as it is by default
    "bert": functools.partial(bert, dropout=0.0),
    "bert-dropout": bert,  # as it is by default
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
) -> programs.Compiled:
    """Compiles a train step of 8 micro-batches: mixed_bfloat16, AdamW, clipping, accuracy and, but
    for the classifiers, `fa.LinearCrossEntropy`; `policy` is that of `fa.remat`.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with h200.weightless():
            model = fa.remat(MODELS[name](layers, context), policy)
            classifies = name.startswith("bert")
            loss = (
                keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                if classifies
                else fa.LinearCrossEntropy()
            )
            optimizer = keras.optimizers.AdamW(3e-4, weight_decay=0.1)
            options = {"clip_norm": 1.0, "flash_attention": flash_attention}
            trainer = fa.Trainer(model, optimizer, loss, weighted_metrics=["accuracy"], **options)
            ids = np.zeros((8, batch, context), "int32")
            x = ids if name in OF_IDS else {"token_ids": ids, "padding_mask": np.ones_like(ids)}
            x = {**x, "segment_ids": ids} if classifies else x
            program = programs.of_trainer(trainer, (x, ids[..., 0] if classifies else ids))
            kernels = (w.shape for w in model.trainable_variables if w.path.endswith("kernel"))
            inner = sum(math.prod(shape) for shape in kernels if VOCABULARY not in shape)
    finally:
        keras.config.set_dtype_policy(before)
        keras.backend.clear_session()
    # Of a token: 6 for each parameter of a product, and for each layer, channel and position of
    # causal attention.
    per_token = 6 * (inner + VOCABULARY * WIDTH) + 6 * layers * WIDTH * context
    if classifies:  # no head over the vocabulary, and every token sees every other
        per_token = 6 * inner + 12 * layers * 768 * context
    return dataclasses.replace(program, flops=float(ids.size * per_token))


def table(
    names: Iterable[str],
    rates: roofline.Rates,
    sizes: Sequence[int],
    policies: Sequence[Policy] = (),
) -> Iterator[str]:
    """Yields the lines of a table in Markdown: MFU and temporary memory of each model, fused and as
    it is; or fused, with each of the policies of `fa.remat`.
    """
    named = [
        each if isinstance(each, str) else ", ".join(each or ["nothing recomputed"])
        for each in policies
    ]
    forms = {name: {"policy": policy} for name, policy in zip(named, policies, strict=True)}
    forms = forms or {"unfused": {"flash_attention": False}, "fused": {}}
    layers, batch, context = sizes
    titles = [f"{what}, {form}" for what in ("MFU", "temp GB") for form in forms]
    yield f"| {' | '.join([f'{layers} layers, {batch} x {context:,} tokens', *titles])} |"
    yield f"| --- |{' ---: |' * len(titles)}"
    for name in names:
        steps = [compile_step(name, *sizes, **form) for form in forms.values()]
        mfu = [
            f"{roofline.predict(step.kernels, rates).mfu(step.flops or 0):.0%}" for step in steps
        ]
        gigabytes = [f"{step.memory.temp_bytes / 1e9:.1f}" for step in steps]
        yield f"| {' | '.join([name, *mfu, *gigabytes])} |"
