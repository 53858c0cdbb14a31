"""A Keras 3 model: its variables, state and forward pass, and what a padded row may touch."""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters import added_losses, jit_choice, layers, row_counts, row_mixing, traces
from fastaccum.adapters.attributes import Nest, Variable, kinds, of_keras, package, raw, replaced
from fastaccum.adapters.data_adapters import wrap_sequence
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.outputs import Outputs
from fastaccum.kernels import fp32_layers, private
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.lines import without_arguments

# Of Keras's own layers and ours: those whose call may add losses, assign other layers' variables or
# mix rows.
_NAMES = "MixUp", "CutMix", "Equalization", "AugMix", "RandAugment"  # not in every Keras 3
_MIXING = [getattr(keras.layers, name) for name in _NAMES if hasattr(keras.layers, name)]
_TRACED = (keras.layers.SpectralNormalization, keras.layers.Lambda, LayerStack, *_MIXING)


class WithinFit:
    """A method of a model while a fit trains it: each call runs inside the block that `enter`
    makes.
    """

    def __init__(
        self, method: Callable, enter: Callable[[], contextlib.AbstractContextManager[None]]
    ):
        self.method = method
        self.enter = enter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.enter():
            return self.method(*args, **kwargs)


class Model:
    """A Keras 3 model."""

    # of the callbacks that its own loop takes, where it takes no other
    callback_kind: str | None = None
    trains_on_replicas = True
    _PACKAGE, KIND, _FOREIGN_METRIC = "keras", "keras.Model", "tf_keras.Metric"
    OUTPUTS = Outputs
    # Where a compiled model keeps its losses, what the user passed for them there, and its metrics.
    _COMPILED = private.compile_loss.name, private.user_loss.name, private.compile_metrics.name

    def __init__(self, model: keras.Model):
        self.model = model
        # Known once the model has been called: how the losses that a forward pass adds count, the
        # variables that it assigns, and whether its result for a row depends on others.
        self.added_reductions: list[str] = []
        self._assigned: list[Variable] = []
        self.mixes_rows = False
        # an operation by which the number of rows reaches what it returns
        self.row_counter: str | None = None
        self._work: jit_choice.Work | None = None
        self.python_calls: list[str] = []  # operations that call Python, as by tf.py_function
        # operations in training that draw what no seed of the model's says
        self.unsaved_draws: list[str] = []

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """Every layer, with nested ones and the model itself."""
        return list(private.flatten_layers(self.model))

    @property
    def called_layers(self) -> list[keras.layers.Layer]:
        """Every layer whose `call` runs, also those that a LayerStack calls."""
        return list({id(layer): layer for layer in fp32_layers.all_layers(self.model)}.values())

    def symbolic_call(self, x: Nest, training: bool) -> Nest:
        """Returns output specs for input specs `x` (a nest of tf.TensorSpec), and builds the
        model.
        """
        with _naming(x):
            try:
                outputs = self.model(_as_keras_tensors(x), training=training)
            except (TypeError, ValueError):
                if not self.model.built:
                    raise
                # Functional models ask layers for their specs without casting what they are given,
                # as a call does.
                traced = tf.function(self.model, autograph=False).get_concrete_function(
                    x, training=training
                )
                outputs = _as_keras_tensors(traced.structured_outputs)
        if self.may_do_more:
            self._note_calls(x)
        return outputs

    def require_inputs(self, x: Nest) -> None:
        """Raises ValueError for a list of more or fewer inputs than the model has; Keras drops what
        is too many.
        """
        expected = len(tf.nest.flatten(getattr(self.model, "inputs", None) or []))
        if (
            expected
            and isinstance(x, (list, tuple))
            and (given := len(tf.nest.flatten(x))) != expected
        ):
            raise ValueError(
                f"x has {given} arrays, but the model has {expected} inputs: pass one for each."
            )

    @property
    def keras_module(self) -> types.ModuleType:
        """The Keras that the model is of."""
        return sys.modules[self._PACKAGE]

    @property
    def compute_loss_adds_penalty(self) -> bool:
        """True if the model's own `compute_loss` has weight regularisers in each micro-batch,
        unseen by the step.
        """
        return False

    def predict(self, x: Nest, **options: Any) -> Any:
        return self.model.predict(wrap_sequence(x), **options)

    @property
    def may_take_text(self) -> bool:
        """True if strings may be among the inputs, as far as is known."""
        inputs = tf.nest.flatten(getattr(self.model, "inputs", None) or [])
        return not inputs or any(tf.as_dtype(each.dtype) == tf.string for each in inputs)

    @property
    def preprocess(self) -> Callable[..., Nest] | None:
        """The function by which a KerasHub task preprocesses raw (x, y, sample_weight); None for
        any other model.
        """
        if getattr(self.model, "preprocessor", None) is None:
            return None
        return getattr(self.model, "preprocess_samples", None)

    def __call__(self, x: Nest, training: bool) -> Nest:
        with replaced(added_losses.mark_regularizers(self.layers)), _naming(x):
            outputs = self.model(x, training=training)
        rows = tf.nest.flatten(x)[0].shape[0]
        for output in tf.nest.flatten(outputs):
            # Lookups of text forget how many rows they were given.
            if (
                rows is not None
                and tf.is_tensor(output)
                and output.shape.rank
                and output.shape[0] is None
            ):
                tf.debugging.assert_equal(tf.shape(output)[0], rows)
                output.set_shape([rows, *output.shape[1:]])
        return outputs

    def overrides(self, method: str) -> bool:
        """Tells if the model overrides a method of Keras's Model."""
        of_class = getattr(type(self.model), method) is not getattr(self.family, method)
        return self._has_own(method) or of_class

    def replaces_loop(self, method: str) -> bool:
        """Tells if the model overrides `fit` or `evaluate`, other than to preprocess its data as
        `preprocess` does.
        """
        if not self.overrides(method):
            return False
        overriding = next((c for c in type(self.model).__mro__ if method in vars(c)), None)
        preprocesses = package(overriding) == "keras_hub" and "preprocess_samples" in vars(
            overriding
        )
        return self._has_own(method) or not preprocesses

    def _has_own(self, method: str) -> bool:
        """Tells if the model object itself, and not its class, has a method of the user's."""
        return method in vars(self.model) and not isinstance(vars(self.model)[method], WithinFit)

    @property
    def passed_over_methods(self) -> list[str]:
        """The methods of Keras's loops that the model overrides and that are never called: private
        ones.
        """
        trainers = [c for c in self.family.__mro__[1:] if c not in keras.layers.Layer.__mro__]
        names = {name for c in trainers for name in vars(c) if name[0] == "_" and name[:2] != "__"}
        return sorted(name for name in names if self.overrides(name))

    @property
    def own_reset(self) -> Callable[[], None] | None:
        """The `reset_metrics` that the model overrides; None for Keras's."""
        return self.model.reset_metrics if self.overrides("reset_metrics") else None

    @property
    def own_results(
        self,
    ) -> Callable[[Mapping[str, tf.Tensor], keras.Metric], dict[str, Any]] | None:
        """The `get_metrics_result` that the model overrides, as a function of the losses and the
        compiled metrics.
        """
        return self._get_metrics_result if self.overrides("get_metrics_result") else None

    def _get_metrics_result(
        self, losses: Mapping[str, tf.Tensor], compiled: keras.Metric
    ) -> dict[str, Any]:
        loss, *of_outputs = [
            types.SimpleNamespace(name=name, result=functools.partial(tf.identity, value))
            for name, value in losses.items()
        ]
        of_losses = types.SimpleNamespace(metrics=of_outputs)
        trackers = [
            (self.model, private.loss_tracker.name, loss),
            (self.model, private.compile_loss.name, of_losses),
            (self.model, private.compile_metrics.name, compiled),
        ]
        with replaced(trackers):
            return self.model.get_metrics_result()

    @property
    def family(self) -> type[keras.Model]:
        """The class of Keras's whose methods the model may override."""
        return kinds(self.model)[self.KIND]

    @property
    def compiled_with(self) -> dict[str, Any]:
        """The optimizer, losses and metrics that the model was compiled with, as arguments of
        `compile`.
        """
        of_losses, user_loss, of_metrics = self._COMPILED
        losses, metrics = (getattr(self.model, name, None) for name in (of_losses, of_metrics))
        optimizer = getattr(self.model, "optimizer", None)
        return {
            # `compile` puts it into a LossScaleOptimizer under mixed_float16.
            "optimizer": getattr(optimizer, "inner_optimizer", optimizer),
            "loss": getattr(losses, user_loss, None),
            "loss_weights": private.user_loss_weights(losses, None),
            "metrics": private.user_metrics(metrics, None),
            "weighted_metrics": private.user_weighted_metrics(metrics, None),
        }

    @property
    def compilation(self) -> tuple[object, object]:
        """The objects that `compile` replaces."""
        return self.model.optimizer, getattr(self.model, self._COMPILED[0], None)

    def compiled_since(self, compilation: tuple[object, object]) -> bool:
        """Tells if the model has been compiled since it had this `compilation`."""
        return any(now is not then for now, then in zip(self.compilation, compilation, strict=True))

    @property
    def returned_losses(self) -> int:
        """The number of means in the loss that the model returns by itself if it is given no
        other.
        """
        return 0

    def with_losses(
        self, x: Nest, y: Nest, training: bool, valid: tf.Tensor | None
    ) -> tuple[Nest, list[tuple[tf.Tensor, tf.Tensor]]]:
        """Calls the model; returns also the value and the weight sum of each returned loss over
        `valid` rows.
        """
        raise NotImplementedError

    @property
    def takes_targets_apart(self) -> bool:
        """True if targets need not have the structure of the outputs, since the model or its
        adapter matches them.
        """
        return self.overrides("compute_loss")

    def matched(self, x: Nest, y: Nest, y_pred: Nest) -> tuple[Nest, Nest]:
        """Returns targets and the outputs to compare them with, in one structure."""
        return y, y_pred

    def compute_loss(
        self, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest, training: bool
    ) -> tf.Tensor:
        return private.compute_loss(self.model, x, y, y_pred, sample_weight, training=training)

    def own_losses(
        self, compiled: Callable | None, rescaled: Callable[[tf.Tensor, bool], tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Gives `compute_loss` a `compiled` loss, and `rescaled(loss, is_regularizer)` for each of
        `self.losses`.
        """
        losses = [rescaled(loss, False) for loss in self._added_losses()]
        losses += [rescaled(v.regularizer(v), True) for v in self._regularised()]
        if compiled is not None:
            compiled.metrics = []  # type: ignore[attr-defined] # as Keras's has
        return replaced(
            [
                (self.model, private.compile_loss.name, compiled),
                (self.model, private.losses_override.name, losses),
            ]
        )

    def compute_metrics(
        self, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest, update: Callable
    ) -> dict[str, Any]:
        """Calls the model's own `compute_metrics`, with `update(y, y_pred, sample_weight)` for the
        compiled metrics.
        """
        with replaced([(private.compile_metrics(self.model), "update_state", update)]):
            return self.model.compute_metrics(x, y, y_pred, sample_weight)

    @property
    def own_metrics(self) -> list[keras.metrics.Metric]:
        """Metrics that the model and its layers hold and update themselves, as Keras would log
        them.
        """
        model = self.model
        of_compile = [
            private.loss_tracker(model),
            private.compile_metrics(model),
            *getattr(private.compile_loss(model), "metrics", ()),
        ]
        return [m for m in model.metrics if all(m is not each for each in of_compile)]

    @property
    def metric_variables(self) -> list[tf.Variable]:
        """The variables of all layers' metrics."""
        return [
            raw(v)
            for layer in self.layers
            for metric in private.metrics(layer)
            for v in metric.variables
        ]

    @property
    def variables(self) -> list[Variable]:
        """All variables, without the vocabularies of lookups that tf_keras lists too."""
        return [v for v in self.model.variables if isinstance(v, (keras.Variable, tf.Variable))]

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables that the optimizer trains, in the form that an optimizer of the same family
        takes.
        """
        if type(self.model).trainable_weights is not keras.Model.trainable_weights:
            # what Keras's own step trains, where a model overrides it
            return self.model.trainable_weights
        return self.model.trainable_variables

    @property
    def state(self) -> list[tf.Variable]:
        """Variables that a forward pass may assign, such as moving statistics and random seeds."""
        own = [v for layer in self.layers for v in self._own_state(layer)]
        # A SpectralNormalization assigns a weight of another layer, and layers of the user's own
        # what they like.
        known = {id(v) for v in (*own, *self.metric_variables)}
        return [*own, *(v for v in map(raw, self._assigned) if id(v) not in known)]

    @property
    def statistics(self) -> list[tf.Variable]:
        """The part of `state` that Keras's own layers hold, and a train step moves."""
        own = [layer for layer in self.layers if of_keras(type(layer)) and self._moves(layer)]
        return [v for layer in own for v in self._own_state(layer) if v.dtype.is_floating]

    @property
    def unmanaged_state(self) -> list[str]:
        """The names of the variables that a forward pass assigns and no layer has made with
        `add_weight`.
        """
        names = [v.name for v in self._assigned if not isinstance(v, keras.Variable)]
        return [name for name in names if "/replica_" not in name]  # the first one's says it

    @property
    def moving_layers(self) -> list[str]:
        """The names of the layers whose statistics a train step moves."""
        return [layer.name for layer in self.layers if self._moves(layer)]

    def _moves(self, layer: keras.layers.Layer) -> bool:
        return layer.trainable and any(v.dtype.is_floating for v in self._own_state(layer))

    def _own_state(self, layer: keras.layers.Layer) -> list[tf.Variable]:
        seeds = [generator.state for generator in private.seed_generators(layer)]
        return [v.value for v in (*private.own_state(layer), *seeds)]

    @property
    def seeds(self) -> list[tf.Variable]:
        """The states of random generators."""
        return [
            generator.state.value
            for layer in self.layers
            for generator in private.seed_generators(layer)
        ]

    def owner(self, variable: tf.Variable) -> str | None:
        """Names the innermost layer that has a trainable variable."""
        owners = [
            layer.name
            for layer in self.called_layers
            for v in layer.trainable_variables
            if variable is raw(v)
        ]
        return owners[-1] if owners else None

    @property
    def compute_dtype(self) -> str:
        """The lowest precision that any layer computes in, which decides on loss scaling."""
        dtypes = {layer.compute_dtype for layer in self.called_layers}
        return next((d for d in ("float16", "bfloat16") if d in dtypes), "float32")

    @property
    def output_names(self) -> list[str]:
        """The names that dict losses, targets and weights go by; empty for a model that names
        none.
        """
        # A Sequential model keeps them, and much else, in a functional one.
        return list(
            getattr(private.functional(self.model, None) or self.model, "output_names", None) or []
        )

    @property
    def may_do_more(self) -> bool:
        """True if a call may add losses, assign variables or mix rows, which only a trace shows."""
        return any(map(_may_do_more, self.layers))

    def _added_losses(self) -> list[tf.Tensor]:
        """The data-dependent losses of the last call: `add_loss` and activity regularisers."""
        return self.model.losses[: len(self.model.losses) - len(self._regularised())]

    def _note_calls(self, x: Nest) -> Nest:
        for layer in self.layers:
            added_losses.require_sum_over_rows(layer)
        # Keras forgets what a symbolic call adds and assigns; a traced one shows it. Some layers
        # add in one mode only.
        for training in (True, False):
            call = functools.partial(self.__call__, training=training)
            try:
                traced = traces.trace(call, x)
                if training and any(map(_may_count_rows, self.called_layers)):
                    self.row_counter = row_counts.find_row_counter(traced, call, x)
                self.mixes_rows |= bool(
                    self.row_counter or row_mixing.find_mixing_op(traced, call, x)
                )
            except (ValueError, TypeError, tf.errors.InvalidArgumentError):
                # a model of a fixed batch size
                traced, self.mixes_rows = traces.trace(call, x, rows=None), True
            if training:
                self._work = jit_choice.count(traced)
                self.unsaved_draws = [
                    o.name for o in traced.graph.get_operations() if o.type in traces.UNSEEDED
                ]
            written = [*self._assigned, *traces.list_assigned(traced.graph, self.variables)]
            self._assigned = list({id(v): v for v in written}.values())
            self.python_calls = sorted(
                {*self.python_calls, *traces.list_python_calls(traced.graph)}
            )
            added = map(added_losses.get_reduction, self._added_losses())
            self.added_reductions = sorted({*self.added_reductions, *added})
        return traced.structured_outputs

    def work(self, x: Nest) -> jit_choice.Work:
        """Counts what a call computes on a row of `x`; a model is not traced for it if none of its
        layers convolve.
        """
        if self._work is None and any(
            "Conv" in kind for layer in self.layers for kind in kinds(layer)
        ):
            call = functools.partial(self.__call__, training=True)
            # for a model of a fixed batch size; the step says errors better
            for rows in (traces.TELLING_ROWS, None):
                with contextlib.suppress(ValueError, TypeError, tf.errors.InvalidArgumentError):
                    self._work = self._work or jit_choice.count(
                        traces.trace_with_calls(call, x, rows)
                    )
        return self._work or jit_choice.Work()

    def added_loss(self, reduction: str) -> tf.Tensor:
        """Returns the sum of the last call's added losses of one kind of `added_reductions`:
        float32 scalar.
        """
        losses = [
            loss for loss in self._added_losses() if added_losses.get_reduction(loss) == reduction
        ]
        return tf.add_n(
            [tf.constant(0.0), *(tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses)]
        )

    def penalty(self) -> tf.Tensor | None:
        """Returns the sum of the weight regularisers, or None where there are none."""
        losses = [v.regularizer(v) for v in self._regularised()]
        return tf.add_n(losses) if losses else None

    def _regularised(self) -> list[Variable]:
        return [
            v for v in self.model.trainable_weights if getattr(v, "regularizer", None) is not None
        ]

    @property
    def lookups(self) -> list[tuple[keras.layers.Layer, int]]:
        """The layers that look up ids, with the rows of their tables."""
        return layers.find_lookups(self.layers)

    @property
    def couples_rows(self) -> bool:
        """True if rows share statistics or losses, which padded rows would change; known after a
        call.
        """
        moved = any(v.dtype.is_floating for v in map(raw, self._assigned))
        return moved or self.mixes_rows or bool(self.moving_layers) or self.couples_losses

    @property
    def split_sensitive_layers(self) -> list[str]:
        """Names the layers whose numbers depend on how rows are split: random masks, statistics,
        mixed rows.
        """
        names = [layer.name for layer in self.layers if self._draws(layer) or self._moves(layer)]
        return [*map(repr, names), *(["layers that mix rows"] if self.mixes_rows else [])]

    def _draws(self, layer: keras.layers.Layer) -> bool:
        return bool(private.seed_generators(layer)) and not never_draws(layer)

    @property
    def couples_losses(self) -> bool:
        """True if the model computes losses or metrics itself, from all rows of a batch."""
        return (
            bool(self.added_reductions)
            or self.overrides("compute_loss")
            or self.overrides("compute_metrics")
        )

    @property
    def recomputed_layers(self) -> list[keras.layers.Layer]:
        """The layers that a `keras.RematScope` recomputes whole."""
        scopes = [
            (layer, scope) for layer in self.layers if (scope := private.remat_mode(layer, None))
        ]
        scopes = [
            (layer, s)
            for layer, s in scopes
            if s.mode != "list_of_layers" or layer.name in s.layer_names
        ]
        return [layer for layer, scope in scopes if scope.mode != "activations"]

    def uncompilable_layers(self) -> list[keras.layers.Layer]:
        """Lists the layers that declare that XLA cannot compile them."""
        return [layer for layer in self.layers if not getattr(layer, "supports_jit", True)]

    def adopt(
        self, optimizer: keras.optimizers.Optimizer, metrics: Metrics, loss: Any, loss_weights: Any
    ) -> None:
        """Leaves the model as `compile` would, for callbacks, `save` and Keras's own `evaluate`."""
        if not isinstance(optimizer, keras.Optimizer):
            self.model.optimizer = optimizer
            return
        # Keras's own: a `compile` that the model overrides takes other arguments, and was called by
        # the user.
        weights = tf.nest.map_structure(
            lambda w: float(w) if isinstance(w, numbers.Real) else w, loss_weights
        )
        own = metrics.for_compile(self._FOREIGN_METRIC)
        eager = self.model.run_eagerly  # as compiled, for `predict`
        keras.Model.compile(
            self.model,
            optimizer,
            loss,
            loss_weights=weights,
            auto_scale_loss=False,
            run_eagerly=eager,
            **own,
        )
        # Untracked, as in `compile`: a metric that the model also tracked as its own would be
        # listed twice.
        with private.DotNotTrackScope():
            private.compile_metrics.set(self.model, metrics.compiled)

    def adopt_means(
        self, loss: keras.metrics.Mean, losses: Mapping[str, keras.metrics.Mean]
    ) -> None:
        """Makes running means those of a compiled model, of its `metrics` and
        `get_metrics_result`.
        """
        model = self.model
        if not isinstance(model.optimizer, keras.Optimizer):
            return
        with private.DotNotTrackScope():
            private.loss_tracker.set(model, loss)
        compiled = private.compile_loss(model)
        if compiled is None or not losses:
            return

        def build(y_true: Nest, y_pred: Nest) -> None:
            type(compiled).build(compiled, y_true, y_pred)
            made_by_build = compiled.metrics[len(losses) :]  # which appends means of its own
            compiled.metrics[:] = [losses.get(mean.name, mean) for mean in made_by_build]

        compiled.build = build
        compiled.metrics[:] = losses.values()


def _as_keras_tensors(specs: Nest) -> Nest:
    return tf.nest.map_structure(
        lambda s: None if s is None else keras.KerasTensor(s.shape, s.dtype.name), specs
    )


@contextlib.contextmanager
def _naming(x: Nest) -> Iterator[None]:
    """Puts the shapes of a model's inputs in front of an error that calling the model raised."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        shapes = tf.nest.map_structure(lambda each: tuple(each.shape), x)
        kind = TypeError if isinstance(error, TypeError) else ValueError
        reason = without_arguments(error)
        raise kind(f"The model, called with x of shape {shapes}: {reason}") from error


def never_draws(layer: keras.layers.Layer) -> bool:
    """Tells if a layer of Keras's, such as a recurrent cell, could draw random numbers and has a
    rate of 0.
    """
    names = "rate", "stddev", "dropout", "recurrent_dropout"
    rates = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return of_keras(type(layer)) and bool(rates) and not any(rates)


def _may_count_rows(layer: keras.layers.Layer) -> bool:
    """Tells if a call may compute with the number of rows: Keras's and KerasHub's layers do not."""
    own = package(type(layer)) not in ("keras", "tf_keras", "keras_hub", "fastaccum")
    return own or isinstance(layer, keras.layers.Lambda) or _has_own_activation(layer)


def _has_own_activation(layer: keras.layers.Layer) -> bool:
    functions = (getattr(layer, name, None) for name in ("activation", "recurrent_activation"))
    return any(
        each is not None and package(each) not in ("keras", "tf_keras", "tensorflow")
        for each in functions
    )


def _may_do_more(layer: keras.layers.Layer) -> bool:
    """Tells if a layer's call may add losses, assign other layers' variables or mix rows, as few of
    Keras's do.
    """
    own = package(type(layer)) in ("keras", "fastaccum") and not isinstance(layer, _TRACED)
    across_rows = 0 in tf.nest.flatten(getattr(layer, "axis", -1))
    of_ops = any(
        not isinstance(each, keras.layers.Layer) for each in getattr(layer, "operations", ())
    )
    written = of_ops or layer.activity_regularizer is not None or _has_own_activation(layer)
    return not own or written or getattr(layer, "stateful", False) or across_rows
