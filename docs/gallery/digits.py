# %% [markdown]
"""
# Classify images

This page trains a small convolutional network on scikit-learn's 1,797 images of handwritten digits,
in micro-batches of 16 images. Eight micro-batches make one update of the weights, so the network
trains as it would on batches of 128. The page checks this: the same network, given 128 images at
once, follows the same curve.

You need `keras`, `scikit-learn` and `matplotlib`.
"""

# %%
import tempfile
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fastaccum as fa

# %% [markdown]
# ## The data
#
# Each image has 8 x 8 pixels with values from 0 to 16. A fifth of the images is kept out of training.

# %%
digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
x_train, x_test, y_train, y_test = train_test_split(
    images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
)
print(f"{len(x_train)} images to train on, {len(x_test)} to test on")

# %% [markdown]
# ## The model
#
# An ordinary Keras model. It isn't compiled: the trainer gets the optimizer, the loss and the metrics.


# %%
def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def make_trainer(model, accumulation_steps):
    return fa.Trainer(
        model,
        keras.optimizers.Adam(5e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        gradient_accumulation_steps=accumulation_steps,
    )


# %% [markdown]
# ## Training
#
# `fit` takes Keras's arguments and callbacks. `batch_size` is the size of a micro-batch.
#
# 1,437 images aren't a multiple of 128: the last update of each epoch has 29 images, and its gradient is the mean over
# those 29.

# %%
model = make_model()
trainer = make_trainer(model, accumulation_steps=8)
stop = keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True)
history = trainer.fit(
    x_train,
    y_train,
    batch_size=16,
    epochs=12,
    validation_data=(x_test, y_test),
    callbacks=[stop],
    verbose=2,
)

# %% [markdown]
# ## The same as a batch of 128
#
# The second network starts from the same weights, and sees the same images in the same order. It gets each batch of 128
# whole, so it needs memory for what its layers compute from 128 images instead of 16.

# %%
whole = make_trainer(make_model(), accumulation_steps=1)
whole_history = whole.fit(x_train, y_train, batch_size=128, epochs=len(history.epoch), verbose=0)

losses, whole_losses = np.array(history.history["loss"]), np.array(whole_history.history["loss"])
print(
    "largest relative difference between the two losses: "
    f"{np.abs(losses / whole_losses - 1).max():.1e}"
)
np.testing.assert_allclose(losses, whole_losses, rtol=1e-3)

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.plot(losses, "o", label="8 micro-batches of 16")
axes.plot(whole_losses, "-", label="1 batch of 128")
axes.set(xlabel="epoch", ylabel="training loss", yscale="log")
axes.legend()
plt.show()

# %% [markdown]
# The losses differ only by float32 rounding: the same numbers are added up in another order.
#
# ## Test images
#
# Red titles mark the images that the network gets wrong.

# %%
loss, accuracy = trainer.evaluate(x_test, y_test, batch_size=64, verbose=0)
print(f"accuracy on the test images: {accuracy:.3f}")

predicted = trainer.predict(x_test, verbose=0).argmax(-1)
order = np.argsort(predicted == y_test, kind="stable")  # the wrong ones first
figure, grid = plt.subplots(3, 8, figsize=(8, 3.8), layout="constrained")
for axes, i in zip(grid.flat, order, strict=False):
    axes.imshow(x_test[i, ..., 0], cmap="gray_r")
    axes.set_title(f"{predicted[i]}", color="black" if predicted[i] == y_test[i] else "red")
    axes.axis("off")
plt.show()
# mkdocs_gallery_thumbnail_number = 2

# %% [markdown]
# ## Save and load
#
# The trainer trained the model in place: save the model with Keras, and load it anywhere.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "digits.keras")
    model.save(file)
    loaded = keras.saving.load_model(file)
np.testing.assert_allclose(
    loaded.predict(x_test, verbose=0), model.predict(x_test, verbose=0), rtol=1e-5, atol=1e-5
)
print("the loaded model predicts the same")
