"""A Keras 3 model: its variables, state and forward pass, and what a padded row may touch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils.tracking import DotNotTrackScope

from fastaccum import checks
from fastaccum.adapters import added_losses, assigned, batch_size, coupling, embeddings, layers, remat
from fastaccum.adapters.attributes import raw, replaced
from fastaccum.adapters.interceptors import Interceptor, Role
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.packages import of_keras, package
from fastaccum.kernels import fp32_layers
from fastaccum.kernels.layer_stack import LayerStack


class Model:
    """A Keras 3 model."""

    legacy = False  # whether it is tf_keras's
    # Where a compiled model keeps its losses, what the user passed for them there, and its metrics.
    _COMPILED = "_compile_loss", "_user_loss", "_compile_metrics"

    def __init__(self, model: keras.Model):
        self.model = model
        # How the losses that a forward pass adds count: a scalar as the rows' mean, one per row as a sum, as in
        # Keras. Known once the model has been called.
        self.added_reductions: list[str] = []
        # Known then too: the variables, Keras's and others, that a forward pass assigns.
        self._assigned: list[Any] = []
        # And whether the result of it for a row depends on the others.
        self.mixes_rows = False
        self.row_counter: str | None = None  # an operation by which the number of rows reaches what it returns
        self.unsaved_draws: list[str] = []  # operations in training that draw what no seed of the model's says

    @property
    def layers(self) -> list[Any]:
        """Every layer, nested ones too, the model itself included."""
        return list(self.model._flatten_layers())

    @property
    def called_layers(self) -> list[Any]:
        """Every layer whose `call` runs: those that a LayerStack calls for its own too."""
        return list({id(layer): layer for layer in fp32_layers.all_layers(self.model)}.values())

    def symbolic_call(self, x: Any, training: bool) -> Any:
        """Output specs for input specs `x` (a nest of tf.TensorSpec), without computing; builds the model."""
        with _naming(x):
            outputs = self._symbolic(x, training)
        if self.may_do_more:
            self._note_calls(x)
        return outputs

    def _symbolic(self, x: Any, training: bool) -> Any:
        inputs = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), x)
        try:
            return self.model(inputs, training=training)
        except (TypeError, ValueError):
            if not self.model.built:
                raise
            # Functional models ask layers for their specs without casting what they are given, as a call does.
            traced = tf.function(self.model, autograph=False).get_concrete_function(x, training=training)
            return tf.nest.map_structure(
                lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype.name), traced.structured_outputs
            )

    def require_inputs(self, x: Any) -> None:
        """Raises ValueError for a list of more or fewer inputs than the model has; Keras drops what is too many."""
        expected = len(tf.nest.flatten(getattr(self.model, "inputs", None) or []))
        if expected and isinstance(x, (list, tuple)) and (given := len(tf.nest.flatten(x))) != expected:
            raise ValueError(f"x has {given} arrays, but the model has {expected} inputs: pass one for each.")

    @property
    def may_take_text(self) -> bool:
        """Whether strings may be among its inputs, as far as is known."""
        inputs = tf.nest.flatten(getattr(self.model, "inputs", None) or [])
        return not inputs or any(tf.as_dtype(each.dtype) == tf.string for each in inputs)

    @property
    def preprocess(self) -> Callable[..., Any] | None:
        """What makes a KerasHub task's batches of raw (x, y, sample_weight); None for any other model."""
        if getattr(self.model, "preprocessor", None) is None:
            return None
        return getattr(self.model, "preprocess_samples", None)

    def __call__(self, x: Any, training: bool) -> Any:
        with replaced(added_losses.marked_regularizers(self.layers)), _naming(x):
            outputs = self.model(x, training=training)
        rows = tf.nest.flatten(x)[0].shape[0]
        for output in tf.nest.flatten(outputs):
            # Lookups of text forget how many rows they were given.
            if tf.is_tensor(output) and output.shape.rank and output.shape[0] is None:
                tf.debugging.assert_equal(tf.shape(output)[0], rows)
                output.set_shape([rows, *output.shape[1:]])
        return outputs

    def overrides(self, method: str) -> bool:
        """Whether a method of Keras's Model is the model's own."""
        return method in vars(self.model) or getattr(type(self.model), method) is not getattr(self._family, method)

    @property
    def _family(self) -> Any:
        return keras.Model

    @property
    def compiled_with(self) -> dict[str, Any]:
        """The losses and metrics that the model was compiled with, as arguments of `compile`."""
        of_losses, user_loss, of_metrics = self._COMPILED
        losses, metrics = (getattr(self.model, name, None) for name in (of_losses, of_metrics))
        return {
            "loss": getattr(losses, user_loss, None),
            "loss_weights": getattr(losses, "_user_loss_weights", None),
            "metrics": getattr(metrics, "_user_metrics", None),
            "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        }

    @property
    def compilation(self) -> tuple[Any, Any]:
        """What `compile` replaces."""
        return self.model.optimizer, getattr(self.model, self._COMPILED[0], None)

    def compiled_since(self, compilation: tuple[Any, Any]) -> bool:
        """Whether the model has been compiled since it had this `compilation`."""
        return any(now is not then for now, then in zip(self.compilation, compilation, strict=True))

    @property
    def returned_losses(self) -> int:
        """How many means the loss consists of that the model returns by itself, where it is given no other."""
        return 0

    def with_losses(
        self, x: Any, y: Any, training: bool, valid: tf.Tensor | None
    ) -> tuple[Any, list[tuple[tf.Tensor, tf.Tensor]]]:
        """What the model returns, and the value and the weight sum of each of these means over the `valid` rows."""
        raise NotImplementedError

    @property
    def takes_targets_apart(self) -> bool:
        """Whether targets need not have the structure of the outputs: the model, or its adapter, finds what belongs to
        which.
        """
        return self.overrides("compute_loss")

    def matched(self, x: Any, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """Targets and what they are compared with, in one structure."""
        return y, y_pred

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
        """The model's own `compute_loss`."""
        return self.model._compute_loss(x, y, y_pred, sample_weight, training=training)

    @contextlib.contextmanager
    def own_losses(self, compiled: Callable | None, rescaled: Callable[[tf.Tensor, bool], tf.Tensor]) -> Iterator[None]:
        """Within the scope, after a forward pass, `compute_loss` finds `compiled` for the compiled loss, and each of
        `self.losses` as `rescaled(loss, is_regularizer)`.
        """
        losses = [rescaled(loss, False) for loss in self._added_losses()]
        losses += [rescaled(v.regularizer(v), True) for v in self._regularised()]
        if compiled is not None:
            compiled.metrics = []  # type: ignore[attr-defined] # as Keras's has
        with replaced([(self.model, "_compile_loss", compiled), (self.model, "_losses_override", losses)]):
            yield

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, update: Callable) -> dict[str, Any]:
        """What the model's own `compute_metrics` returns; `update(y, y_pred, sample_weight)` is `compile`'s part."""
        with replaced([(self.model._compile_metrics, "update_state", update)]):
            return self.model.compute_metrics(x, y, y_pred, sample_weight)

    @property
    def own_metrics(self) -> list[Any]:
        """Metrics that the model and its layers hold and update themselves, as Keras would log them."""
        model = self.model
        of_compile = [model._loss_tracker, model._compile_metrics, *getattr(model._compile_loss, "metrics", ())]
        return [m for m in model.metrics if all(m is not each for each in of_compile)]

    @property
    def metric_variables(self) -> list[tf.Variable]:
        """What the metrics of all layers hold."""
        return [v.value for layer in self.layers for metric in layer._metrics for v in metric.variables]

    @property
    def variables(self) -> list[Any]:
        """All of its variables. tf_keras also lists the vocabularies of lookups, which are none."""
        return [v for v in self.model.variables if isinstance(v, (keras.Variable, tf.Variable))]

    @property
    def trainable_variables(self) -> list[Any]:
        """What the optimizer trains, in the form that an optimizer of the same family takes."""
        if type(self.model).trainable_weights is not keras.Model.trainable_weights:
            return self.model.trainable_weights  # what Keras's own step trains, where a model overrides it
        return self.model.trainable_variables

    @property
    def state(self) -> list[tf.Variable]:
        """Variables that a forward pass may assign (moving statistics, random seeds), frozen weights left out."""
        own = [v for layer in self.layers for v in self._own_state(layer)]
        # A SpectralNormalization assigns a weight of another layer, and layers of the user's own what they like.
        known = {id(v) for v in (*own, *self.metric_variables)}
        return [*own, *(v for v in map(raw, self._assigned) if id(v) not in known)]

    @property
    def statistics(self) -> list[tf.Variable]:
        """The part of `state` that Keras's own layers hold, and a train step moves."""
        own = [layer for layer in self.layers if of_keras(type(layer)) and layer.name in self.moving_layers]
        return [v for layer in own for v in self._own_state(layer) if v.dtype.is_floating]

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
        owners = [layer.name for layer in self.called_layers for v in layer.trainable_variables if variable is raw(v)]
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

    @property
    def may_do_more(self) -> bool:
        """Whether a call may add losses, assign variables or mix rows, which only a trace shows."""
        return any(map(_may_do_more, self.layers))

    def _added_losses(self) -> list[tf.Tensor]:
        """The data-dependent losses of the last call: `add_loss` and activity regularisers."""
        return self.model.losses[: len(self.model.losses) - len(self._regularised())]

    def _note_calls(self, x: Any) -> Any:
        for layer in self.layers:
            added_losses.require_sum_over_rows(layer)
        # Keras forgets what a symbolic call adds and assigns; a traced one shows it. Some layers add in one mode only.
        for training in (True, False):
            call = functools.partial(self.__call__, training=training)
            try:
                traced = coupling.traced(call, x)
                if training and any(map(_may_count_rows, self.called_layers)):
                    self.row_counter = batch_size.row_counter(traced, call, x)
                self.mixes_rows |= bool(self.row_counter or coupling.mixing(traced.graph))
            except (ValueError, TypeError, tf.errors.InvalidArgumentError):  # a model of a fixed batch size
                traced, self.mixes_rows = coupling.traced(call, x, rows=None), True
            if training:
                self.unsaved_draws = coupling.draws(traced.graph)
            written = [*self._assigned, *assigned.assigned(traced.graph, self.variables)]
            self._assigned = list({id(v): v for v in written}.values())
            self.added_reductions = sorted({*self.added_reductions, *map(added_losses.reduction, self._added_losses())})
        return traced.structured_outputs

    def added_loss(self, reduction: str) -> tf.Tensor:
        """The sum of the last call's added losses of one kind of `added_reductions`: float32 scalar."""
        losses = [loss for loss in self._added_losses() if added_losses.reduction(loss) == reduction]
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
        return embeddings.lookups(self.layers)

    @property
    def couples_rows(self) -> bool:
        """Whether rows share statistics or losses, so that one that only pads would be felt; known after a call."""
        moved = any(v.dtype.is_floating for v in map(raw, self._assigned))
        return moved or self.mixes_rows or bool(self.moving_layers) or self.couples_losses

    @property
    def split_sensitive_layers(self) -> list[str]:
        """Names the layers whose numbers depend on how rows are split: random masks, statistics, mixed rows."""
        names = [layer.name for layer in self.layers if self._draws(layer) or layer.name in self.moving_layers]
        return [*map(repr, names), *(["layers that mix rows"] if self.mixes_rows else [])]

    def _draws(self, layer: Any) -> bool:
        return bool(layer._seed_generators) and not never_draws(layer)

    @property
    def couples_losses(self) -> bool:
        """Whether losses or metrics are of the model's own, which know a batch's rows as one."""
        return bool(self.added_reductions) or self.overrides("compute_loss") or self.overrides("compute_metrics")

    @property
    def recomputed_layers(self) -> list[Any]:
        """The layers that a `keras.RematScope` recomputes whole."""
        own = [layer for layer in self.layers if "rematerialized_call" not in vars(layer)]  # which `fa.remat` sets
        return [layer for layer in own if remat.scope_mode(layer) not in (None, "activations")]

    def state_within(self, layer: Any) -> list[tf.Variable]:
        """What the layers in a layer, and itself, assign."""
        return [v for part in layer._flatten_layers() for v in self._own_state(part)]

    def uncompilable_layers(self) -> list[str]:
        """Layers that say that XLA cannot compile them, as "name (Type)"."""
        found = [layer for layer in self.layers if not getattr(layer, "supports_jit", True)]
        return [f"{layer.name} ({type(layer).__name__})" for layer in found]

    def adopt(self, optimizer: Any, metrics: Metrics, loss: Any, loss_weights: Any) -> None:
        """Leaves the model as `compile` would, for callbacks, `save` and Keras's own `evaluate`."""
        if not isinstance(optimizer, keras.Optimizer):
            self.model.optimizer = optimizer
            return
        # Keras's own: a `compile` that the model overrides takes other arguments, and was called by the user.
        weights = tf.nest.map_structure(lambda w: None if w is None else float(w), loss_weights)
        own = metrics.for_compile(self.legacy)
        keras.Model.compile(self.model, optimizer, loss, loss_weights=weights, auto_scale_loss=False, **own)
        # Untracked, as in `compile`: a metric that the model also tracked as its own would be listed twice.
        with DotNotTrackScope():
            self.model._compile_metrics = metrics.compiled

    def id_observers(self, observe: Callable[[int, tf.Tensor], None]) -> list[Interceptor]:
        """Returns interceptors that first pass the ids of embedding i of `lookups` to `observe(i, ids)`."""
        return embeddings.id_observers([layer for layer, _ in self.lookups], observe)

    def fp32_weight_gradients(self) -> list[Interceptor]:
        """Returns interceptors that compute weight gradients in float32 under mixed precision."""
        calls = fp32_layers.fp32_calls(self.called_layers)
        return [Interceptor(layer, "call", call, Role.PRECISION) for layer, call in calls]

    def compiled_forms(self, fast_gradients: bool) -> list[Interceptor]:
        """Returns interceptors that compute layers as XLA compiles them in a loop, or runs them fast on a CPU too."""
        return layers.forms(self.called_layers, fast_gradients)


def _naming(x: Any) -> contextlib.AbstractContextManager[None]:
    shapes = tf.nest.map_structure(lambda each: tuple(each.shape), x)
    return checks.naming(f"The model, called with x of shape {shapes}", NotImplementedError)


def never_draws(layer: Any) -> bool:
    """Whether a layer of Keras's, as a recurrent cell is, can draw and has no rate to draw by."""
    rates = [
        getattr(layer, name) for name in ("rate", "stddev", "dropout", "recurrent_dropout") if hasattr(layer, name)
    ]
    return of_keras(type(layer)) and bool(rates) and not any(rates)


def _may_count_rows(layer: Any) -> bool:
    """Tells if a call may compute with the number of rows: Keras's and KerasHub's layers do not."""
    own = package(type(layer)) not in ("keras", "tf_keras", "keras_hub", "fastaccum")
    return own or isinstance(layer, keras.layers.Lambda) or _has_own_activation(layer)


def _has_own_activation(layer: Any) -> bool:
    functions = (getattr(layer, name, None) for name in ("activation", "recurrent_activation"))
    return any(each is not None and package(each) not in ("keras", "tf_keras", "tensorflow") for each in functions)


def _may_do_more(layer: Any) -> bool:
    """Whether a call may add losses, assign variables of others or mix rows: of Keras's layers and ours few do."""
    few = keras.layers.SpectralNormalization, keras.layers.Lambda, LayerStack  # of others' layers
    own = package(type(layer)) in ("keras", "fastaccum") and not isinstance(layer, few)
    across_rows = 0 in tf.nest.flatten(getattr(layer, "axis", -1))
    of_ops = any(not isinstance(each, keras.layers.Layer) for each in getattr(layer, "operations", ()))
    regularised = layer.activity_regularizer is not None
    written = of_ops or regularised or _has_own_activation(layer)
    return not own or written or getattr(layer, "stateful", False) or across_rows
