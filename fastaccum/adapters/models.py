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

from fastaccum.adapters import huggingface
from fastaccum.adapters import layers as xla_layers
from fastaccum.adapters.attributes import replaced
from fastaccum.kernels import fp32_layers

# Whether Keras divides what an activity regulariser returns, which sums over rows, by their number.
_DIVIDES_BY_ROWS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14)


def get(model: Any) -> Model:
    """The adapter for a Keras 3 or tf_keras model."""
    if isinstance(model, keras.Model):
        return Model(model)
    if huggingface.is_pretrained(model):
        return PretrainedModel(model)
    if any(_package(c) == "tf_keras" and c.__name__ == "Model" for c in type(model).__mro__):
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
        # Known then too: the variables, Keras's and others, that a forward pass assigns.
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
        try:
            outputs = self.model(inputs, training=training)
        except (TypeError, ValueError):
            if not self.model.built:
                raise
            # Functional models ask layers for their specs without casting what they are given, as a call does.
            traced = tf.function(self.model, autograph=False).get_concrete_function(x, training=training)
            outputs = tf.nest.map_structure(
                lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype.name), traced.structured_outputs
            )
        if self.may_add_losses:
            self._note_calls(
                tf.nest.map_structure(lambda s: tf.TensorSpec([s.shape[0] or 1, *s.shape[1:]], s.dtype), x)
            )
        return outputs

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
        with replaced(self._marked_regularizers()):
            outputs = self.model(x, training=training)
        rows = tf.nest.flatten(x)[0].shape[0]
        for output in tf.nest.flatten(outputs):
            # Lookups of text forget how many rows they were given.
            if tf.is_tensor(output) and output.shape.rank and output.shape[0] is None:
                tf.debugging.assert_equal(tf.shape(output)[0], rows)
                output.set_shape([rows, *output.shape[1:]])
        return outputs

    def _marked_regularizers(self) -> list[tuple[Any, str, Callable]]:
        layers = [] if _DIVIDES_BY_ROWS else [each for each in self.layers if each.activity_regularizer is not None]
        return [(each, "activity_regularizer", _marked(each.activity_regularizer)) for each in layers]

    def overrides(self, method: str) -> bool:
        """Whether a method of Keras's Model is the model's own."""
        return method in vars(self.model) or getattr(type(self.model), method) is not getattr(self._family, method)

    @property
    def _family(self) -> Any:
        return keras.Model

    @property
    def compiled_with(self) -> dict[str, Any]:
        """The losses and metrics that the model was compiled with, as arguments of `compile`; empty without a loss."""
        loss, metrics = getattr(self.model, "_compile_loss", None), getattr(self.model, "_compile_metrics", None)
        if loss is None:
            return {}
        return {
            "loss": loss._user_loss,
            "loss_weights": loss._user_loss_weights,
            "metrics": getattr(metrics, "_user_metrics", None),
            "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        }

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

    @contextmanager
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
        return self.model.trainable_variables

    @property
    def state(self) -> list[tf.Variable]:
        """Variables that a forward pass may assign (moving statistics, random seeds), frozen weights left out."""
        own = [v for layer in self.layers for v in self._own_state(layer)]
        # A SpectralNormalization assigns a weight of another layer, and layers of the user's own what they like.
        known = {id(v) for v in (*own, *self.metric_variables)}
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

    @property
    def may_add_losses(self) -> bool:
        """False where it is known that a call adds no loss."""
        return any(map(_may_do_more, self.layers))

    def _added_losses(self) -> list[tf.Tensor]:
        """The data-dependent losses of the last call: `add_loss` and activity regularisers."""
        return self.model.losses[: len(self.model.losses) - len(self._regularised())]

    def _note_calls(self, x: Any) -> Any:
        for layer in self.layers:
            _require_sum_over_rows(layer)
        # Keras forgets what a symbolic call adds and assigns; a traced one shows it. Some layers add in one mode only.
        for training in (True, False):
            traced = tf.function(self.__call__, autograph=False).get_concrete_function(x, training=training)
            assigned = [*self._assigned, *_assigned(traced.graph, self.variables)]
            self._assigned = list({id(v): v for v in assigned}.values())
            self.added_reductions = sorted({*self.added_reductions, *map(_reduction, self._added_losses())})
        return traced.structured_outputs

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
        return assigned or bool(self.moving_layers) or self.couples_losses

    @property
    def couples_losses(self) -> bool:
        """Whether losses or metrics are of the model's own, which know a batch's rows as one."""
        return bool(self.added_reductions) or self.overrides("compute_loss") or self.overrides("compute_metrics")

    @property
    def recomputed_layers(self) -> list[Any]:
        """The layers that a `keras.RematScope` recomputes whole."""
        modes = [(layer, getattr(layer, "_remat_mode", None)) for layer in self.layers]
        chosen = [(layer, mode) for layer, mode in modes if mode and mode.mode not in (None, "activations")]
        return [each for each, mode in chosen if mode.mode != "list_of_layers" or each.name in mode.layer_names]

    def state_within(self, layer: Any) -> list[tf.Variable]:
        """What the layers in a layer, and itself, assign."""
        return [v for part in layer._flatten_layers() for v in self._own_state(part)]

    def uncompilable_layers(self) -> list[str]:
        """Layers that say that XLA cannot compile them, as "name (Type)"."""
        return [
            f"{layer.name} ({type(layer).__name__})"
            for layer in self.layers
            if not getattr(layer, "supports_jit", True)
        ]

    def adopt(self, optimizer: Any, metrics: keras.Metric, loss: Any, loss_weights: Any) -> None:
        """Leaves the model as `compile` would, for callbacks, `save` and Keras's own `evaluate`."""
        if not isinstance(optimizer, keras.Optimizer):
            self.model.optimizer = optimizer
            return
        # Keras's own: a `compile` that the model overrides takes other arguments, and was called by the user.
        keras.Model.compile(self.model, optimizer, loss, loss_weights=loss_weights, auto_scale_loss=False)
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
        if not self.model.built:
            # tf_keras has no symbolic call for subclassed models; one row of zeros builds them all the same.
            self.model(
                tf.nest.map_structure(lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), x), training=False
            )
        # Not called with numbers, which would move the state of a model that has some.
        outputs = self._note_calls(
            tf.nest.map_structure(lambda s: tf.TensorSpec([s.shape[0] or 1, *s.shape[1:]], s.dtype), x)
        )
        rows = tf.nest.flatten(x)[0].shape[0]
        return tf.nest.map_structure(
            lambda t: None if t is None else keras.KerasTensor((rows, *t.shape[1:]), t.dtype.name), outputs
        )

    @property
    def called_layers(self) -> list[Any]:
        return self.layers

    def _own_state(self, layer: Any) -> list[tf.Variable]:
        if hasattr(layer, "update_state"):  # a metric, which is a layer here
            return []
        return [v for v in layer._non_trainable_weights if isinstance(v, tf.Variable)]

    @property
    def may_add_losses(self) -> bool:
        return True

    def _added_losses(self) -> list[tf.Tensor]:
        return [loss for layer in self.layers for loss in layer._eager_losses]

    def penalty(self) -> tf.Tensor | None:
        losses = [loss() for layer in self.layers for loss in layer._callable_losses]
        losses = [loss for loss in losses if loss is not None]
        return tf.add_n(losses) if losses else None

    def adopt(self, optimizer: Any, metrics: keras.Metric, loss: Any, loss_weights: Any) -> None:
        losses = [each for each in tf.nest.flatten(loss) if each is not None]
        of_keras_3 = any(isinstance(each, (keras.Loss, keras.Optimizer)) for each in (*losses, optimizer))
        if losses and not of_keras_3 and self.model.compiled_loss is None:
            # tf_keras's own, as above; without it `save` leaves the optimizer out.
            self._family.compile(self.model, optimizer, loss, loss_weights=loss_weights)
        self.model.optimizer = optimizer

    @contextmanager
    def fp32_weight_gradients(self) -> Iterator[None]:
        yield

    @property
    def _family(self) -> Any:
        return next(c for c in type(self.model).__mro__ if c.__name__ == "Model" and _package(c) == "tf_keras")

    @property
    def compiled_with(self) -> dict[str, Any]:
        losses, metrics = getattr(self.model, "compiled_loss", None), getattr(self.model, "compiled_metrics", None)
        if losses is None or losses._user_losses is None:
            return {}
        return {
            "loss": losses._user_losses,
            "loss_weights": losses._user_loss_weights,
            "metrics": getattr(metrics, "_user_metrics", None),
            "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        }

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
        return self.model.compute_loss(x, y, y_pred, sample_weight)

    @contextmanager
    def own_losses(self, compiled: Callable | None, rescaled: Callable[[tf.Tensor, bool], tf.Tensor]) -> Iterator[None]:
        with replaced([(self.model, "compiled_loss", compiled)]):
            yield

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, update: Callable) -> dict[str, Any]:
        compiled = types.SimpleNamespace(update_state=update, metrics=[])
        with replaced([(self.model, "compiled_metrics", compiled)]):
            return self.model.compute_metrics(x, y, y_pred, sample_weight)

    @property
    def own_metrics(self) -> list[Any]:
        return [metric for layer in self.layers for metric in layer._metrics]

    @property
    def metric_variables(self) -> list[tf.Variable]:
        return [v for metric in self.own_metrics for v in metric.variables]


class PretrainedModel(LegacyModel):
    """A Hugging Face TF model, whose `train_step` does what is done here: its own loss from labels, or a Keras loss."""

    @property
    def _family(self) -> Any:
        return next(c for c in type(self.model).__mro__ if c.__name__ == "TFPreTrainedModel")

    @property
    def compiled_with(self) -> dict[str, Any]:
        return {} if getattr(self.model, "_using_dummy_loss", True) else super().compiled_with

    @property
    def lookups(self) -> list[tuple[Any, int]]:
        return [*super().lookups, *huggingface.tables(self.layers)]

    @property
    def returned_losses(self) -> int:
        return huggingface.means(self.model)

    def with_losses(
        self, x: Any, y: Any, training: bool, valid: tf.Tensor | None
    ) -> tuple[Any, list[tuple[tf.Tensor, tf.Tensor]]]:
        inputs = huggingface.with_labels(self.model, x, y)
        with huggingface.observed_losses(self.model, valid) as seen:
            outputs = self.model(inputs, training=training, **huggingface.call_options(self.model))
        rows = tf.nest.flatten(x)[0].shape[0]
        return outputs, [tuple(each) for each in huggingface.terms(self.model, outputs, seen, rows, valid)]

    @property
    def takes_targets_apart(self) -> bool:
        return True

    def matched(self, x: Any, y: Any, y_pred: Any) -> tuple[Any, Any]:
        return huggingface.matched(self.model, x, y if tf.nest.flatten(y) else None, y_pred)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _may_do_more(layer: Any) -> bool:
    """Whether a call may add losses, or assign variables of others: of Keras's own layers few do."""
    few = keras.layers.SpectralNormalization, keras.layers.Lambda
    own = type(layer).__module__.startswith("keras.") and not isinstance(layer, few)
    return not own or layer.activity_regularizer is not None or getattr(layer, "stateful", False)


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
    """Raises ValueError for an activity regulariser of a user's that is a mean over rows where Keras takes a sum, which
    it divides by their number: its strength would depend on how the rows are cut.
    """
    regularizer = getattr(layer, "activity_regularizer", None)
    if regularizer is None or type(regularizer).__module__.startswith(("keras.", "tf_keras.")):
        return
    try:
        one, two = (float(regularizer(tf.fill([rows, 4], 0.5))) for rows in (1, 2))
    except Exception:  # it takes other shapes, or a distribution
        one, two = 0.0, 1.0
    if one == two != 0.0 or type(regularizer).__name__ == "KLDivergenceRegularizer":
        name = getattr(regularizer, "__name__", type(regularizer).__name__)
        raise ValueError(
            f"The activity_regularizer {name} of layer {layer.name!r} is a mean over rows where Keras takes a sum: its "
            "strength would depend on the micro-batch's size. Let it return a sum over rows, or add the mean in a "
            "layer by add_loss, as tensorflow-probability's KLDivergenceAddLoss does."
        )


def _reduction(added_loss: Any) -> str:
    return "sum" if len(added_loss.shape) or getattr(added_loss, "sums_rows", False) else "mean"


def _marked(regularizer: Callable) -> Callable:
    def marked(output):
        loss = regularizer(output)
        loss.sums_rows = True
        return loss

    return marked


def _lookup_class(layer: Any) -> Any:
    """Keras's or tf_keras's own Embedding, where a layer is one; None otherwise, whatever the layer is called."""
    packages = ("keras", "tf_keras")
    own = [c for c in type(layer).__mro__ if c.__name__ == "Embedding" and c.__module__.partition(".")[0] in packages]
    return own[0] if own else None


def _observing(layer: Any, observe: Callable[[tf.Tensor], None]) -> Any:
    """A class for an embedding: its own, with one between it and Keras's Embedding that observes the ids."""
    base = _lookup_class(layer) or type(layer)

    def observed(method):
        def lookup(self, *args, **kwargs):
            ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
            if ids is not None:
                # Of sparse and ragged ids those that are there.
                observe(getattr(ids, "flat_values", getattr(ids, "values", ids)))
            return method(self, *args, **kwargs)

        return lookup

    names = [name for name in ("call", "_int8_call", "_int4_call") if hasattr(base, name)]
    methods = {name: observed(getattr(base, name)) for name in names}
    between = types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(methods))
    own = type(layer)
    return between if own is base else types.new_class(own.__name__, (own, between))
