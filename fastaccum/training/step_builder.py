"""Builds a Trainer's step from the specs of its first micro-batch, and checks that the model stays
the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters import jit_choice, own_loss, remat, slots
from fastaccum.adapters.attributes import Nest, raw, replaced, restored
from fastaccum.adapters.interceptors import Interceptor
from fastaccum.adapters.keras_models import WithinFit
from fastaccum.data.stacks import Batch, Layout
from fastaccum.distribute import replicas
from fastaccum.distribute.replicated_step import ReplicatedStep
from fastaccum.distribute.sharded_step import ShardedStep
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.kernels.devices import has_gpu
from fastaccum.lines import warn
from fastaccum.memory.analysis import needs_shares
from fastaccum.memory.guard import Guard
from fastaccum.step import compilable, padding
from fastaccum.step.model_step import ModelStep
from fastaccum.step.options import Options
from fastaccum.step.probe import probe
from fastaccum.step.running_state import RunningState
from fastaccum.step.step import Step
from fastaccum.step.tracing import without_collection
from fastaccum.training.recipe import Recipe, RunFingerprint
from fastaccum.training.throughput import Throughput

_FITTING = "fastaccum_fitting"  # an attribute of a model while a `fit` trains it


class StepBuilder:
    """Builds the step of a model once, and chooses the layout of its stacks."""

    def __init__(self, recipe: Recipe):
        self.recipe, self._model = recipe, recipe.model
        self.fingerprint = RunFingerprint(recipe)
        self._compilation: tuple[Any, Any] = None, None
        self.step: Step | None = None  # before the first `get_or_build`
        self.throughput: Throughput | None = None  # of the last epoch of a fit
        self.sample: Batch | None = None  # specs of the micro-batch that the step was built for
        # What the model's own loss computes otherwise if an update is split otherwise, by name.
        self.split_sensitive: list[str] = []
        self.calling_python: list[str] = []  # what calls Python, which XLA cannot compile, by name
        self._moving: list[str] = []
        self._slots: list[int] = []  # the identities of the variables that hold them
        self._recomputed: list[Interceptor] = []

    @graph_scoped_gradients()
    @without_collection()
    def get_or_build(self, sample: Batch, options: Options) -> Step:
        """Returns the step, built once from specs of a micro-batch; raises ValueError if the model
        has changed.
        """
        self._model.require_inputs(sample.x)
        if self.step is None:
            step = self._build(sample, options)
            step.guard = Guard(step)
            self.fingerprint.require_one_program(step.objective.options, sample)
            if not self._is_fitting:
                self._compile(step.running)
            self._moving = self._model.moving_layers
            with replicas.on_first_replica(self.recipe.replicas):
                self.split_sensitive = probe(step.objective, sample)
            self._recomputed = remat.installed(self._model.model)
            self._slots = self._places_of_slots()
            # last: a step that is refused may be built again with other options
            self.step, self.sample = step, sample
        if self._recomputed != (now := remat.installed(self._model.model)):
            self._recomputed = now
            self.step.retrace()
        self.require_same_weights()
        if self._slots != self._places_of_slots():
            raise ValueError(
                "The optimizer's slots have moved since this Trainer was built: another Trainer "
                "shares them out in another way (shard_optimizer). Make a new Trainer, with this "
                "optimizer, to train on."
            )
        if not self._model.takes_targets_apart:
            # Targets for other outputs, on a program that exists, would be an obscure error of
            # tf.function's.
            self.recipe.losses.require_targets(self._outputs, sample.y)
        return self.step

    def _build(self, sample: Batch, options: Options) -> Step:
        recipe, model, losses, metrics = (
            self.recipe,
            self._model,
            self.recipe.losses,
            self.recipe.metrics,
        )
        recipe.require_replicas(options)
        self.fingerprint.require_one_program(options, sample)
        # A model that is not built yet makes its variables on every replica.
        with (
            contextlib.nullcontext()
            if recipe.replicas is None
            else recipe.replicas.strategy.scope()
        ):
            y_pred = model.symbolic_call(sample.x, training=True)
        y_true = tf.nest.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), sample.y)
        may_fall_back = options.jit_compile == "auto"
        if may_fall_back:
            options = dataclasses.replace(options, jit_compile=self._is_faster_compiled(sample.x))
        if options.jit_compile:
            compilable.require(model)
        compilable.require_recomputable(model)
        if recipe.needs_targets or metrics.given:
            y_true, y_pred = model.matched(sample.x, y_true, y_pred)
        self._outputs = model.OUTPUTS(
            model.output_names, y_pred, recipe.given["loss"], model.overrides("compute_loss")
        )
        losses.build(self._outputs, y_true, model.takes_targets_apart)
        names = losses.log_names
        metrics.build(
            self._outputs, y_true, names, model.own_metrics, model.own_reset, model.own_results
        )
        self.calling_python = compilable.list_python_callers(model, losses, metrics)
        if options.jit_compile:
            batch = sample.x, sample.y, y_pred, sample.sample_weight
            if own_loss.calls_python(model, *batch):
                self.calling_python.append(f"{type(model.model).__name__}.compute_loss")
        if options.jit_compile and self.calling_python:
            options = self._without_xla(options, self.calling_python, may_fall_back)
        if not losses.outputs:
            own_loss.require_any(model, called=True)
        if not model.trainable_variables:
            raise ValueError(
                f"model {model.model.name!r} has no trainable variables: there is nothing to train."
            )
        parts = model, self._outputs, losses, metrics, recipe.optimizer, options
        if recipe.replicas is None:
            return ModelStep(
                *parts, compile_parts=options.uses_xla and (has_gpu() or not may_fall_back)
            )
        if self._shards(options):
            try:
                return ShardedStep(recipe.replicas, *parts)
            except ValueError:
                if options.shard_optimizer is True:
                    raise
        return ReplicatedStep(recipe.replicas, *parts)

    def _without_xla(self, options: Options, callers: list[str], may_fall_back: bool) -> Options:
        """Returns options without XLA for what calls Python, with a warning; ValueError if XLA was
        asked for.
        """
        what = (
            f"XLA cannot compile {', '.join(callers)}, which call Python (tf.py_function, "
            "tf.numpy_function)"
        )
        remedy = "write them with keras.ops or TensorFlow"
        if self._model.python_calls:  # in layers
            remedy += ", or move what only prepares inputs into the input pipeline (dataset.map)"
        if not may_fall_back:
            raise ValueError(f"{what}: {remedy}, or pass jit_compile='auto' or False.")
        warn(f"{what}: this model trains without XLA. To use it, {remedy}.", UserWarning)
        return dataclasses.replace(options, jit_compile=False)

    def _places_of_slots(self) -> list[int]:
        variables = (
            [] if self.recipe.replicas is None else self.recipe.optimizer.optimizer.variables
        )
        return [id(raw(v)) for v in variables if len(v.shape)]

    def _shards(self, options: Options) -> bool:
        """Decides if replicas share the optimizer's slots out."""
        own, optimizer, model = self.recipe.replicas, self.recipe.optimizer, self._model
        if own is None or own.count == 1 or options.shard_optimizer != "auto":
            return own is not None and own.count > 1 and options.shard_optimizer is True
        trained = model.trainable_variables
        tight = functools.partial(needs_shares, model.variables, trained, own.devices)
        needed = (
            len(trained) >= own.count
            and not slots.indivisible(optimizer)
            and tight(slots.MOST_PER_WEIGHT)
        )
        try:
            with replicas.outside_scope():
                needed = needed and tight(slots.slots_per_weight(optimizer))
        except Exception:  # of a class of the user's own, which cannot be made again
            needed = False
        # the worker with the least room decides
        return any(said for (said,) in own.gather([needed]))

    def _is_faster_compiled(self, x: Nest) -> bool:
        """Decides what `jit_compile="auto"` is for the model."""
        model, own = self._model, self.recipe.replicas
        if (faster := not model.uncompilable_layers()) and not has_gpu():
            with replicas.on_first_replica(own):
                work = model.work(x)
            parameters = sum(math.prod(v.shape) for v in model.trainable_variables)
            faster = jit_choice.is_faster_compiled(
                work, parameters, rows=tf.nest.flatten(x)[0].shape[0]
            )
        return faster if own is None else bool(own.gather([faster])[0][0])  # as the chief has it

    def _compile(self, running: RunningState) -> None:
        self._model.adopt(self.recipe.optimizer.optimizer, self.recipe.metrics, **self.recipe.given)
        self._model.adopt_means(running.loss, running.losses)
        self._compilation = self._model.compilation

    @property
    def _is_fitting(self) -> bool:
        return hasattr(self._model.model, _FITTING)

    def fitting(self, step: Step) -> contextlib.AbstractContextManager[None]:
        """Compiles the model with what trains it; no other Trainer's `evaluate` compiles it inside
        the block.

        Inside the block, an evaluation by the model's own methods leaves the logs of the epoch as
        they are.
        """
        if self._model.compiled_since(self._compilation):
            self._compile(step.running)
        model = self._model.model
        attributes: list[tuple[object, str, object]] = [(model, _FITTING, True)]
        for name in ("evaluate", "test_on_batch"):
            attributes.append((model, name, WithinFit(getattr(model, name), self.keeping_logs)))
        return replaced(attributes)

    def keeping_logs(self) -> contextlib.AbstractContextManager[None]:
        """Restores the running means and metrics at the end of the block, if it is within a fit."""
        if self._is_fitting and self.step is not None:
            return restored(self.step.running.log_variables)
        return contextlib.nullcontext()

    def require_same(self) -> None:
        """Raises ValueError if a callback has compiled the model, or switched what of it is
        trained.
        """
        self.require_same_weights()
        if self._model.compiled_since(self._compilation):
            raise ValueError(
                "The model was compiled anew within this fit, by a callback or by another "
                "Trainer. As in Keras, that cannot change a training under way: end the fit, and "
                "make a new Trainer."
            )

    def require_same_weights(self) -> None:
        """Raises ValueError if the `trainable` attributes are no longer those that the step was
        built for.
        """
        trained_now = () if self.step is None else self.step.cycle.trained
        trained, trainable = (
            {id(v): v for v in vs} for vs in (trained_now, self._model.trainable_variables)
        )
        if list(trained) != list(trainable):
            switched = ((trained | trainable)[i] for i in trained.keys() ^ trainable.keys())
            changed = [getattr(v, "path", v.name) for v in switched]
            raise ValueError(
                "The model's trainable variables have changed since this Trainer was built: "
                f"{sorted(changed)}. If the `trainable` of a layer was switched, switch it back; "
                "to train it as it is now, make a new Trainer, and a new optimizer if a layer "
                "was unfrozen."
            )
        if moved := sorted({*self._moving} ^ {*self._model.moving_layers}):
            raise ValueError(
                f"`trainable` of {moved} was switched since this Trainer was built: switch back, "
                "or make a new Trainer."
            )

    def training_layout(self, options: Options) -> Layout:
        """Returns the layout of train steps' stacks; a model must have been called to know if its
        rows are coupled.
        """
        own = not self.recipe.needs_targets or self.recipe.losses.need_exact_rows
        exact = self._model.couples_rows or own or self.recipe.metrics.need_exact_rows
        return self._layout(
            options, options.gradient_accumulation_steps, options.steps_per_execution, exact
        )

    def evaluation_layout(self, options: Options, micro_batches: int) -> Layout:
        """Returns the layout of an evaluation's stacks, which hold `micro_batches`
        micro-batches.
        """
        recipe, losses = self.recipe, self.recipe.losses
        mixed = self._model.mixes_rows or self._model.couples_losses or losses.need_exact_rows
        counted = any(o.power for o in losses.outputs)
        exact = mixed or counted or not recipe.needs_targets or recipe.metrics.need_exact_rows
        return self._layout(options, micro_batches, 1, exact)

    def _layout(self, options: Options, micro_batches: int, steps: int, exact_rows: bool) -> Layout:
        own = self.recipe.replicas
        assert self.step is not None
        layout = Layout(micro_batches, steps, exact_rows, max_programs=options.most_sizes)
        if self.step.shapes_are_free:
            compiles_steps = self.step.objective.options.uses_xla
            layout = layout._replace(one_trace="at first" if compiles_steps else "always")
        else:
            enter = functools.partial(replicas.on_first_replica, own)
            layout = layout._replace(padding=padding.Padding(self.step.objective, enter))
        return (
            layout
            if own is None
            else layout._replace(may_be_apart=False, replicas=own.count, shards=own.shards)
        )
