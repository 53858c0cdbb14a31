"""Builds a step from the specs of a first micro-batch, and checks that its model stays the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters import own_loss, slots
from fastaccum.adapters.models import WithinFit
from fastaccum.adapters.storage import dtype_of
from fastaccum.basics.attributes import Nest, Variable, raw, replaced, restored
from fastaccum.basics.warnings import warn
from fastaccum.data.stacks import DEFAULT_MAX_PROGRAMS, Batch, Layout
from fastaccum.distribute import replicas
from fastaccum.distribute.replicated_engine import ReplicatedEngine
from fastaccum.distribute.sharded_engine import ShardedEngine
from fastaccum.graphs import jit_choice
from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.kernels.devices import has_gpu
from fastaccum.layers import remat
from fastaccum.layers.float8 import choose_mode
from fastaccum.layers.interceptors import Interceptor
from fastaccum.memory.admission import Admission
from fastaccum.memory.analysis import needs_shares
from fastaccum.step import compilable, padding
from fastaccum.step.built_model import BuiltModel
from fastaccum.step.device_engine import DeviceEngine
from fastaccum.step.engine import Engine
from fastaccum.step.options import Options
from fastaccum.step.probe import probe
from fastaccum.step.running_state import RunningState
from fastaccum.step.tracing import without_collection
from fastaccum.training.throughput import Throughput
from fastaccum.training.training_setup import TrainingSetup

# The name of an attribute that a model has while a `fit` trains it.
_FITTING = "fastaccum_fitting"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A model's state, of what its user may change between two calls of a Trainer."""

    trained: Sequence[Variable]
    moving_layers: Sequence[str]  # whose statistics a train step moves, by name
    slots: Sequence[int]  # identities of the variables that hold the optimizer's slots
    recomputed: Sequence[Interceptor]  # what `fa.remat` has put into the model

    def require_same(self, now: Snapshot) -> None:
        """Raises ValueError if a step that was built for this state is none for the state now."""
        trained = {id(variable): variable for variable in self.trained}
        trainable = {id(variable): variable for variable in now.trained}
        if list(trained) != list(trainable):
            removed = [variable for key, variable in trained.items() if key not in trainable]
            added = [variable for key, variable in trainable.items() if key not in trained]
            changed = [getattr(v, "path", v.name) for v in (*removed, *added)]
            raise ValueError(
                "The model's trainable variables have changed since this Trainer was built: "
                f"{sorted(changed)}. If the `trainable` of a layer was switched, switch it back; "
                "to train it as it is now, make a new Trainer, and a new optimizer if a layer "
                "was unfrozen."
            )

        switched = sorted(set(self.moving_layers) ^ set(now.moving_layers))
        if switched:
            raise ValueError(
                f"`trainable` of {switched} was switched since this Trainer was built: switch "
                "back, or make a new Trainer."
            )

        if self.slots != now.slots:
            raise ValueError(
                "The optimizer's slots have moved since this Trainer was built: another Trainer "
                "shares them out in another way (shard_optimizer), or stores them in another dtype "
                "(optimizer_state_dtype). Make a new Trainer, with this optimizer, to train on."
            )


def _refuse_float16(trained: Sequence[Variable]) -> None:
    """Raises ValueError for trained weights in float16, which holds no update below 2**-24."""
    halves = []
    for variable in trained:
        if dtype_of(variable) == tf.float16:
            halves.append(getattr(variable, "path", variable.name))
    if halves:
        raise ValueError(
            f"{len(halves)} trained weights are float16, such as {halves[0]!r}: small updates of "
            'them are lost. Make the model under the policy "mixed_float16", whose weights are '
            'float32, or "bfloat16", whose updates are rounded stochastically.'
        )


class StepBuilder:
    """Builds the step of a model once, and chooses the layout of its stacks."""

    def __init__(self, setup: TrainingSetup):
        self.setup = setup
        self._model = setup.model
        self.fingerprint = setup.make_fingerprint()
        self._compilation: tuple[Any, Any] = (None, None)  # as `_compile` left it
        self.throughput: Throughput | None = None  # of the last epoch of a fit

        # Each of these is set by the first `get_or_build`.
        self.engine: Engine | None = None
        self.sample: Batch | None = None  # specs of the micro-batch that the step was built for
        self.calling_python: Sequence[str] = ()  # what calls Python, by name
        # What the model's own loss computes otherwise if an update is split otherwise, by name.
        self.split_sensitive: Sequence[str] = ()
        self._snapshot: Snapshot | None = None

    @graph_scoped_gradients()
    @without_collection()
    def get_or_build(self, sample: Batch, options: Options) -> Engine:
        """Returns the engine, which is built once, from specs of a micro-batch.

        Raises:
            ValueError: raised if the model has changed since, or cannot be trained.
        """
        self._model.require_inputs(sample.x)
        if self.engine is None:
            built = self._build(sample, options)
            engine = self._make_engine(built, chosen_by_user=options.jit_compile != "auto")
            engine.admission = Admission(engine)
            self.fingerprint.require_one_program(engine.objective.options, sample)
            if not self._is_fitting:
                self._compile(engine.running)
            with replicas.on_first_replica(self.setup.replicas):
                split_sensitive = probe(engine.objective, sample)
            # These come last: a step that is refused may be built again with other options.
            self.calling_python = built.calling_python
            self.split_sensitive = split_sensitive
            self.sample = sample
            self.engine = engine
            self._snapshot = self._take_snapshot()

        assert self._snapshot is not None
        now = self._take_snapshot()
        if now.recomputed != self._snapshot.recomputed:
            self.engine.retrace()
            self._snapshot = dataclasses.replace(self._snapshot, recomputed=now.recomputed)
        self._snapshot.require_same(now)
        if not self._model.takes_targets_apart:
            # Targets for other outputs, on a program that exists, would be an obscure error of
            # tf.function's.
            objective = self.engine.objective
            objective.losses.require_targets(objective.outputs, sample.y)
        return self.engine

    def _build(self, sample: Batch, options: Options) -> BuiltModel:
        """Calls the model symbolically, builds what trains it, and chooses `jit_compile`."""
        setup = self.setup
        model = self._model
        metrics = setup.metrics
        setup.require_replicas(options)
        self.fingerprint.require_one_program(options, sample)

        # A model that is not built yet makes its variables on every replica.
        scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if setup.replicas is not None:
            scope = setup.replicas.strategy.scope()
        with scope:
            y_pred = model.symbolic_call(sample.x, training=True)
        y_true = tf.nest.map_structure(
            lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), sample.y
        )

        may_fall_back = options.jit_compile == "auto"
        if may_fall_back:
            options = dataclasses.replace(options, jit_compile=self._is_faster_compiled(sample.x))
        if options.jit_compile:
            compilable.require(model)
        compilable.require_recomputable(model)
        mode = choose_mode(options.float8, model.called_layers, options.uses_xla)
        options = dataclasses.replace(options, float8=mode)
        if mode:
            model.note_products(sample.x)

        if setup.needs_targets or metrics.given:
            y_true, y_pred = model.matched(sample.x, y_true, y_pred)
        outputs = model.OUTPUTS(
            model.output_names, y_pred, setup.losses.loss, model.overrides("compute_loss")
        )
        replica_count = 1 if setup.replicas is None else setup.replicas.count
        losses = setup.losses.bind(outputs, y_true, replica_count, model.takes_targets_apart)
        names = losses.log_names
        metrics.build(outputs, y_true, names, model.own_metrics, model.own_reset, model.own_results)

        calling_python = compilable.list_python_callers(model, losses, metrics)
        if options.jit_compile:
            weights = sample.sample_weight
            if own_loss.calls_python(model, sample.x, sample.y, y_pred, weights):
                calling_python.append(f"{type(model.model).__name__}.compute_loss")
        if options.jit_compile and calling_python:
            options = self._without_xla(options, calling_python, may_fall_back)

        if not losses.outputs:
            own_loss.require_any(model, called=True)
        if not model.trainable_variables:
            raise ValueError(
                f"model {model.model.name!r} has no trainable variables: there is nothing to train."
            )
        _refuse_float16(model.trainable_variables)
        return BuiltModel(model, outputs, losses, metrics, setup.optimizer, options, calling_python)

    def _make_engine(self, built: BuiltModel, chosen_by_user: bool) -> Engine:
        """Makes the engine of one device, or of replicas with all of the slots or a share of them.

        `chosen_by_user` tells that `jit_compile` was not "auto".
        """
        all_replicas = self.setup.replicas
        if all_replicas is None:
            compile_parts = built.options.uses_xla and (has_gpu() or chosen_by_user)
            return DeviceEngine(built, compile_parts)

        if self._shards(built.options):
            try:
                return ShardedEngine(all_replicas, built)
            except ValueError:
                if built.options.shard_optimizer is True:
                    raise
        return ReplicatedEngine(all_replicas, built)

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(
            trained=list(self._model.trainable_variables),
            moving_layers=list(self._model.moving_layers),
            slots=self._slot_identities(),
            recomputed=remat.installed(self._model.model),
        )

    def _without_xla(self, options: Options, callers: list[str], may_fall_back: bool) -> Options:
        """Returns options without XLA for what calls Python, and warns of it.

        Raises:
            ValueError: raised if the user has chosen XLA.
        """
        problem = (
            f"XLA cannot compile {', '.join(callers)}, which call Python (tf.py_function, "
            "tf.numpy_function)"
        )
        remedy = "write them with keras.ops or TensorFlow"
        if self._model.effects.python_calls:  # in layers
            remedy += ", or move what only prepares inputs into the input pipeline (dataset.map)"
        if not may_fall_back:
            raise ValueError(f"{problem}: {remedy}, or pass jit_compile='auto' or False.")
        warn(f"{problem}: this model trains without XLA. To use it, {remedy}.", UserWarning)
        return dataclasses.replace(options, jit_compile=False)

    def _slot_identities(self) -> list[int]:
        """Lists the identities of the variables that hold the slots of Keras's optimizers."""
        identities = []
        for part in self.setup.optimizer.parts:
            if not isinstance(part, keras.optimizers.Optimizer):
                continue
            if self.setup.replicas is not None:  # which move what a keras.Variable holds
                identities += [id(raw(v)) for v in part.variables if v.ndim]
                continue
            # Without its rate, which a schedule may replace.
            rate = private.learning_rate(part, None)
            identities += [id(v) for v in part.variables if v is not rate]
        return identities

    def _shards(self, options: Options) -> bool:
        """Decides if replicas share the optimizer's slots out."""
        all_replicas = self.setup.replicas
        if all_replicas is None or all_replicas.count == 1:
            return False
        if options.shard_optimizer != "auto":
            return options.shard_optimizer is True

        model = self._model
        optimizer = self.setup.optimizer
        trained = model.trainable_variables
        is_too_small = functools.partial(
            needs_shares, model.variables, trained, all_replicas.devices, options.storage
        )
        needed = (
            len(trained) >= all_replicas.count
            and not slots.indivisible(optimizer)
            and is_too_small(slots.MOST_PER_WEIGHT)
        )
        # Slots are counted only where the most that any optimizer has would be too many.
        if needed:
            try:
                with replicas.outside_scope():
                    needed = is_too_small(slots.slots_per_weight(optimizer))
            except Exception:  # of a class of the user's own, which cannot be made again
                needed = False
        # The worker with the least room decides.
        return any(needed_there for (needed_there,) in all_replicas.gather([needed]))

    def _is_faster_compiled(self, x: Nest) -> bool:
        """Decides what `jit_compile="auto"` is for the model."""
        model = self._model
        all_replicas = self.setup.replicas
        is_faster = not model.uncompilable_layers()
        if is_faster and not has_gpu():
            with replicas.on_first_replica(all_replicas):
                work = model.work(x)
            rows = tf.nest.flatten(x)[0].shape[0]
            is_faster = jit_choice.is_faster_compiled(work, rows)
        if all_replicas is None:
            return is_faster
        (is_faster_for_chief,) = all_replicas.gather([is_faster])[0]
        return bool(is_faster_for_chief)

    def _compile(self, running: RunningState) -> None:
        self._model.adopt(
            self.setup.optimizer.optimizer,
            self.setup.metrics,
            loss=self.setup.losses.loss,
            loss_weights=self.setup.losses.loss_weights,
        )
        self._model.adopt_means(running.loss, running.losses)
        self._compilation = self._model.compilation

    @property
    def _is_fitting(self) -> bool:
        return hasattr(self._model.model, _FITTING)

    def fitting(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        """Compiles the model with what trains it, and keeps it so inside the block.

        No other Trainer's `evaluate` compiles it there. An evaluation by the model's own methods
        leaves the logs of the epoch as they are.
        """
        if self._model.compiled_since(self._compilation):
            self._compile(engine.running)
        model = self._model.model
        attributes: list[tuple[object, str, object]] = [(model, _FITTING, True)]
        for name in ("evaluate", "test_on_batch"):
            attributes.append((model, name, WithinFit(getattr(model, name), self.keeping_logs)))
        return replaced(attributes)

    def keeping_logs(self) -> contextlib.AbstractContextManager[None]:
        """Restores the running means and metrics at the end of the block, if it is within a fit."""
        if self._is_fitting and self.engine is not None:
            return restored(self.engine.running.log_variables)
        return contextlib.nullcontext()

    def require_same(self) -> None:
        """Raises ValueError if a callback has compiled the model or switched what it trains."""
        assert self._snapshot is not None
        self._snapshot.require_same(self._take_snapshot())
        if self._model.compiled_since(self._compilation):
            raise ValueError(
                "The model was compiled anew within this fit, by a callback or by another "
                "Trainer. As in Keras, that cannot change a training under way: end the fit, and "
                "make a new Trainer."
            )

    def training_layout(self, options: Options) -> Layout:
        """Returns the layout of train steps' stacks.

        The model must have been called, which shows if its rows are coupled.
        """
        setup = self.setup
        assert self.engine is not None
        losses = self.engine.objective.losses
        exact_rows = (
            self._model.couples_rows
            or not setup.needs_targets  # the loss is the model's own
            or losses.need_exact_rows
            or setup.metrics.need_exact_rows
        )
        return self._layout(
            options, options.gradient_accumulation_steps, options.steps_per_execution, exact_rows
        )

    def evaluation_layout(self, options: Options, micro_batches: int) -> Layout:
        """Returns the layout of an evaluation's stacks, of `micro_batches` micro-batches each."""
        setup = self.setup
        assert self.engine is not None
        losses = self.engine.objective.losses
        exact_rows = (
            self._model.effects.mixes_rows
            or self._model.couples_losses
            or losses.need_exact_rows
            or any(output.power for output in losses.outputs)
            or not setup.needs_targets  # the loss is the model's own
            or setup.metrics.need_exact_rows
        )
        return self._layout(options, micro_batches, 1, exact_rows)

    def _layout(self, options: Options, micro_batches: int, steps: int, exact_rows: bool) -> Layout:
        assert self.engine is not None
        all_replicas = self.setup.replicas
        max_programs = options.max_programs
        if isinstance(max_programs, str):  # "auto"
            max_programs = DEFAULT_MAX_PROGRAMS
        layout = Layout(micro_batches, steps, exact_rows, max_programs=max_programs)
        if self.engine.shapes_are_free:
            compiles_steps = self.engine.objective.options.uses_xla
            layout = layout._replace(one_trace="at first" if compiles_steps else "always")
        else:
            enter = functools.partial(replicas.on_first_replica, all_replicas)
            layout = layout._replace(padding=padding.Padding(self.engine.objective, enter))
        if all_replicas is None:
            return layout
        return layout._replace(
            allows_by_micro_batch=False, replicas=all_replicas.count, shards=all_replicas.shards
        )
