"""JAX's ways: a jitted step that scans over micro-batches, and `optax.MultiSteps`."""

import functools

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers import jax_convnet, jax_models
from benchmarks.support.contestants import ForeignModel, TrainStep


def make_scan(workload):
    """Makes the `TrainStep` of one jitted step that scans over the micro-batches."""
    if workload.name == "ConvNet":
        return jax_convnet.make_scan(workload)
    params, loss_fn, optimizer = _start(workload)
    opt_state = optimizer.init(params)
    train_step = jax_models.scan_train_step(loss_fn, optimizer)

    def update(stack):
        nonlocal params, opt_state
        params, opt_state, loss = train_step(params, opt_state, *stack)
        return loss

    return TrainStep(ForeignModel(lambda: _arrays(params)), jax_models.feed_stack, update)


def make_multi_steps(workload):
    """Makes the `TrainStep` of a jitted micro-step under `optax.MultiSteps`."""
    params, loss_fn, optimizer = _start(workload)
    optimizer = optax.MultiSteps(optimizer, every_k_schedule=workload.micro_batches)
    opt_state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def micro_step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def update(micro_batches):
        nonlocal params, opt_state
        total_loss = 0.0
        for x, y in micro_batches:
            params, opt_state, loss = micro_step(params, opt_state, x, y)
            total_loss += loss
        return total_loss / len(micro_batches)

    return TrainStep(ForeignModel(lambda: _arrays(params)), _feed_micro_batches, update)


def _start(workload):
    """Returns the initial parameters, `loss_fn(params, x, y)` and the optimizer."""
    # The suites compare programs on the CPU, and a CUDA plugin of JAX may be installed.
    jax.config.update("jax_platforms", "cpu")
    model = workload.model()
    keras_optimizer = workload.optimizer()
    if workload.name.startswith("MLP"):
        forward = jax_models.mlp
        params = jax_models.mlp_params(model.get_weights())
    else:
        forward = functools.partial(jax_models.gpt, heads=model.get_layer("block_0").heads)
        params = jax_models.gpt_params(model.get_weights())

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()

    # Without weight decay this is Adam.
    optimizer = optax.adamw(
        float(keras_optimizer.learning_rate),
        b1=keras_optimizer.beta_1,
        b2=keras_optimizer.beta_2,
        eps=keras_optimizer.epsilon,
        weight_decay=keras_optimizer.weight_decay or 0.0,
    )
    return jax.tree.map(jnp.array, params), loss_fn, optimizer


def _arrays(params):
    # The arrays are copied, because the next step donates these buffers.
    return [jax.device_get(leaf).copy() for leaf in jax.tree.leaves(params)]


def _feed_micro_batches(stack):
    stacked_x, stacked_y = stack
    return [(jnp.array(x), jnp.array(y)) for x, y in zip(stacked_x, stacked_y, strict=True)]
