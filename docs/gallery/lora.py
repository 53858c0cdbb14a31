# %% [markdown]
"""
# Fine-tune a KerasHub model with LoRA

LoRA leaves the weights of a model as they are, and trains small matrices beside them. This page
fine-tunes a Gemma of KerasHub in this way, with gradient accumulation, and saves what was trained
in a file of its own.

You would begin with `keras_hub.models.GemmaCausalLM.from_preset("gemma_2b_en")`, which downloads
trained weights. So that this page needs no download, it makes a very small Gemma, trains that on
Python code, and then fine-tunes it on English. You need `keras-hub` and `matplotlib`.
"""

# %%
import importlib
import inspect
import math
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np

import fastaccum as fa

# %% [markdown]
# ## Two texts
#
# The code is that of a few modules of Python's standard library. The English is the text of Python's manual, which
# `help()` shows. The model works on bytes, in windows of 64.
#
# A language model of KerasHub takes a dictionary of token ids and of a mask, which is 1 where there is a token. Its
# preprocessor would make both from text.

# %%
CONTEXT = 64


def windows(text):
    data = np.frombuffer(text.encode(), np.uint8).astype("int32")
    cut = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    ids = cut[:, :-1]
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}, cut[:, 1:]


def rows(data, start, stop):
    x, y = data
    return {name: values[start:stop] for name, values in x.items()}, y[start:stop]


modules = ["argparse", "doctest", "inspect", "logging", "pickle", "typing"]
code = rows(
    windows("".join(inspect.getsource(importlib.import_module(name)) for name in modules)),
    0,
    60 * 64,
)
manual = windows("\n".join(topics.values()))
english_test, english = rows(manual, 0, 256), rows(manual, 256, 256 + 45 * 64)
print(f"{len(code[1]):,} windows of code, {len(english[1]):,} of English")

# %% [markdown]
# ## The base model
#
# This model stands for the one that you would download.

# %%
keras.utils.set_random_seed(0)
backbone = keras_hub.models.GemmaBackbone(
    vocabulary_size=256,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    hidden_dim=64,
    intermediate_dim=256,
)
model = keras_hub.models.GemmaCausalLM(backbone)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

base_trainer = fa.Trainer(model, keras.optimizers.Adam(3e-3), loss, gradient_accumulation_steps=4)
base_trainer.fit(*code, batch_size=16, verbose=2)


def bits_per_byte(trainer):
    """Of English that no training has seen; 8 would be a blind guess."""
    return trainer.evaluate(*english_test, batch_size=64, verbose=0) / math.log(2)


before = bits_per_byte(base_trainer)
print(f"the base model, on English: {before:.2f} bits per byte")

# %% [markdown]
# ## LoRA
#
# `enable_lora` freezes the model and adds matrices of rank 8 to the layers named. Only these have gradients and a state
# in the optimizer. LoRA saves memory for each frozen weight, and accumulation saves memory for the rows of a batch.
#
# Make a new trainer after `enable_lora`, because it changes what is trained.

# %%
frozen = model.count_params()
layers = ["query", "key", "value", "attention_output", "ffw_gating", "ffw_gating_2", "ffw_linear"]
backbone.enable_lora(rank=8, target_layer_names=layers)
trained = model.count_params() - frozen
print(f"{trained:,} weights are trained, {frozen:,} are frozen")

trainer = fa.Trainer(model, keras.optimizers.Adam(1e-2), loss, gradient_accumulation_steps=4)
trainer.fit(*english, batch_size=16, verbose=2)
after = bits_per_byte(trainer)
print(f"with LoRA, on English: {after:.2f} bits per byte")
assert after < before

# %%
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
bars = axes.barh(["with LoRA", "base model"], [after, before], color=["tab:blue", "tab:gray"])
axes.bar_label(bars, fmt="%.2f", padding=4)
axes.set(xlabel="bits per byte, on English kept out of training", xlim=(0, before * 1.15))
axes.set_title(f"{trained:,} weights trained, {frozen:,} frozen")
plt.show()

# %% [markdown]
# ## Save what was trained
#
# `save_lora_weights` writes the LoRA matrices alone. `load_lora_weights` puts them back into the base model. To show
# this, the matrices are first set to zero, which gives the base model again.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "english.lora.h5")
    backbone.save_lora_weights(file)
    print(f"the file has {file.stat().st_size / 1024:.0f} KiB")

    for weight in model.trainable_weights:
        weight.assign(np.zeros(weight.shape))
    print(f"without the matrices: {bits_per_byte(trainer):.2f} bits per byte")
    backbone.load_lora_weights(file)
    restored = bits_per_byte(trainer)
np.testing.assert_allclose(restored, after, rtol=1e-5)
print(f"with those of the file: {restored:.2f} bits per byte")
