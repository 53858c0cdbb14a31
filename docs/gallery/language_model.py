# %% [markdown]
"""
# Train a language model

This page trains a small GPT on the text of Python's manual. The training crashes halfway and
resumes. Then the model writes some text, and is exported for serving.

`fa.gpt` builds the model. It works on bytes, so it needs no tokenizer. Besides fastaccum you need
`matplotlib`.
"""

# %%
import math
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import fastaccum as fa

# %% [markdown]
# ## The data
#
# Python comes with the text of its language reference, for `help()`. It is cut into windows of 64 bytes. For each byte
# of a window, the model predicts the next one. The last twentieth of the text is kept out of training.

# %%
CONTEXT = 64

text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype("int32")
held_out = len(text) // 20


def windows(data, apart):
    cut = np.lib.stride_tricks.sliding_window_view(data, CONTEXT + 1)[::apart]
    return cut[:, :-1], cut[:, 1:]


x_train, y_train = windows(text[:-held_out], apart=32)
x_test, y_test = windows(text[-held_out:], apart=128)
print(f"{len(text):,} bytes; {len(x_train):,} windows to train on, {len(x_test):,} to test on")

# %% [markdown]
# ## The trainer
#
# `fa.LinearCrossEntropy` computes the model's last layer and the loss together. With a large vocabulary the scores of
# all possible next ids take much memory, and it holds a part of them at a time
# ([Large vocabularies](../../guides/large-vocabularies.md)).


# %%
def make_trainer():
    keras.utils.set_random_seed(0)
    return fa.Trainer(
        fa.gpt(width=96, layers=2, heads=4, context=CONTEXT),
        keras.optimizers.AdamW(5e-3),
        fa.LinearCrossEntropy(),
        gradient_accumulation_steps=4,
        clip_norm=1.0,
    )


# %% [markdown]
# ## Train, and crash
#
# With `checkpoint_dir`, `fit` saves all that it needs to go on: the weights, the state of the optimizer, of random
# numbers and of callbacks, and the place in the data. It saves at the end of each epoch, unless `checkpoint_every` says
# otherwise ([Resuming](../../guides/resuming.md)). An epoch here is 10 updates.
#
# One callback records the loss after each update, and another makes the crash. A callback of your own is saved with the
# rest if it has `get_state` and `set_state`.


# %%
class Record(keras.callbacks.Callback):
    losses = ()

    def on_train_batch_end(self, batch, logs):
        self.losses = [*self.losses, float(logs["loss"])]

    def get_state(self):
        return {"losses": list(self.losses)}

    def set_state(self, state):
        self.losses = state["losses"]


class Crash(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        if len(crashed.losses) == 25:
            raise RuntimeError("the power went out")


folder = tempfile.TemporaryDirectory()
arguments = {
    "batch_size": 16,
    "epochs": 10,
    "steps_per_epoch": 10,
    "validation_data": (x_test, y_test),
    "checkpoint_dir": Path(folder.name, "checkpoints"),
    "verbose": 0,
}
crashed = Record()
try:
    make_trainer().fit(x_train, y_train, callbacks=[crashed, Crash()], **arguments)
except RuntimeError as error:
    print(f"after {len(crashed.losses)} updates: {error}")

# %% [markdown]
# ## Resume
#
# Make the same call again, with a new model, as in a new process. It finds the newest checkpoint, saved after 20
# updates, and goes on from there. Updates 21 to 25 run a second time, and reach the same losses, to the last bit.

# %%
resumed = Record()
trainer = make_trainer()
history = trainer.fit(x_train, y_train, callbacks=[resumed], **arguments).history

assert crashed.losses[20:] == resumed.losses[20:25]
print(f"{len(resumed.losses)} updates in all; updates 21 to 25 reached the same losses again")

# %% [markdown]
# The loss in bits per byte says how well the model predicts the next byte: 8 is a blind guess, and less is better. The
# history holds all epochs, also those before the crash.

# %%
updates = 10 * np.arange(1, len(history["loss"]) + 1)
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, label in (("loss", "training"), ("val_loss", "held-out text")):
    axes.plot(updates, np.array(history[name]) / math.log(2), label=label)
axes.axvline(25, color="red", linestyle=":", label="crash")
axes.set(xlabel="update", ylabel="bits per byte", title="A GPT learns Python's manual")
axes.legend()
plt.show()
print(f"held-out text: {history['val_loss'][-1] / math.log(2):.2f} bits per byte")

# %% [markdown]
# ## Sample
#
# The model gives each possible next byte a score. The function below turns scores into probabilities, draws a byte,
# appends it, and asks again. A text shorter than the window is padded at its end. The model only looks back, so it
# never sees the padding.

# %%
predict = tf.function(trainer.model, jit_compile=True)
random = np.random.default_rng(0)


def sample(prompt, length, temperature=0.6):
    data = list(prompt.encode())
    for _ in range(length):
        seen = data[-CONTEXT:]
        padded = np.zeros((1, CONTEXT), "int32")
        padded[0, : len(seen)] = seen
        scores = predict(padded)[0, len(seen) - 1].numpy().astype("float64") / temperature
        probabilities = np.exp(scores - scores.max())
        data.append(random.choice(256, p=probabilities / probabilities.sum()))
    return bytes(data).decode(errors="replace")


print(sample("The statement ", 300))

# %% [markdown]
# ## Export
#
# `model.export` writes a SavedModel. TensorFlow loads and serves it without Keras and without fastaccum.

# %%
exported = Path(folder.name, "exported")
trainer.model.export(exported, verbose=False)
served = tf.saved_model.load(exported)

scores, own = served.serve(x_test[:2]), trainer.predict(x_test[:2], verbose=0)
np.testing.assert_allclose(scores, own, rtol=1e-3, atol=1e-3)
print("the exported model gives the same scores, of shape", tuple(scores.shape))
folder.cleanup()
