"""`Trainer.fit`: its data, then the loop over epochs and train steps."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.callbacks import Callbacks, LateLogs, take_backed_up_epoch
from fastaccum.basics import arguments
from fastaccum.basics.attributes import Variable, raw
from fastaccum.checkpoint import state
from fastaccum.checkpoint.saver import Saver
from fastaccum.data import arrays
from fastaccum.data.source import Stacks
from fastaccum.data.stacks import Dispatch, Position
from fastaccum.distribute import replicas
from fastaccum.graphs import jit_choice
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.memory.planner import Plan
from fastaccum.step import diagnosis, program
from fastaccum.step.options import Options, Schedule
from fastaccum.step.step import PendingStep, Step
from fastaccum.training.evaluation import Evaluation
from fastaccum.training.forecasts import make_plan
from fastaccum.training.reading import reading
from fastaccum.training.recipe import Recipe
from fastaccum.training.step_builder import StepBuilder
from fastaccum.training.throughput import Stopwatch

Verbose = Literal["auto", 0, 1, 2]


class Fit:
    """Runs one call of `Trainer.fit`: `prepare` makes its data, `run` trains with them."""

    def __init__(self, builder: StepBuilder, schedule: Schedule, saver: Saver, verbose: Verbose):
        self._recipe, self._builder, self._schedule = builder.recipe, builder, schedule
        self._saver, self._verbose = saver, verbose

    def prepare(
        self,
        options: Options,
        given: tuple[object, object, object],
        *,
        batch_size: int | Literal["auto"] | None,
        global_batch_size: int | None,
        validation_split: float,
        validation_data: object,
        shuffle: bool,
        class_weight: Mapping[int, float] | None,
        **others: object,
    ) -> Plan | None:
        """Makes the source of the data, `given` as x, y and sample_weight, after all workers agree
        on the call.

        With `batch_size="auto"`, returns the plan, by whose accumulation steps the options must be
        changed for `run`.
        """
        self._class_weight = checks.class_weight(class_weight)
        if checks.fraction("validation_split", validation_split) and validation_data is None:
            text = self._recipe.takes_text(options) or self._recipe.model.preprocess is not None
            given, validation_data = arrays.split(given, validation_split, text=text)
        self._validation_data = validation_data
        called = {
            **dataclasses.asdict(self._schedule),
            "class_weight": self._class_weight,
            **others,
        }
        self._builder.fingerprint.require_alike(
            "fit", **called, validation_data=validation_data is not None
        )
        seed = int(np.random.randint(2**31 - 1)) if checks.true_or_false("shuffle", shuffle) else 0
        if self._recipe.replicas is not None:
            seed = int(self._recipe.replicas.gather([seed])[0][0])  # the chief's
        auto = isinstance(batch_size, str) and batch_size == "auto"
        if auto and global_batch_size is None:
            raise ValueError('batch_size="auto" needs global_batch_size=N, the rows of an update.')
        if not auto and global_batch_size is not None:
            raise ValueError(
                f'global_batch_size={checks.shown(global_batch_size)} needs batch_size="auto", '
                "which divides it into "
                f"micro-batches that fit, and not batch_size={checks.shown(batch_size)}."
            )
        self._batch_size: Any = None if auto else batch_size
        shuffling = {"shuffle": shuffle, "seed": seed if shuffle else None}
        drawn = {**shuffling, "class_weight": self._class_weight, "batch_size": self._batch_size}
        self._source = self._recipe.make_source(*given, options, **drawn)
        if global_batch_size is None:
            return None
        at_most = self._source.most_rows(
            1 if self._recipe.replicas is None else self._recipe.replicas.workers
        )
        plan = make_plan(
            self._builder,
            options,
            self._source.sample,
            global_batch_size=global_batch_size,
            at_most=at_most,
            verbose=self._verbose,
            bound_suffices=True,
        )
        if self._verbose:
            print(plan.summary)
        self._source.rebatch(plan.batch_size)
        self._batch_size = plan.batch_size
        return plan

    def run(
        self, options: Options, callbacks: arguments.CallbacksArgument
    ) -> keras.callbacks.History:
        """Trains for the epochs of the schedule; continues from a checkpoint where there is one."""
        recipe, builder, schedule, saver = self._recipe, self._builder, self._schedule, self._saver
        model = recipe.model.model
        step = builder.get_or_build(self._source.sample, options)
        recipe.losses.require_classes(self._class_weight)
        epochs_left = schedule.epochs - schedule.initial_epoch
        stacks = self._source.stacks(
            builder.training_layout(options), schedule.steps_per_epoch, epochs_left
        )
        evaluation = self._make_validation(options)
        stacks.reset()
        steps = stacks.steps_per_epoch
        hooks = Callbacks(
            callbacks,
            model,
            verbose=self._verbose,
            epochs=schedule.epochs,
            steps=steps,
            history=True,
        )
        if step.elsewhere:
            hooks.require_none(
                "SwapEMAWeights", "which swaps averages on all replicas: pass shard_optimizer=False"
            )
        chose_without_xla = options.jit_compile == "auto" and not step.objective.options.uses_xla
        if (
            hooks.say is not None
            and chose_without_xla
            and not any(each.seconds for each in step.programs.values())
        ):
            reason = _why_without_xla(recipe, builder.calling_python)
            hooks.say(f"This model trains without XLA, which {reason}.\n")
        if hooks.say is not None and (said := self._counted_steps(stacks)):
            hooks.say(said)
        training = functools.partial(self._training, options, step, stacks, hooks)
        if recipe.replicas is not None and recipe.replicas.workers > 1:
            now = training()
            shared = {
                "optimizer": [v for v in now.variables["optimizer"] if id(v) not in now.holders]
            }
            checksums = state.checksums({**now.variables, **shared})
            builder.fingerprint.require_alike(
                "fit, built", **now.description, cut=now.cut, checksums=checksums
            )
        model.stop_training = False
        step.running.stuck_steps.reset()
        logs: dict[str, float] = {}
        with (
            saver,
            builder.fitting(step),
            reading(stacks, evaluation),
            program.announce(hooks.announce),
        ):
            position = saver.resume(
                training, schedule.initial_epoch, schedule.epochs, self._verbose
            )
            if saver.changed_constants:
                step.retrace()
            with replicas.on_first_replica(recipe.replicas):
                diagnosis.require_statistics(step.cycle, step.objective)
                diagnosis.warn_of_zero_lora(recipe.model.layers)
            with saver.beginning_training():
                hooks.list.on_train_begin()
            if epoch := take_backed_up_epoch(model, steps):
                position = Position(epoch, epoch)
            last = position.epoch if saver.stopped else schedule.epochs
            for epoch, dispatches in zip(
                range(position.epoch, last), stacks.epochs(position), strict=False
            ):
                step.running.reset()
                with saver.beginning_epoch(epoch):
                    hooks.list.on_epoch_begin(epoch)
                    builder.require_same()
                done = saver.step_in_epoch
                stopwatch = Stopwatch()
                logs = _train_epoch(
                    step, saver.watched(step.lockstep(stacks, dispatches)), hooks, done, stopwatch
                )
                builder.throughput = stopwatch.read()
                hooks.show_rate(
                    None if builder.throughput is None else builder.throughput.rows_per_second
                )
                if evaluation is not None and schedule.validates(epoch):
                    validation_logs = evaluation(self._validation_hooks(hooks))
                    logs.update({f"val_{name}": value for name, value in validation_logs.items()})
                hooks.list.on_epoch_end(epoch, logs)
                saver.end_epoch(last=model.stop_training or epoch == last - 1)
                if model.stop_training:
                    break
            recipe.optimizer.finalize(recipe.model.trainable_variables)
            model.history.programs = _programs_of(step)
            hooks.list.on_train_end(logs)
        return model.history

    @graph_scoped_gradients()
    def _make_validation(self, options: Options) -> Evaluation | None:
        if self._validation_data is None:
            return None
        schedule = self._schedule
        with checks.naming("validation_data"):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._validation_data)
        # One source for all epochs: it is validated before training starts.
        names = {"what": "validation_data", "steps": "validation_steps"}
        batch_size = schedule.validation_batch_size or self._batch_size
        source = self._recipe.make_source(
            x, y, sample_weight, options, batch_size=batch_size, **names
        )
        first = schedule.initial_epoch
        if schedule.validation_steps is not None:
            first = 0  # a checkpoint may be of an earlier epoch than the initial one
        passes = sum(map(schedule.validates, range(first, schedule.epochs)))
        evaluation = Evaluation(self._builder, source, options, schedule.validation_steps, passes)
        evaluation.require_traceable(like=self._source.sample)
        return evaluation

    def _validation_hooks(self, hooks: Callbacks) -> Callbacks:
        model = self._recipe.model.model
        return Callbacks(
            hooks.list, model, verbose=0, epochs=1, steps=None, history=False, validates=True
        )

    def _counted_steps(self, stacks: Stacks) -> str | None:
        """Says what `steps_per_epoch` counts, where no end of the data would show it; None where
        nothing is to say.
        """
        steps = self._schedule.steps_per_epoch
        micro_batches = stacks.layout.accumulation
        if steps is None or micro_batches == 1 or stacks.has_known_end:
            return None
        return (
            f"steps_per_epoch={steps:,} counts updates: an epoch reads {steps * micro_batches:,} "
            f"batches, {micro_batches} for each update. Keras's counts batches.\n"
        )

    def _weights_of_losses(self) -> list[Variable]:
        """Returns the variables among `loss_weights`, but for those of the model's own."""
        known = {id(raw(v)) for v in self._recipe.model.variables}
        return [v for v in self._recipe.losses.weight_variables if id(raw(v)) not in known]

    def _training(
        self, options: Options, step: Step, stacks: Stacks, hooks: Callbacks
    ) -> state.Training:
        recipe, model = self._recipe, self._recipe.model
        variables: dict[str, Sequence[tf.Variable | keras.Variable]] = {
            "model": [*model.variables, *model.state, *self._weights_of_losses()],
            "optimizer": recipe.optimizer.variables,
            "loss_scale": step.cycle.loss_scale.variables,
            "step": step.running.variables,
        }
        plan = {**stacks.plan, "class_weight": self._class_weight}
        count = 1 if recipe.replicas is None else recipe.replicas.count
        split = {
            "gradient_accumulation_steps": options.gradient_accumulation_steps,
            "replicas": count,
        }
        cut: state.Json = {**stacks.cut, **split}
        fingerprint, changes = self._builder.fingerprint, self._builder.fingerprint.changes
        # what "auto" chose
        options = dataclasses.replace(options, jit_compile=step.objective.options.uses_xla)
        describe = functools.partial(
            fingerprint.describe, variables, options, self._source.sample, plan
        )
        return state.Training(
            model.model,
            variables,
            changes.begin(describe),
            cut,
            [*model.split_sensitive_layers, *self._builder.split_sensitive],
            model.unsaved_draws,
            stacks,
            hooks,
            step.running.savable,
            changes.end,
            recipe.replicas,
            step.holders,
            recipe.optimizer.settings,
        )


def _programs_of(step: Step) -> dict[str, tuple[int, float]]:
    """Returns how many programs were made so far for each purpose, and the seconds of their first
    calls.
    """
    made = {name: list(each.seconds.values()) for name, each in step.programs.items()}
    return {name: (len(seconds), sum(seconds)) for name, seconds in made.items() if seconds}


def _why_without_xla(recipe: Recipe, calling_python: Sequence[str]) -> str:
    """Tells why a model trains without XLA, which `jit_compile="auto"` chose: a clause about
    XLA.
    """
    reason = "would be slower here"
    if recipe.model.uncompilable_layers():
        reason = "cannot compile a layer"
    elif calling_python:
        reason = f"cannot compile {', '.join(calling_python)}"
    on_x86 = platform.machine() in ("x86_64", "AMD64")  # where fastaccum turns oneDNN on
    if on_x86 and not (jit_choice.ONEDNN or "TF_ENABLE_ONEDNN_OPTS" in os.environ):
        reason += (
            "; TensorFlow's operations may be faster with oneDNN: import fastaccum before "
            "TensorFlow"
        )
    return reason


def _train_epoch(
    step: Step, dispatches: Iterator[Dispatch], hooks: Callbacks, first: int, stopwatch: Stopwatch
) -> dict[str, float]:
    """Trains with the dispatches of an epoch, of which `first` steps are done, and returns the last
    step's logs.
    """
    begin, end = hooks.hooks("train")
    pending: PendingStep | None = None
    for dispatch in dispatches:
        begin(first)
        try:
            with stopwatch.timing(dispatch, step.programs):
                executed = step.dispatch(dispatch)
        except (tf.errors.OpError, MemoryError):
            if pending is not None:
                pending.require()  # another worker may have failed for what is known here better
            raise
        if pending is not None:
            # Read only now that the next step is on its way: the device never runs dry.
            pending.require()
        pending = PendingStep(step, executed, dispatch)
        late = LateLogs(executed.logs, pending.require)
        end(first + dispatch.size - 1, functools.partial(lambda logs: logs, late))
        first += dispatch.steps
        if step.objective.model.model.stop_training:
            break
    if pending is None:
        raise ValueError(
            "The data ended before the place where training is to go on: pass the data that the "
            "checkpoint was made with."
        )
    logs = dict(late)  # reading them waits for the last step, and raises what went wrong in it
    step.running.stuck_steps.warn(executed.stuck)
    return logs
