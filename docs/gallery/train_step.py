# %% [markdown]
"""
# A custom loop with TrainStep

`fa.TrainStep` is one update with gradient accumulation, for any loss and any `tf.Variable`s. Use it
where there is no Keras model, or where `fit` isn't the loop that you want. This page fits a mixture
of Gaussians to points in the plane: there are no layers and no targets.

You need `scikit-learn`, for the points, and `matplotlib`.
"""

# %%
import math

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import make_moons

import fastaccum as fa

# %% [markdown]
# ## The points
#
# Two half moons. The points on the right count twice, to show how weights work.

# %%
points = make_moons(8192, noise=0.08, random_state=0)[0].astype("float32")
weights = np.where(points[:, 0] > 0.5, 2, 1).astype("float32")

# %% [markdown]
# ## The variables
#
# 16 Gaussians, each with a centre, a triangular matrix that gives it its shape, and a share of the points. The centres
# begin at points drawn by chance.

# %%
COMPONENTS = 16

random = np.random.default_rng(0)
centres = tf.Variable(random.choice(points, COMPONENTS, replace=False), name="centres")
stretch = tf.Variable(np.tile(np.eye(2, dtype="float32") * 3, (COMPONENTS, 1, 1)), name="stretch")
shares = tf.Variable(tf.zeros(COMPONENTS), name="shares")


def log_density(x):
    """The logarithm of the mixture's density at points `[n, 2]`: `[n]`."""
    lower = tf.linalg.band_part(stretch, -1, 0)
    scaled = tf.einsum("kij,nkj->nki", lower, x[:, None] - centres)
    volume = tf.reduce_sum(tf.math.log(tf.abs(tf.linalg.diag_part(lower)) + 1e-6), -1)
    each = volume - 0.5 * tf.reduce_sum(scaled**2, -1) - math.log(2 * math.pi)
    return tf.reduce_logsumexp(each + tf.nn.log_softmax(shares), -1)


# %% [markdown]
# ## The loss of a micro-batch
#
# The function returns two numbers: the sum of the losses, and what to divide by, here the sum of the weights. The train
# step adds up both over all micro-batches, and divides once.
#
# Don't return a mean. Where micro-batches differ in weight, the mean of their means isn't the mean over all points.


# %%
def loss_fn(micro_batch):
    x, weight = micro_batch
    return -tf.reduce_sum(weight * log_density(x)), tf.reduce_sum(weight)


step = fa.TrainStep(loss_fn, [centres, stretch, shares], keras.optimizers.Adam(0.02), clip_norm=1.0)

# %% [markdown]
# ## The loop
#
# Each call takes a stack: tensors whose first axis counts the micro-batches. Here these are 8 micro-batches of 128
# points, so each call makes one update from 1,024 points.
#
# The call returns before the update is done. Reading a result waits for it, so this loop reads the losses at its end.

# %%
MICRO_BATCHES, ROWS = 8, 128

results = []
for _ in range(300):
    chosen = random.choice(len(points), (MICRO_BATCHES, ROWS))
    results.append(step((points[chosen], weights[chosen])))

losses = [float(result.loss) for result in results]
print(f"loss: {losses[0]:.3f} at first, {np.mean(losses[-20:]):.3f} in the last 20 updates")
print(
    f"norm of the last gradient: {float(results[-1].grad_norm):.3f}; finite: "
    f"{bool(results[-1].grads_finite)}"
)
print(f"sum of weights in the last update: {float(results[-1].weight):.0f}")

# %%
figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=[1, 1.6]
)
left.plot(losses)
left.set(xlabel="update", ylabel="loss")

across, up = np.meshgrid(np.linspace(-1.5, 2.5, 200), np.linspace(-1, 1.5, 125))
grid = np.stack([across.ravel(), up.ravel()], -1).astype("float32")
right.contourf(across, up, np.exp(log_density(grid)).reshape(across.shape), levels=12, cmap="Blues")
right.plot(*points[:400].T, ".", markersize=2, color="black", alpha=0.5)
right.plot(*centres.numpy().T, "x", color="tab:red")
right.set_title("density, 400 of the points, and the centres")
plt.show()

# %% [markdown]
# ## The same update from one batch
#
# One micro-batch of all 1,024 points gives the same loss and the same gradient, up to the rounding of float32. The
# learning rate here is 0, so that both steps begin with the same variables. The
# [reference](../../api/train-step.md) has the exact formula.

# %%
still = fa.TrainStep(loss_fn, [centres, stretch, shares], keras.optimizers.SGD(0.0))
chosen = random.choice(len(points), (MICRO_BATCHES, ROWS))
stack = points[chosen], weights[chosen]
in_pieces = still(stack)
whole = still(tuple(tensor.reshape(1, MICRO_BATCHES * ROWS, *tensor.shape[2:]) for tensor in stack))
print(f"loss: {float(in_pieces.loss):.6f} in 8 pieces, {float(whole.loss):.6f} whole")
print(
    f"norm of the gradient: {float(in_pieces.grad_norm):.6f} in 8 pieces, "
    f"{float(whole.grad_norm):.6f} whole"
)
np.testing.assert_allclose(
    [in_pieces.loss, in_pieces.grad_norm], [whole.loss, whole.grad_norm], rtol=1e-4
)
