"""A Keras 3 model: its calls, the methods that it overrides, and what `compile` left in it."""

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

from fastaccum.adapters import added_losses
from fastaccum.adapters.data_adapters import wrap_sequence
from fastaccum.adapters.layer_kinds import convolves, may_count_rows, may_do_more, never_draws
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.model_state import ModelState
from fastaccum.adapters.outputs import Outputs
from fastaccum.basics.attributes import Nest, Variable, kinds, package, raw, replaced
from fastaccum.basics.packed_rows import PackedRows, model_inputs
from fastaccum.basics.warnings import without_arguments
from fastaccum.graphs import jit_choice, traces
from fastaccum.kernels import private
from fastaccum.layers import documents, lookups
from fastaccum.layers.chains import ChainSearch
from fastaccum.layers.float8 import ProductSearch
from fastaccum.layers.interceptors import intercepting
from fastaccum.layers.scan import ProbedLayers, probe_layers


class WithinFit:
    """A model's method while a fit trains it: each call runs inside a block that `enter` makes."""

    def __init__(
        self, method: Callable, enter: Callable[[], contextlib.AbstractContextManager[None]]
    ):
        self.method = method
        self.enter = enter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.enter():
            return self.method(*args, **kwargs)


class Model(ModelState):
    """A Keras 3 model."""

    # The kind of callbacks that the model's own loop takes, if it takes no other.
    callback_kind: str | None = None
    trains_on_replicas = True
    _PACKAGE = "keras"
    KIND = "keras.Model"
    _FOREIGN_METRIC = "tf_keras.Metric"
    OUTPUTS = Outputs
    # Where a compiled model keeps its losses, what the user passed for them there, and its metrics.
    _COMPILED = private.compile_loss.name, private.user_loss.name, private.compile_metrics.name

    def symbolic_call(self, x: Nest, training: bool) -> Nest:
        """Builds the model, and returns output specs for input specs `x`, a nest of TensorSpecs."""
        inputs = model_inputs(x)
        with _naming(inputs):
            try:
                # A functional model asks layers for their specs, and casts nothing that it is
                # given, nor adds an axis, as a call does.
                if self._adds_axes(inputs):
                    outputs = self._traced_specs(inputs, training)
                else:
                    outputs = self.model(_as_keras_tensors(inputs), training=training)
            except (TypeError, ValueError):
                if not self.model.built:
                    raise
                outputs = self._traced_specs(inputs, training)
        if self.may_do_more:
            self._note_calls(x)
        return outputs

    def _adds_axes(self, x: Nest) -> bool:
        """Tells if a call adds axes to inputs of fewer than those that the model was built for."""
        expected = tf.nest.flatten(getattr(self.model, "inputs", None) or [])
        ranks = [spec.shape.rank for spec in tf.nest.flatten(x)]
        return len(ranks) == len(expected) and ranks != [len(spec.shape) for spec in expected]

    def _traced_specs(self, x: Nest, training: bool) -> Nest:
        traced = tf.function(self.model, autograph=False).get_concrete_function(
            x, training=training
        )
        return _as_keras_tensors(traced.structured_outputs)

    def require_inputs(self, x: Nest) -> None:
        """Raises ValueError for a list of more or fewer inputs than the model has.

        Keras drops what is too many.
        """
        x = model_inputs(x)
        expected = len(tf.nest.flatten(getattr(self.model, "inputs", None) or []))
        if expected == 0 or not isinstance(x, (list, tuple)):
            return
        passed = len(tf.nest.flatten(x))
        if passed != expected:
            raise ValueError(
                f"x has {passed} arrays, but the model has {expected} inputs: pass one for each."
            )

    @property
    def keras_module(self) -> types.ModuleType:
        """The Keras that the model is of."""
        return sys.modules[self._PACKAGE]

    @property
    def compute_loss_adds_penalty(self) -> bool:
        """True if the model's `compute_loss` adds weight regularisers that the step does not see.

        They are then in the loss of each micro-batch.
        """
        return False

    def predict(self, x: Nest, **options: Any) -> Any:
        return self.model.predict(wrap_sequence(x), **options)

    @property
    def may_take_text(self) -> bool:
        """True if strings may be among the inputs, as far as is known."""
        inputs = tf.nest.flatten(getattr(self.model, "inputs", None) or [])
        return not inputs or any(tf.as_dtype(spec.dtype) == tf.string for spec in inputs)

    @property
    def preprocess(self) -> Callable[..., Nest] | None:
        """The function by which a KerasHub task preprocesses raw data; None for any other model.

        It takes x, y and sample_weight.
        """
        if getattr(self.model, "preprocessor", None) is None:
            return None
        return getattr(self.model, "preprocess_samples", None)

    def __call__(self, x: Nest, training: bool) -> Nest:
        if isinstance(x, PackedRows):
            with documents.kept_apart(x):
                return self(x.inputs, training)
        with replaced(added_losses.mark_regularizers(self.layers)), _naming(x):
            outputs = self.model(x, training=training)
        rows = tf.nest.flatten(x)[0].shape[0]
        if rows is None:
            return outputs
        for output in tf.nest.flatten(outputs):
            # Lookups of text forget how many rows they were given.
            if tf.is_tensor(output) and output.shape.rank and output.shape[0] is None:
                tf.debugging.assert_equal(tf.shape(output)[0], rows)
                output.set_shape([rows, *output.shape[1:]])
        return outputs

    def overrides(self, method: str) -> bool:
        """Tells if the model overrides a method of Keras's Model."""
        class_overrides = getattr(type(self.model), method) is not getattr(self.family, method)
        return self._has_own(method) or class_overrides

    def replaces_loop(self, method: str) -> bool:
        """Tells if the model overrides `fit` or `evaluate` by more than preprocessing its data.

        A KerasHub task overrides them to preprocess, as `preprocess` does here.
        """
        if not self.overrides(method):
            return False
        owner = next((c for c in type(self.model).__mro__ if method in vars(c)), None)
        only_preprocesses = package(owner) == "keras_hub" and "preprocess_samples" in vars(owner)
        return self._has_own(method) or not only_preprocesses

    def _has_own(self, method: str) -> bool:
        """Tells if the model object itself, and not its class, has a method of the user's."""
        return method in vars(self.model) and not isinstance(vars(self.model)[method], WithinFit)

    @property
    def passed_over_methods(self) -> list[str]:
        """The private methods of Keras's loops that the model overrides: these are never called."""
        private_names = set()
        for base in self.family.__mro__[1:]:  # what Keras's Model inherits
            if base in keras.layers.Layer.__mro__:
                continue
            for name in vars(base):
                if name.startswith("_") and not name.startswith("__"):
                    private_names.add(name)
        return sorted(name for name in private_names if self.overrides(name))

    @property
    def own_reset(self) -> Callable[[], None] | None:
        """The `reset_metrics` that the model overrides; None for Keras's."""
        return self.model.reset_metrics if self.overrides("reset_metrics") else None

    @property
    def own_results(
        self,
    ) -> Callable[[Mapping[str, tf.Tensor], keras.Metric], dict[str, Any]] | None:
        """The `get_metrics_result` that the model overrides; None for Keras's.

        It is a function of the losses and the compiled metrics.
        """
        return self._get_metrics_result if self.overrides("get_metrics_result") else None

    def _get_metrics_result(
        self, losses: Mapping[str, tf.Tensor], compiled: keras.Metric
    ) -> dict[str, Any]:
        # What Keras's trackers of means are to the model's method: a name, and a result.
        means = [
            types.SimpleNamespace(name=name, result=functools.partial(tf.identity, value))
            for name, value in losses.items()
        ]
        total, *of_outputs = means  # the logs open with the loss of all outputs together
        trackers = [
            (self.model, private.loss_tracker.name, total),
            (self.model, private.compile_loss.name, types.SimpleNamespace(metrics=of_outputs)),
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
        """The optimizer, losses and metrics of the model's last `compile`, as its arguments."""
        losses_name, user_loss_name, metrics_name = self._COMPILED
        losses = getattr(self.model, losses_name, None)
        metrics = getattr(self.model, metrics_name, None)
        optimizer = getattr(self.model, "optimizer", None)
        return {
            # `compile` puts it into a LossScaleOptimizer under mixed_float16.
            "optimizer": getattr(optimizer, "inner_optimizer", optimizer),
            "loss": getattr(losses, user_loss_name, None),
            "loss_weights": private.user_loss_weights(losses, None),
            "metrics": private.user_metrics(metrics, None),
            "weighted_metrics": private.user_weighted_metrics(metrics, None),
        }

    @property
    def compilation(self) -> tuple[object, object]:
        """The objects that `compile` replaces."""
        losses_name, _, _ = self._COMPILED
        return self.model.optimizer, getattr(self.model, losses_name, None)

    def compiled_since(self, compilation: tuple[object, object]) -> bool:
        """Tells if the model has been compiled since it had this `compilation`."""
        return any(now is not then for now, then in zip(self.compilation, compilation, strict=True))

    @property
    def returned_losses(self) -> int:
        """The number of means in the loss that the model itself returns if it is given no other."""
        return 0

    def with_losses(
        self, x: Nest, y: Nest, training: bool, valid: tf.Tensor | None
    ) -> tuple[Nest, list[tuple[tf.Tensor, tf.Tensor]]]:
        """Calls the model, and returns its outputs and the losses that it computed itself.

        Each loss is its value and the sum of its weights over `valid` rows.
        """
        raise NotImplementedError

    @property
    def takes_targets_apart(self) -> bool:
        """True if targets need not have the structure of the outputs.

        The model or its adapter then matches them.
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
        """Gives the model's `compute_loss` other losses inside the block.

        These are a `compiled` loss, and `rescaled(loss, is_regularizer)` for each of `self.losses`.
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
        """Calls the model's own `compute_metrics`, with `update` in place of the compiled metrics.

        `update` takes y, y_pred and sample_weight.
        """
        with replaced([(private.compile_metrics(self.model), "update_state", update)]):
            return self.model.compute_metrics(x, y, y_pred, sample_weight)

    @property
    def own_metrics(self) -> list[keras.metrics.Metric]:
        """Metrics that the model and its layers update themselves, in the order of Keras's logs."""
        model = self.model
        of_compile = [
            private.loss_tracker(model),
            private.compile_metrics(model),
            *getattr(private.compile_loss(model), "metrics", ()),
        ]
        return [
            metric
            for metric in model.metrics
            if not any(metric is compiled for compiled in of_compile)
        ]

    @property
    def output_names(self) -> list[str]:
        """The names that dict losses, targets and weights go by; empty if the model has none."""
        # A Sequential model keeps them, and much else, in a functional one.
        named_model = private.functional(self.model, None) or self.model
        return list(getattr(named_model, "output_names", None) or [])

    @property
    def may_do_more(self) -> bool:
        """True if a call may add losses, assign variables or mix rows, which only a trace shows."""
        return any(map(may_do_more, self.layers))

    def _added_losses(self) -> list[tf.Tensor]:
        """The data-dependent losses of the last call: `add_loss` and activity regularisers."""
        return self.model.losses[: len(self.model.losses) - len(self._regularised())]

    def _note_calls(self, x: Nest) -> Nest:
        """Traces calls, notes what they do, and returns the outputs of the last one."""
        for layer in self.layers:
            added_losses.require_sum_over_rows(layer)
        probed = ProbedLayers([], [])
        # `work` counts convolutions, so with any the whole model is traced.
        if not any(map(convolves, self.layers)):
            probed = probe_layers(self.model)
        outputs = self._trace_calls(x, probed)
        knows_assigned = all(isinstance(v, keras.Variable) for v in self.effects.assigned)
        if probed.repeats and not knows_assigned:
            # Layers that repeat may each hold variables that Keras does not know.
            outputs = self._trace_calls(x, ProbedLayers([], []))
        return outputs

    def _trace_calls(self, x: Nest, probed: ProbedLayers) -> Nest:
        # Keras forgets what a symbolic call adds and assigns; a traced one shows it. Some layers
        # add in one mode only.
        search = ChainSearch(self.model)
        for training in (True, False):
            call = functools.partial(self.__call__, training=training)
            with intercepting([*probed.interceptors, *search.interceptors]):
                traced = self.effects.trace(call, x, training, self._may_count_rows)
            self.effects.note(traced, self.variables, self._added_losses())
            search.note(traced.graph)
        self.chains = search.chains
        self.apart = search.apart
        self.effects.assigned = probed.expand_variables(self.effects.assigned)
        return traced.structured_outputs

    def note_products(self, x: Nest) -> None:
        """Traces a call, and notes the layers whose products stay in half precision."""
        search = ProductSearch(self.called_layers)
        call = functools.partial(self.__call__, training=True)
        with intercepting(search.interceptors):
            traced = traces.trace(call, x, rows=None)
        self.exempt_from_float8 = search.find_exempt(traced.structured_outputs)

    def _may_count_rows(self) -> bool:
        return any(map(may_count_rows, self.called_layers))

    def work(self, x: Nest) -> jit_choice.Work:
        """Counts what a call computes on a row of `x`.

        A model is not traced for it if none of its layers convolve.
        """
        if self.effects.work is None and any(map(convolves, self.layers)):
            call = functools.partial(self.__call__, training=True)
            # A model of a fixed batch size is traced with the rows of `x`. The step says errors
            # better.
            for rows in (traces.TELLING_ROWS, None):
                with contextlib.suppress(ValueError, TypeError, tf.errors.InvalidArgumentError):
                    self.effects.work = jit_choice.count(traces.trace_with_calls(call, x, rows))
                    break
        if self.effects.work is None:
            return jit_choice.Work()
        return self.effects.work

    def added_loss(self, reduction: str) -> tf.Tensor:
        """Returns the sum of the last call's added losses of one reduction, a float32 scalar.

        `reduction` is one of `added_reductions`.
        """
        losses = [
            loss for loss in self._added_losses() if added_losses.get_reduction(loss) == reduction
        ]
        terms = [tf.constant(0.0)]
        for loss in losses:
            terms.append(tf.reduce_sum(tf.cast(loss, tf.float32)))
        return tf.add_n(terms)

    def penalty(self) -> tf.Tensor | None:
        """Returns the sum of the weight regularisers, or None where there are none."""
        losses = [v.regularizer(v) for v in self._regularised()]
        if not losses:
            return None
        return tf.add_n(losses)

    def _regularised(self) -> list[Variable]:
        return [
            v for v in self.model.trainable_weights if getattr(v, "regularizer", None) is not None
        ]

    @property
    def lookups(self) -> list[tuple[keras.layers.Layer, int]]:
        """The layers that look up ids, with the rows of their tables."""
        return lookups.find_lookups(self.layers)

    @property
    def couples_rows(self) -> bool:
        """True if rows share statistics or losses, which padded rows would change.

        It is known after a call.
        """
        assigns_floats = any(raw(variable).dtype.is_floating for variable in self.effects.assigned)
        return (
            assigns_floats
            or self.effects.mixes_rows
            or bool(self.moving_layers)
            or self.couples_losses
        )

    @property
    def split_sensitive_layers(self) -> list[str]:
        """The layers whose numbers depend on how rows are split, as texts of a message.

        They draw random masks, move statistics or mix rows.
        """
        names = [
            repr(layer.name) for layer in self.layers if self._draws(layer) or self._moves(layer)
        ]
        if self.effects.mixes_rows:
            names.append("layers that mix rows")
        return names

    def _draws(self, layer: keras.layers.Layer) -> bool:
        return bool(private.seed_generators(layer)) and not never_draws(layer)

    @property
    def couples_losses(self) -> bool:
        """True if the model computes losses or metrics itself, from all rows of a batch."""
        return (
            bool(self.effects.added_reductions)
            or self.overrides("compute_loss")
            or self.overrides("compute_metrics")
        )

    @property
    def recomputed_layers(self) -> list[keras.layers.Layer]:
        """The layers that a `keras.RematScope` recomputes whole."""
        recomputed = []
        for layer in self.layers:
            scope = private.remat_mode(layer, None)
            if not scope or scope.mode == "activations":
                continue
            if scope.mode != "list_of_layers" or layer.name in scope.layer_names:
                recomputed.append(layer)
        return recomputed

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
        keras.Model.compile(
            self.model,
            optimizer,
            loss,
            loss_weights=tf.nest.map_structure(_as_float, loss_weights),
            auto_scale_loss=False,
            run_eagerly=self.model.run_eagerly,  # as it was compiled, for `predict`
            **metrics.for_compile(self._FOREIGN_METRIC),
        )
        # Untracked, as in `compile`: a metric that the model also tracked as its own would be
        # listed twice.
        with private.DotNotTrackScope():
            private.compile_metrics.set(self.model, metrics.compiled)

    def adopt_means(
        self, loss: keras.metrics.Mean, losses: Mapping[str, keras.metrics.Mean]
    ) -> None:
        """Makes running means those of a compiled model: of `metrics` and `get_metrics_result`."""
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
    def convert(spec: Any) -> keras.KerasTensor | None:
        if spec is None:
            return None
        return keras.KerasTensor(spec.shape, spec.dtype.name)

    return tf.nest.map_structure(convert, specs)


def _as_float(weight: Any) -> Any:
    """Converts a number of any type to a Python float; leaves anything else as it is."""
    if isinstance(weight, numbers.Real):
        return float(weight)
    return weight


@contextlib.contextmanager
def _naming(x: Nest) -> Iterator[None]:
    """Puts the shapes of a model's inputs in front of an error that calling the model raised."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        shapes = tf.nest.map_structure(lambda spec: tuple(spec.shape), x)
        kind = TypeError if isinstance(error, TypeError) else ValueError
        reason = without_arguments(error)
        raise kind(f"The model, called with x of shape {shapes}: {reason}") from error
