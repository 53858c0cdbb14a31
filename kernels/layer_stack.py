"""Stacks layers of one kind as one traced body, looped forward and backward (`LayerStack`)."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from fastaccum.kernels import private, stackable
from fastaccum.kernels.checks import (
    as_tensor,
    naming,
    object_name,
    one_of,
    shown,
    true_or_false,
    whole_number,
)
from fastaccum.kernels.layer_loop import OF_LAYERS, Body, LoopOptions, run_loops, run_plainly
from fastaccum.kernels.recomputed_function import require_policy

# The distance between the seeds of two layers that were given the same one. It is wider than any
# distance between the seeds of one layer.
_SEED_STRIDE = 1_000_003


@keras.saving.register_keras_serializable("fastaccum")
class LayerStack(keras.layers.Layer):
    """Chain of `depth` layers of one kind that is traced and compiled once, whatever the depth.

    Equal to

        layers = [make_layer() for _ in range(depth)]
        for layer in layers:
            x = layer(x, training=training, **kwargs)

    with the same initial values. Each weight is stacked over the layers, `[depth, ...]`, in its own
    dtype. The forward pass is one loop and the backward pass another. `policy` says which values of
    a layer the forward pass keeps. The backward pass computes the others again (Chen et al., 2016,
    arXiv:1604.06174), so that they exist for one layer at a time. Each random layer has a seed of
    its own, and dropout drops the same elements when it is computed again.

    The policies are named as in `jax.checkpoint_policies`. The gradients are the same, to rounding:

        "nothing_saveable"      each layer's input alone: the least memory, and all of the forward
                                pass again, which is about a third more arithmetic
        [name, ...]             what has one of these names (`checkpoint_name`), as by
                                `save_only_these_names`, and each layer's input where the rest needs
                                it. Two are given by themselves: "projection" to every product or
                                convolution of values with weights, "attention" to attention's
                                output and log-sum-exp
        "everything_saveable"   whatever the gradient reads, as in plain layers: nothing is computed
                                again but casts
        "auto"                  whatever has a name: norms, activations, casts and rotary positions
                                are computed again, and no product with weights. Where what is kept
                                would take more than half of the free memory, "nothing_saveable".
                                Free is the GPU's memory (16 GiB where that is not known) less 4
                                times the stack's weights, for gradients and an optimizer's slots

    A name counts where the layer's own call gives it, not in a loop or a branch. Run eagerly, or
    with `training=False`, there is no choice: everything is kept, or the inputs alone.

    With `unroll=True`, as in `jax.lax.scan`, a step in training has the layers one after the other
    instead of loops, over the same stacked weights, and keeps everything. Nothing is copied into
    and out of stacks, which on a GPU is faster, and the program and the time to compile it grow
    with the depth. `unroll="auto"` does so in a program for a GPU where policy "auto" finds that
    everything fits.

    Optimizers see stacks: what they compute per weight (a trust ratio, `clipnorm`) is then taken
    over all layers.

    Args:
        make_layer: makes one layer from no arguments; or a layer, of whose configuration `depth`
            new ones are made. The layer must map its first argument to one tensor of the same
            shape, dtype and mask, with variables of its own alone, and add no losses. Its weights
            may have L1 and L2 regularizers, and no constraints; it may hold further state
            (BatchNormalization), but no metrics.
        depth: how many layers.
        policy: what is kept of each layer: "auto", "nothing_saveable", "everything_saveable", or a
            list of names.
        unroll: whether training has no loops: True, False or "auto". Of the policies it takes
            "auto" alone.
        implementation: "auto" for what `policy` and `unroll` say; "reference" for the Python loop
            above over the same stacked weights, with plain autodiff.

    Attributes:
        template: the first of the layers, whose `call` is the body for all; its own weights are not
            used.

    Call arguments:
        x: one tensor; a Keras mask on it reaches every layer, where the layers support masking.
        **kwargs: tensors that every layer gets as they are (`attention_mask`, `context`); gradients
            flow into them.

    >>> keras.utils.set_random_seed(0)
    >>> stack = LayerStack(lambda: keras.layers.Dense(4, "tanh"), depth=3)
    >>> x = tf.ones([2, 4])
    >>> y = stack(x)
    >>> [tuple(weight.shape) for weight in stack.weights]
    [(3, 4, 4), (3, 4)]
    >>> for layer in stack.unstack():
    ...     x = layer(x)
    >>> bool(tf.reduce_all(tf.abs(x - y) < 1e-6))
    True
    """

    def __init__(
        self,
        make_layer: Callable[[], keras.layers.Layer] | keras.layers.Layer,
        depth: int,
        *,
        policy: str | Sequence[str] = "auto",
        unroll: bool | Literal["auto"] = False,
        implementation: Literal["auto", "reference"] = "auto",
        name: str | None = None,
        trainable: bool = True,
    ):
        depth = whole_number("depth", depth)
        one_of("implementation", implementation, ("auto", "reference"))
        policy = require_policy(policy)
        unroll = one_of("unroll", unroll, (True, False, "auto"))
        if unroll != "auto":
            unroll = bool(unroll)  # 1 and NumPy's bools are taken too
        if unroll and policy != "auto":
            raise ValueError(
                f"policy={shown(policy)} is for loops, and unroll={unroll!r} keeps everything: "
                "pass one."
            )
        object_name(name)
        true_or_false("trainable", trainable)
        if isinstance(make_layer, keras.layers.Layer):
            with naming("make_layer", *OF_LAYERS):
                make_layer = functools.partial(
                    type(make_layer).from_config, make_layer.get_config()
                )
        template = stackable.make(make_layer)
        super().__init__(name=name, dtype=template.dtype_policy)
        # Past Keras's tracking: the template's variables are not the model's.
        object.__setattr__(self, "template", template)
        if not (trainable and template.trainable):
            self.trainable = False
        self.make_layer = make_layer
        self.depth = depth
        self.policy = policy
        self.unroll = unroll
        self.implementation = implementation
        self.supports_masking = template.supports_masking
        self.supports_jit = all(layer.supports_jit for layer in private.flatten_layers(template))

    @keras.layers.Layer.trainable.setter
    def trainable(self, value: bool) -> None:
        keras.layers.Layer.trainable.fset(self, value)
        # A frozen BatchNormalization infers in training too.
        self.template.trainable = value

    def build(self, x_shape: Sequence[int | None]) -> None:
        with naming("x_shape"):
            sizes = () if isinstance(x_shape, (str, bytes, dict)) else tuple(x_shape)
        if not sizes or not all(_is_size(size) for size in sizes):
            raise TypeError(
                f"x has x_shape={shown(x_shape)}: every layer of a LayerStack maps one tensor to "
                "the next."
            )
        self._x_shape = sizes
        # Out of a graph that is being traced, and of the outer layer's autocast.
        with tf.init_scope(), private.AutocastScope(None):
            layers = [self._build_layer(self.template)]
            # One after the other, so that random values are drawn in the order of plain layers.
            layers += [self._build_layer(self._make()) for _ in range(self.depth - 1)]
            stackable.require_same_variables(layers)
            stackable.require_same_settings(layers)
            stackable.require_supported(self.template)
            self._stack(layers)

    def _stack(self, layers: list[keras.layers.Layer]) -> None:
        """Makes the stack's variables from its layers', the first of which is the template.

        A weight is learned if its own layer is to train it, and state otherwise, as BatchNorm's
        statistics and seeds are. Freezing a layer does not make its weights state.
        """
        learned_ids = set()
        for layer in private.flatten_layers(self.template):
            learned_ids |= {id(variable) for variable in private.trainable_variables(layer)}
        self._learned = [
            id(variable) in learned_ids for variable in stackable.variables(self.template)
        ]

        self._stacked_weights: list[keras.Variable] = []
        for copies in zip(*(layer.weights for layer in layers), strict=True):
            variable = copies[0]  # the template's
            stacked = self.add_weight(
                name=variable.path.rpartition(f"{self.template.name}/")[2].replace("/", "."),
                shape=(self.depth, *variable.shape),
                dtype=private.variable_dtype(variable),
                initializer=functools.partial(_initial_stack, copies),
                regularizer=variable.regularizer,
                trainable=id(variable) in learned_ids,
                # The body casts, so that its gradients are those of the variables in their own
                # dtype.
                autocast=False,
            )
            stacked.trainable = variable.trainable  # which is False in a frozen layer
            # A tf.train.Checkpoint does not look into Keras's lists.
            private.track_trackable(self, stacked, f"weights.{len(self._stacked_weights)}")
            self._stacked_weights.append(stacked)

        generators_by_layer = [stackable.seed_generators(layer) for layer in layers]
        self._seeds = [_Seeds(copies) for copies in zip(*generators_by_layer, strict=True)]

    @property
    def _stacked_variables(self) -> list[keras.Variable]:
        """The stack's variables, in the order of `stackable.variables(self.template)`."""
        if not self.built:
            raise ValueError(
                f"{self.name!r} has no weights yet: call it, or `build(x_shape)`, first."
            )
        return [*self._stacked_weights, *(seeds.state for seeds in self._seeds)]

    def _make(self) -> keras.layers.Layer:
        layer = stackable.make(self.make_layer)
        if not self.template.trainable:
            layer.trainable = False
        return layer

    def _build_layer(self, layer: keras.layers.Layer) -> keras.layers.Layer:
        parts = private.flatten_layers(layer, include_self=False)
        with naming(
            f"{stackable.describe(layer)}, built for x of shape {self._x_shape}", *OF_LAYERS
        ):
            has_default_build = private.is_default_build(layer.build, False)  # the default: False
            if has_default_build and not all(part.built for part in parts):
                # Without a `build` of its own, a layer's parts are built by its first call.
                layer(keras.KerasTensor(self._x_shape, self.compute_dtype))
            elif not layer.built:
                layer.build(self._x_shape)
        return layer

    def __call__(self, x: object, *args: object, **kwargs: object) -> tf.Tensor | keras.KerasTensor:
        if isinstance(x, (list, tuple, dict)):
            raise TypeError(
                f"x is a {type(x).__name__}: every layer of a LayerStack maps one tensor to the "
                "next."
            )
        if kwargs.get("training") is not None:
            one_of("training", kwargs["training"], (True, False))
        if not isinstance(x, keras.KerasTensor):
            x = as_tensor("x", x)
        return super().__call__(x, *args, **kwargs)

    def call(self, x: tf.Tensor, training: bool | None = None, **kwargs: object) -> tf.Tensor:
        mask = private.keras_mask(x, None)
        if mask is not None and not self.supports_masking:
            raise ValueError(
                f"x has a Keras mask, but {stackable.describe(self.template)} does not support "
                "masking, so that later layers would not see it. Set supports_masking=True in "
                "the layer, or pass x without the mask."
            )
        if x.dtype.is_floating:
            # As Keras has done already, unless a model is called symbolically.
            x = tf.cast(x, self.compute_dtype)
        weights, state = self._split(self._stacked_variables)
        template_weights, template_state = self._split(stackable.variables(self.template))
        body = Body(
            name=stackable.describe(self.template),
            layer=functools.partial(self.template, training=bool(training)),
            weights=template_weights,
            stacks=weights,
            state=template_state,
            training=bool(training),
            arguments=[mask, kwargs],
        )
        if self.implementation == "reference" or tf.executing_eagerly():
            run = run_plainly
        else:
            run = run_loops
        # Read before the state is assigned: the recomputation starts from the same seeds.
        options = LoopOptions(self.policy, self.unroll)
        y, new_state = run(body, self.depth, options, x, _read(weights), _read(state))
        for k, value in new_state.items():
            state[k].assign(value)
        return y

    def _split(
        self, variables: list[keras.Variable]
    ) -> tuple[list[keras.Variable], list[keras.Variable]]:
        """Splits variables into weights that are learned and other state."""
        weights = []
        state = []
        for variable, is_learned in zip(variables, self._learned, strict=True):
            if is_learned:
                weights.append(variable)
            else:
                state.append(variable)
        return weights, state

    def unstack(self) -> list[keras.layers.Layer]:
        """Returns `depth` new plain layers, built, with copies of the stack's weights and seeds.

        Where `fp32_weight_gradients` has switched the stack, they are not switched.
        """
        variables = self._stacked_variables
        layers = [self._build_layer(self._make()) for _ in range(self.depth)]
        for stacked, copies in zip(variables, _by_place(layers), strict=True):
            for i, variable in enumerate(copies):
                variable.assign(stacked.value[i])
        return layers

    def assign_from(self, layers: Sequence[keras.layers.Layer]) -> None:
        """Takes the weights and seeds of `depth` plain layers, the inverse of `unstack`."""
        variables = self._stacked_variables
        if not isinstance(layers, (list, tuple)) or not all(
            isinstance(layer, keras.layers.Layer) for layer in layers
        ):
            raise TypeError(f"layers={shown(layers)} must be a list of Keras layers.")
        if len(layers) != self.depth:
            raise ValueError(
                f"layers has {len(layers)} layers, but depth={self.depth}: pass one for each."
            )
        stackable.require_same_variables([self.template, *layers])
        for stacked, copies in zip(variables, _by_place(layers), strict=True):
            stacked.assign(_stacked(copies))

    def get_config(self) -> dict[str, object]:
        config = super().get_config()
        del config["dtype"]  # the template's
        config["make_layer"] = keras.saving.serialize_keras_object(self.template)
        config["depth"] = self.depth
        config["policy"] = self.policy
        config["unroll"] = self.unroll
        config["implementation"] = self.implementation
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LayerStack:
        make_layer = keras.saving.deserialize_keras_object(config["make_layer"])
        return cls(**{**config, "make_layer": make_layer})


class _Seeds(keras.random.SeedGenerator):
    """Seed generator whose state, int64 [depth, 2], stacks those of one generator in each layer."""

    def __init__(self, generators: Sequence[keras.random.SeedGenerator]):
        super().__init__(seed=0)
        seeds = {private.initial_seed(generator) for generator in generators}
        # The user gave a seed, which several layers share. They would drop the same elements.
        is_shared = None not in seeds and len(seeds) < len(generators)
        seed = None
        stride = 0
        if is_shared:
            seed = seeds.pop()
            stride = _SEED_STRIDE
        private.initial_seed.set(self, seed)
        states = [generator.state for generator in generators]

        def initial(shape, dtype):
            # A state is a seed and a counter, [seed, counter]: only the seeds are moved apart.
            offsets = tf.range(shape[0], dtype=dtype)[:, tf.newaxis] * [stride, 0]
            inner_axes = [1] * (len(shape) - 2)
            return _stacked(states) + tf.reshape(offsets, [shape[0], *inner_axes, 2])

        shape = (len(states), *states[0].shape)
        dtype = states[0].dtype
        self.state = keras.Variable(initial, shape, dtype, trainable=False, aggregation="none")


def _is_size(size: Any) -> bool:
    """Returns whether this is a size in a shape, or None for one that is not known."""
    if size is None:
        return True
    return isinstance(size, numbers.Integral) and int(size) >= 0


def _by_place(layers: Sequence[keras.layers.Layer]) -> list[tuple[keras.Variable, ...]]:
    """Returns, for each variable of a layer, the variables at its place in all layers."""
    return list(zip(*(stackable.variables(layer) for layer in layers), strict=True))


def _read(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(v.value) for v in variables]


def _initial_stack(variables: Sequence[keras.Variable], shape: object, dtype: object) -> tf.Tensor:
    """Initializes a stack by its layers' variables, whose shape and dtype it has."""
    return _stacked(variables)


def _stacked(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Stacks the values of variables along a new first axis."""
    return tf.stack(_read(variables))
