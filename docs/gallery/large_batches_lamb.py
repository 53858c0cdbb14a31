# %% [markdown]
"""
# Large batches with LAMB and tf_keras

This page trains a Keras 2 model (`tf_keras`) with LAMB, an optimizer of tensorflow-addons that was
made for very large batches. Each update takes all 1,437 training images, in micro-batches of 64.

tensorflow-addons is no longer developed. It has no packages for Python 3.12 and later, and can't be
imported on current TensorFlow by itself. `fa.addons` makes it work. You need fastaccum's extra
`addons`, `scikit-learn` and `matplotlib`.
"""

# %%
import matplotlib.pyplot as plt
import tf_keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fastaccum as fa

# %% [markdown]
# ## The data and the model
#
# scikit-learn's images of handwritten digits again, as rows of 64 pixels. The model is made of `tf_keras` layers.

# %%
digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(
    digits.data.astype("float32") / 16,
    digits.target,
    test_size=0.2,
    stratify=digits.target,
    random_state=0,
)


def make_model():
    tf_keras.utils.set_random_seed(0)
    return tf_keras.Sequential(
        [
            tf_keras.layers.Dense(128, "relu", input_shape=(64,)),
            tf_keras.layers.Dense(128, "relu"),
            tf_keras.layers.Dense(10),
        ]
    )


# %% [markdown]
# ## Two optimizers
#
# LAMB scales the update of each layer to the size of that layer's weights: a layer with large weights takes larger
# steps. Adam is here for comparison.
#
# 1,437 images take 23 micro-batches of 64, and the last of these has 29 images. The gradient is the mean over all
# 1,437.


# %%
def train(optimizer):
    trainer = fa.Trainer(
        make_model(),
        optimizer,
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        gradient_accumulation_steps=23,
    )
    data = {"batch_size": 64, "epochs": 40, "validation_data": (x_test, y_test)}
    history = trainer.fit(x_train, y_train, **data, verbose=0)
    return trainer, history.history


lamb, lamb_history = train(fa.addons.optimizers.LAMB(0.02))
adam, adam_history = train(tf_keras.optimizers.Adam(0.005))
for name, history in (("LAMB", lamb_history), ("Adam", adam_history)):
    print(f"{name}: accuracy on the test images {history['val_accuracy'][-1]:.3f}")

# %%
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, history in (("LAMB", lamb_history), ("Adam", adam_history)):
    axes.plot(range(1, len(history["loss"]) + 1), history["val_accuracy"], label=name)
axes.set(xlabel="update of all 1,437 images", ylabel="accuracy on the test images")
axes.set_title("tf_keras with LAMB and with Adam")
axes.legend()
plt.show()

# %% [markdown]
# Both learn these digits, and this says nothing about which is better elsewhere. LAMB was made to train BERT in batches
# of tens of thousands of rows ([You et al. 2019](https://arxiv.org/abs/1904.00962)).
#
# ## What the optimizer holds
#
# The optimizer is tensorflow-addons' own object. Its count of steps is the number of updates, not of micro-batches.

# %%
print(type(lamb.optimizer).__module__, "made", int(lamb.optimizer.iterations), "updates")
