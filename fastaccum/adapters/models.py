"""One face for Keras 3 and tf_keras models: variables, state, forward pass, and what a padded row may touch."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils.tracking import DotNotTrackScope
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from fastaccum.adapters import layers as xla_layers
from fastaccum.adapters.attributes import replaced
from fastaccum.kernels import fp32_layers


def get(model: Any) -> Model:
    """The adapter for a Keras 3 or tf_keras model."""
    if isinstance(model, keras.Model):
        return Model(model)
    if any(c.__module__.partition(".")[0] == "tf_keras" and c.__name__ == "Model" for c in type(model).__mro__):
        return LegacyModel(model)
    raise TypeError(f"model={model!r} is not a Keras model: pass a keras.Model (Keras 3) or a tf_keras.Model.")


class Model:
    """A Keras 3 model."""

    legacy = False  # whether it is tf_keras's

    def __init__(self, model: keras.Model):
        self.model = model
        # How the losses that a forward pass adds count: a scalar as the rows' mean, one per row as a sum, as in
        # Keras. Known once the model has been called.
        self.added_reductions: list[str] = []
        # Known then too: the variables, Keras's and others, that the forward pass of a step assigns.
        self._assigned: list[Any] = []

    @property
    def layers(self) -> list[Any]:
        """Every layer, nested ones too, the model itself included."""
        return list(self.model._flatten_layers())

    @property
    def called_layers(self) -> list[Any]:
        """Every layer whose `call` runs: those that a LayerStack calls for its own too."""
        return list(fp32_layers.all_layers(self.model))

    def symbolic_call(self, x: Any, training: bool) -> Any:
        """Output specs for input specs `x` (a nest of tf.TensorSpec), without computing; builds the model."""
        inputs = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), x)
        outputs = self.model(inputs, training=training)
        if any(map(_may_do_more, self.layers)):
            self._note_calls(
                tf.nest.map_structure(lambda s: tf.TensorSpec([s.shape[0] or 1, *s.shape[1:]], s.dtype), x)
            )
        return outputs

    def require_inputs(self, x: Any) -> None:
        """Raises ValueError for a list of more or fewer inputs than the model has; Keras drops what is too many."""
        expected = len(tf.nest.flatten(getattr(self.model, "inputs", None) or []))
        if expected and isinstance(x, (list, tuple)) and (given := len(tf.nest.flatten(x))) != expected:
            raise ValueError(f"x has {given} arrays, but the model has {expected} inputs: pass one for each.")

    def __call__(self, x: Any, training: bool) -> Any:
        return self.model(x, training=training)

    @property
    def trainable_variables(self) -> list[Any]:
        """What the optimizer trains, in the form that an optimizer of the same family takes."""
        return self.model.trainable_variables

    @property
    def state(self) -> list[tf.Variable]:
        """Variables that a forward pass may assign (moving statistics, random seeds), frozen weights left out."""
        own = [v for layer in self.layers for v in self._own_state(layer)]
        # A SpectralNormalization assigns a weight of another layer, and layers of the user's own what they like.
        metrics = _plain([v for metric in self.model.metrics for v in metric.variables])
        known = {id(v) for v in (*own, *metrics)}
        return [*own, *(v for v in _plain(self._assigned) if id(v) not in known)]

    @property
    def unmanaged_state(self) -> list[str]:
        """The names of what a forward pass assigns and no layer has made with `add_weight`."""
        names = [v.name for v in self._assigned if not isinstance(v, keras.Variable)]
        return [name for name in names if "/replica_" not in name]  # the first one's says it

    @property
    def moving_layers(self) -> list[str]:
        """The names of the layers whose statistics a train step moves."""
        return [
            layer.name
            for layer in self.layers
            if layer.trainable and any(v.dtype.is_floating for v in self._own_state(layer))
        ]

    def _own_state(self, layer: Any) -> list[tf.Variable]:
        seeds = [generator.state for generator in layer._seed_generators]
        return [v.value for v in (*layer._non_trainable_variables, *seeds)]

    @property
    def seeds(self) -> list[tf.Variable]:
        """The states of random generators."""
        return [generator.state.value for layer in self.layers for generator in layer._seed_generators]

    def owner(self, variable: tf.Variable) -> str | None:
        """The name of the innermost layer that has a trainable variable."""
        owners = [
            layer.name
            for layer in self.called_layers
            for v in layer.trainable_variables
            if variable is (v.value if isinstance(v, keras.Variable) else v)
        ]
        return owners[-1] if owners else None

    @property
    def compute_dtype(self) -> str:
        """The lowest precision that any layer computes in: what decides about loss scaling."""
        dtypes = {layer.compute_dtype for layer in self.called_layers}
        return next((d for d in ("float16", "bfloat16") if d in dtypes), "float32")

    @property
    def output_names(self) -> list[str]:
        """The names that dict losses, targets and weights go by; empty for a model that names none."""
        # A Sequential model keeps them, and much else, in a functional one.
        model = getattr(self.model, "_functional", None) or self.model
        return list(getattr(model, "output_names", None) or [])

    def _added_losses(self) -> list[tf.Tensor]:
        """The data-dependent losses of the last call: `add_loss` and activity regularisers."""
        return self.model.losses[: len(self.model.losses) - len(self._regularised())]

    def _note_calls(self, x: Any) -> None:
        # Keras forgets what a symbolic call adds and assigns; a traced one shows it. Some layers add in one mode only.
        for training in (True, False):
            traced = tf.function(self.model, autograph=False).get_concrete_function(x, training=training)
            if training:
                self._assigned = _assigned(traced.graph, self.model.variables)
            self.added_reductions = sorted({*self.added_reductions, *map(_reduction, self._added_losses())})

    def added_loss(self, reduction: str) -> tf.Tensor:
        """The sum of the last call's added losses of one kind of `added_reductions`: float32 scalar."""
        losses = [loss for loss in self._added_losses() if _reduction(loss) == reduction]
        return tf.add_n([tf.constant(0.0), *(tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses)])

    def penalty(self) -> tf.Tensor | None:
        """The sum of the weight regularisers, or None where there are none."""
        losses = [v.regularizer(v) for v in self._regularised()]
        return tf.add_n(losses) if losses else None

    def _regularised(self) -> list[Any]:
        return [v for v in self.model.trainable_weights if getattr(v, "regularizer", None) is not None]

    @property
    def lookups(self) -> list[tuple[Any, int]]:
        """Embedding layers and the rows of their tables: ids outside must be caught, since XLA clamps them silently."""
        found = [layer for layer in self.layers if _lookup_class(layer)]
        # A subclass may have made a larger table than it was asked for.
        return [(layer, max([layer.input_dim, *(v.shape[0] for v in layer.weights[:1])])) for layer in found]

    @property
    def couples_rows(self) -> bool:
        """Whether rows share statistics or losses, so that one that only pads would be felt; known after a call."""
        assigned = any(v.dtype.is_floating for v in _plain(self._assigned))
        return assigned or bool(self.moving_layers) or bool(self.added_reductions)

    def uncompilable_layers(self) -> list[str]:
        """Layers that say that XLA cannot compile them, as "name (Type)"."""
        return [
            f"{layer.name} ({type(layer).__name__})"
            for layer in self.layers
            if not getattr(layer, "supports_jit", True)
        ]

    def adopt(self, optimizer: Any, metrics: keras.Metric, loss: Any, loss_weights: Any) -> None:
        """Leaves the model as `compile` would, for callbacks, `save` and Keras's own `evaluate`."""
        if not (isinstance(optimizer, keras.Optimizer) and isinstance(self.model, keras.Model)):
            self.model.optimizer = optimizer
            return
        self.model.compile(optimizer, loss, loss_weights=loss_weights, auto_scale_loss=False)
        # Untracked, as in `compile`: a metric that the model also tracked as its own would be listed twice.
        with DotNotTrackScope():
            self.model._compile_metrics = metrics

    @contextmanager
    def observed_ids(self, observe: Callable[[int, tf.Tensor], None]) -> Iterator[None]:
        """Within the scope, the ids that embedding i of `lookups` looks up first pass to `observe(i, ids)`: those that
        reach Keras's own lookup, since the `call` of a subclass may map what it is given.
        """
        layers = [layer for layer, _ in self.lookups]
        own = [type(layer) for layer in layers]
        try:
            for i, layer in enumerate(layers):
                object.__setattr__(layer, "__class__", _observing(layer, functools.partial(observe, i)))
            yield
        finally:
            for layer, cls in zip(layers, own, strict=True):
                object.__setattr__(layer, "__class__", cls)

    @contextmanager
    def fp32_weight_gradients(self) -> Iterator[None]:
        """Within the scope, weight gradients are computed in float32 under mixed precision.

        The layers are their own again outside of it: what a callback saves there loads without fastaccum.
        """
        layers = fp32_layers.fp32_weight_gradients(self.model)
        try:
            yield
        finally:
            fp32_layers.plain_weight_gradients(layers)

    @contextmanager
    def compiled_layers(self, fast_gradients: bool) -> Iterator[None]:
        """Within the scope, layers compute in the form that XLA compiles in a loop, or that a CPU runs fast too."""
        with replaced(xla_layers.replacements(self.called_layers, fast_gradients)):
            yield


class LegacyModel(Model):
    """A tf_keras (Keras 2) model."""

    legacy = True

    def symbolic_call(self, x: Any, training: bool) -> Any:
        # tf_keras has no symbolic call for subclassed models; one row of zeros builds them all the same.
        zeros = tf.nest.map_structure(lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), x)
        outputs = self.model(zeros, training=False)
        for layer in self.layers:
            _require_sum_over_rows(layer)
        self._note_calls(zeros)
        rows = tf.nest.flatten(x)[0].shape[0]
        return tf.nest.map_structure(
            lambda t: None if t is None else keras.KerasTensor((rows, *t.shape[1:]), t.dtype.name), outputs
        )

    @property
    def called_layers(self) -> list[Any]:
        return self.layers

    def _own_state(self, layer: Any) -> list[tf.Variable]:
        return [v for v in layer._non_trainable_weights if isinstance(v, tf.Variable)]

    def _added_losses(self) -> list[tf.Tensor]:
        return [loss for layer in self.layers for loss in layer._eager_losses]

    def penalty(self) -> tf.Tensor | None:
        losses = [loss() for layer in self.layers for loss in layer._callable_losses]
        losses = [loss for loss in losses if loss is not None]
        return tf.add_n(losses) if losses else None

    @contextmanager
    def fp32_weight_gradients(self) -> Iterator[None]:
        yield


def _may_do_more(layer: Any) -> bool:
    """Whether a call may add losses, or assign variables of others: of Keras's own layers few do."""
    few = keras.layers.SpectralNormalization, keras.layers.Lambda
    own = type(layer).__module__.startswith("keras.") and not isinstance(layer, few)
    return not own or layer.activity_regularizer is not None


def _assigned(graph: Any, of_keras: list[Any]) -> list[Any]:
    """The variables that a function's graph assigns, as Keras variables where they are some."""
    owners = {id(part.handle): v for v in of_keras for part in _components(v)}
    owners = {id(v.handle): v for v in graph.variables} | owners
    outside = {id(inside): id(handle) for handle, inside in graph.captures}
    written = [outside.get(id(t)) for op in graph.get_operations() for t in get_read_write_resource_inputs(op)[1]]
    found = {id(owners[handle]): owners[handle] for handle in written if handle in owners}
    return list(found.values())


def _components(variable: Any) -> list[tf.Variable]:
    """A Keras variable's, one on every replica; a tf_keras variable is its own."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return list(getattr(value, "values", [value]))


def _plain(variables: list[Any]) -> list[tf.Variable]:
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]


def _require_sum_over_rows(layer: Any) -> None:
    """Raises ValueError for an activity regulariser of a user's that is a mean over rows, which tf_keras divides by the
    number of rows once more: that of each micro-batch.
    """
    regularizer = getattr(layer, "activity_regularizer", None)
    if regularizer is None or type(regularizer).__module__.startswith("tf_keras."):
        return
    try:
        one, two = (float(regularizer(tf.fill([rows, 4], 0.5))) for rows in (1, 2))
    except Exception:  # it takes other shapes, or a distribution
        one, two = 0.0, 1.0
    if one == two != 0.0 or type(regularizer).__name__ == "KLDivergenceRegularizer":
        name = getattr(regularizer, "__name__", type(regularizer).__name__)
        raise ValueError(
            f"The activity_regularizer {name} of layer {layer.name!r} is a mean over rows, which tf_keras divides by "
            "the number of rows once more: its strength would be that of the micro-batch's size. Let it return a sum "
            "over rows, or add the mean in a layer by add_loss, as tensorflow-probability's KLDivergenceAddLoss does."
        )


def _reduction(added_loss: Any) -> str:
    return "sum" if len(added_loss.shape) else "mean"


def _lookup_class(layer: Any) -> Any:
    """Keras's or tf_keras's own Embedding, where a layer is one; None otherwise, whatever the layer is called."""
    packages = ("keras", "tf_keras")
    own = [c for c in type(layer).__mro__ if c.__name__ == "Embedding" and c.__module__.partition(".")[0] in packages]
    return own[0] if own else None


def _observing(layer: Any, observe: Callable[[tf.Tensor], None]) -> Any:
    """A class for an embedding: its own, with one between it and Keras's Embedding that observes the ids."""
    base = _lookup_class(layer)

    def observed(method):
        def lookup(self, inputs, *args, **kwargs):
            # Of sparse and ragged ids those that are there.
            observe(getattr(inputs, "flat_values", getattr(inputs, "values", inputs)))
            return method(self, inputs, *args, **kwargs)

        return lookup

    names = [name for name in ("call", "_int8_call", "_int4_call") if hasattr(base, name)]
    methods = {name: observed(getattr(base, name)) for name in names}
    between = types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(methods))
    own = type(layer)
    return between if own is base else types.new_class(own.__name__, (own, between))
