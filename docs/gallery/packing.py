# %% [markdown]
"""
# Pack short texts into rows

Texts of mixed length are mostly padding, if each gets a row of its own. This page trains a Llama of
KerasHub on 2,000 short texts of two kinds, several in a row, with `fa.pack` and `fa.mix`. None of
them sees another, and the update is the same as without padding.

So that this page needs no download, the texts are the docstrings and the comments of Python's
standard library, the model is very small, and it reads bytes. You need `keras-hub` and
`matplotlib`.
"""

# %%
import ast
import math
import re
import sysconfig
import time
from pathlib import Path

import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np

import fastaccum as fa

# %% [markdown]
# ## 2,000 texts
#
# A causal language model of KerasHub takes token ids and a mask that is 1 where there is a token. Its preprocessor makes
# both from text, and gives them to `fa.pack` in the same form.

# %%
docstrings, comments = [], []
for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
    source = path.read_text("utf-8", "ignore")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            docstrings.append(ast.get_docstring(node) or "")
    comments += re.findall(r"(?m)(?:^ *# ?\w.*\n)+", source)


def examples(texts, count):
    """Returns some of the texts as KerasHub's models take them, in an order of chance."""
    chosen = np.random.default_rng(0).permutation([text for text in texts if len(text) > 8])
    ids = [np.frombuffer(text.encode(), np.uint8).astype("int32") for text in chosen[:count]]
    return [{"token_ids": text, "padding_mask": np.ones_like(text)} for text in ids]


texts = {"docstrings": examples(docstrings, 1200), "comments": examples(comments, 1200)}
training = {name: of_kind[:1000] for name, of_kind in texts.items()}
held_out = [text for of_kind in texts.values() for text in of_kind[1000:]]
lengths = [len(text["token_ids"]) for of_kind in training.values() for text in of_kind]
print(
    f"{len(lengths):,} texts of {min(lengths)} to {max(lengths):,} bytes, median {np.median(lengths):.0f}"
)

# %% [markdown]
# ## Rows
#
# `fa.pack` puts texts into rows of 256 tokens, and cuts longer ones. `fa.mix` draws each row from one of the two kinds:
# docstrings make 70% of the tokens here.

# %%
LENGTH = 256
rows = {name: fa.pack(of_kind, LENGTH, seed=0) for name, of_kind in training.items()}
mixed = fa.mix(rows, {"docstrings": 0.7, "comments": 0.3}, stop="restart")

# %% [markdown]
# This picture shows the first rows of the mix. Each colour is a text; white at the end of a row is padding.

# %%
first_rows = [x.documents.numpy() for x, y in mixed.take(24)]
shown = np.ma.masked_equal(first_rows, 0)
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.imshow(shown % 20, aspect="auto", cmap="tab20", interpolation="nearest")
axes.set(xlabel="token", ylabel="row", title="texts in packed rows")
plt.show()

# %% [markdown]
# ## Train
#
# An epoch here has 20 updates of 4 x 4 rows. The log has the share of real tokens, and of each kind.

# %%
keras.utils.set_random_seed(0)
backbone = keras_hub.models.LlamaBackbone(
    vocabulary_size=256,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=64,
    intermediate_dim=192,
)
model = keras_hub.models.LlamaCausalLM(backbone)
trainer = fa.Trainer(
    model,
    keras.optimizers.Adam(4e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    gradient_accumulation_steps=4,
)
test_rows = fa.pack(held_out, LENGTH).batch(4)
before = trainer.evaluate(test_rows, verbose=0)
started = time.perf_counter()
history = trainer.fit(mixed.batch(4), epochs=4, steps_per_epoch=20, verbose=2).history
seconds = time.perf_counter() - started
after = trainer.evaluate(test_rows, verbose=0)
print(f"held out: {before / math.log(2):.2f} bits per byte before, {after / math.log(2):.2f} after")
assert after < before
assert min(history["real_tokens"]) > 0.95

# %% [markdown]
# ## What padding would cost
#
# One row for each text, cut to 256 tokens, would hold as many real tokens in many more rows.

# %%
padded_rows = sum(math.ceil(length / LENGTH) for length in lengths)
packed_rows = sum(1 for of_kind in rows.values() for _ in of_kind)
figure, axes = plt.subplots(figsize=(7, 2), layout="constrained")
bars = axes.barh(["packed", "padded"], [packed_rows, padded_rows], color=["tab:blue", "tab:gray"])
axes.bar_label(bars, padding=4)
axes.set(xlabel=f"rows of {LENGTH} tokens for the same texts", xlim=(0, padded_rows * 1.15))
plt.show()
print(f"{seconds:.0f} s for 4 epochs, with the time to compile")
