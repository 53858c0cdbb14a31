"""The stages of `Trainer.fit`: its data, and the loop over epochs and train steps."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.callbacks import Callbacks, LateLogs, take_backed_up_epoch
from fastaccum.basics.attributes import Variable, raw
from fastaccum.checkpoint import state
from fastaccum.checkpoint.saver import Saver
from fastaccum.data import arrays
from fastaccum.data.source import Source, Stacks
from fastaccum.data.stacks import Batch, Dispatch, Position
from fastaccum.distribute import replicas
from fastaccum.distribute.replicas import Replicas
from fastaccum.fingerprint.values import Json
from fastaccum.fingerprint.variables import checksums as checksums_of
from fastaccum.graphs import jit_choice
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.memory.plan import Plan
from fastaccum.step import announcements, diagnosis
from fastaccum.step.engine import Engine, PendingDispatch
from fastaccum.step.options import Options, Schedule
from fastaccum.training.evaluation import Evaluation
from fastaccum.training.forecasts import make_plan
from fastaccum.training.reading import reading
from fastaccum.training.step_builder import StepBuilder
from fastaccum.training.throughput import Stopwatch, Throughput
from fastaccum.training.training_setup import TrainingSetup

Verbose = Literal["auto", 0, 1, 2]


class SplitData(NamedTuple):
    """The data of a fit."""

    training: tuple[object, object, object]  # x, y and sample_weight
    validation: object  # as `validation_data` of Keras's `fit`; None for no validation


def split_validation(
    setup: TrainingSetup,
    options: Options,
    data: tuple[object, object, object],
    validation_split: float,
    validation_data: object,
) -> SplitData:
    """Splits a share of x, y and sample_weight off, unless there is `validation_data`."""
    share = checks.fraction("validation_split", validation_split)
    if not share or validation_data is not None:
        return SplitData(data, validation_data)
    may_take_text = setup.takes_text(options) or setup.model.preprocess is not None
    training, validation = arrays.split(data, validation_split, text=may_take_text)
    return SplitData(training, validation)


def draw_seed(shuffle: bool, all_replicas: Replicas | None) -> int:
    """Draws the seed by which rows are shuffled, which is the chief's on every worker."""
    seed = 0
    if checks.true_or_false("shuffle", shuffle):
        seed = int(np.random.randint(2**31 - 1))
    if all_replicas is not None:
        (seed_of_chief,) = all_replicas.gather([seed])[0]
        seed = int(seed_of_chief)
    return seed


def check_batch_size(
    batch_size: int | Literal["auto"] | None, global_batch_size: int | None
) -> int | None:
    """Returns the rows of a micro-batch, None for the default or where a plan is to choose them.

    Raises:
        ValueError: raised for `batch_size="auto"` without a `global_batch_size`, and for a
            `global_batch_size` with any other `batch_size`.
    """
    if isinstance(batch_size, str) and batch_size == "auto":
        if global_batch_size is None:
            raise ValueError('batch_size="auto" needs global_batch_size=N, the rows of an update.')
        return None
    if global_batch_size is not None:
        raise ValueError(
            f'global_batch_size={checks.shown(global_batch_size)} needs batch_size="auto", '
            "which divides it into "
            f"micro-batches that fit, and not batch_size={checks.shown(batch_size)}."
        )
    return batch_size


def plan_micro_batch(
    builder: StepBuilder,
    options: Options,
    source: Source,
    global_batch_size: int,
    verbose: Verbose,
) -> Plan:
    """Plans the micro-batch for `batch_size="auto"`, and prints the plan."""
    workers = 1
    if builder.setup.replicas is not None:
        workers = builder.setup.replicas.workers
    plan = make_plan(
        builder,
        options,
        source.sample,
        global_batch_size=global_batch_size,
        at_most=source.most_rows(workers),
        verbose=verbose,
        bound_suffices=True,
    )
    if verbose:
        print(plan.summary)
    return plan


@graph_scoped_gradients()
def make_validation(
    builder: StepBuilder,
    options: Options,
    schedule: Schedule,
    validation_data: object,
    batch_size: int | None,
    training_sample: Batch,
) -> Evaluation | None:
    """Makes the evaluation for all epochs that validate; errors of its data come now."""
    if validation_data is None:
        return None
    with checks.naming("validation_data"):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
    source = builder.setup.make_source(
        x,
        y,
        sample_weight,
        options,
        batch_size=schedule.validation_batch_size or batch_size,
        what="validation_data",
        steps="validation_steps",
    )
    first_epoch = schedule.initial_epoch
    if schedule.validation_steps is not None:
        # The passes bound how much of the data is read. A checkpoint may continue from an epoch
        # before `initial_epoch`, and more passes than from there are run then.
        first_epoch = 0
    passes = sum(map(schedule.validates, range(first_epoch, schedule.epochs)))
    evaluation = Evaluation(builder, source, options, schedule.validation_steps, passes)
    evaluation.require_traceable(like=training_sample)
    return evaluation


def say_advice(
    callbacks: Callbacks,
    builder: StepBuilder,
    engine: Engine,
    options: Options,
    schedule: Schedule,
    stacks: Stacks,
) -> None:
    """Tells a user who reads along what Keras does otherwise, before the first step."""
    has_run = any(made.seconds for made in engine.programs.values())
    rounds_weights = builder.setup.optimizer.rounds_weights
    if rounds_weights and not has_run and callbacks.announce is not None:
        callbacks.announce(
            "The weights are bfloat16: updates are computed in float32, and rounded "
            "stochastically. stochastic_rounding=False rounds to nearest, as Keras does.\n"
        )
    if callbacks.advise is None:
        return
    chose_without_xla = options.jit_compile == "auto" and not engine.objective.options.uses_xla
    if chose_without_xla and not has_run:
        reason = _why_without_xla(builder.setup, builder.calling_python)
        callbacks.advise(f"This model trains without XLA, which {reason}.\n")

    # Where the data has a known end, the progress line shows what a step is.
    steps = schedule.steps_per_epoch
    micro_batches = stacks.layout.accumulation
    if steps is not None and micro_batches > 1 and not stacks.has_known_end:
        callbacks.advise(
            f"steps_per_epoch={steps:,} counts updates: an epoch reads {steps * micro_batches:,} "
            f"batches, {micro_batches} for each update. Keras's counts batches.\n"
        )


def _why_without_xla(setup: TrainingSetup, calling_python: Sequence[str]) -> str:
    """Returns a clause about XLA: why `jit_compile="auto"` chose to do without."""
    reason = "would be slower here"
    if setup.model.uncompilable_layers():
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


def describe_training(
    builder: StepBuilder,
    options: Options,
    engine: Engine,
    sample: Batch,
    stacks: Stacks,
    callbacks: Callbacks,
    class_weight: Mapping[int, float] | None,
) -> state.Training:
    """Describes a fit that begins, for its checkpoints and for the other workers."""
    setup = builder.setup
    model = setup.model
    variables: dict[str, Sequence[tf.Variable | keras.Variable]] = {
        "model": [*model.variables, *model.state, *_weights_of_losses(setup, engine)],
        "optimizer": setup.optimizer.variables,
        "loss_scale": engine.cycle.loss_scale.variables,
        "step": engine.running.variables,
    }
    plan = {**stacks.plan, "class_weight": class_weight}
    cut: Json = {
        **stacks.cut,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "replicas": 1 if setup.replicas is None else setup.replicas.count,
    }
    # The description has what "auto" chose.
    options = dataclasses.replace(options, jit_compile=engine.objective.options.uses_xla)
    describe = functools.partial(builder.fingerprint.describe, variables, options, sample, plan)
    changes = builder.fingerprint.changes
    return state.Training(
        model=model.model,
        variables=variables,
        description=changes.begin(describe),
        cut=cut,
        split_sensitive_layers=[*model.split_sensitive_layers, *builder.split_sensitive],
        unsaved_draws=model.effects.unsaved_draws,
        stacks=stacks,
        callbacks=callbacks,
        require_savable=engine.running.savable,
        note_changes=changes.end,
        workers=setup.replicas,
        holders=engine.holders,
        settings=setup.optimizer.settings,
        scales=setup.optimizer.scales,
    )


def _weights_of_losses(setup: TrainingSetup, engine: Engine) -> list[Variable]:
    """Lists the variables among `loss_weights`, but for those of the model's own."""
    of_model = {id(raw(variable)) for variable in setup.model.variables}
    variables = engine.objective.losses.weight_variables
    return [v for v in variables if id(raw(v)) not in of_model]


def train(
    builder: StepBuilder,
    engine: Engine,
    stacks: Stacks,
    callbacks: Callbacks,
    saver: Saver,
    *,
    schedule: Schedule,
    evaluation: Evaluation | None,
    describe: Callable[[], state.Training],
    verbose: Verbose,
) -> keras.callbacks.History:
    """Trains for the epochs of the schedule; continues from a checkpoint where there is one."""
    setup = builder.setup
    model = setup.model.model
    if setup.replicas is not None and setup.replicas.workers > 1:
        _require_workers_alike(builder, describe())

    model.stop_training = False
    engine.running.stuck_steps.reset()
    logs: dict[str, float] = {}
    with (
        saver,
        builder.fitting(engine),
        reading(stacks, evaluation),
        announcements.announce(callbacks.announce),
    ):
        start = saver.find(describe, schedule.initial_epoch, schedule.epochs, verbose)
        if start.changed_constants:
            engine.retrace()
        with replicas.on_first_replica(setup.replicas):
            diagnosis.require_statistics(engine.cycle, engine.objective)
            diagnosis.warn_of_zero_lora(setup.model.layers)

        with saver.beginning_training():
            callbacks.callback_list.on_train_begin()
        position = start.position
        # A checkpoint says where to go on; `find` refuses a BackupAndRestore beside it.
        backed_up_epoch = take_backed_up_epoch(model, stacks.steps_per_epoch)
        if backed_up_epoch and saver.directory is None:
            position = Position(backed_up_epoch, backed_up_epoch)
        end = schedule.epochs
        if start.stopped:
            end = position.epoch
        epochs = range(position.epoch, end)
        # Either may end first: the range, or data that is read once. The range is asked first, so
        # no data is read for an epoch after the last.
        for epoch, dispatches in zip(epochs, stacks.epochs(position), strict=False):
            engine.running.reset()
            with saver.beginning_epoch(epoch):
                callbacks.callback_list.on_epoch_begin(epoch)
                builder.require_same()
            steps_done = saver.step_in_epoch
            watched = saver.watched(engine.lockstep(stacks, dispatches))
            logs, throughput = _train_epoch(engine, watched, callbacks, steps_done)
            builder.throughput = throughput
            if throughput is None:
                callbacks.show_rate(None)
            else:
                callbacks.show_rate(throughput.rows_per_second)

            if evaluation is not None and schedule.validates(epoch):
                validation_logs = evaluation(_validation_callbacks(callbacks, model))
                logs.update({f"val_{name}": value for name, value in validation_logs.items()})
            callbacks.callback_list.on_epoch_end(epoch, logs)
            saver.end_epoch(last=model.stop_training or epoch == end - 1)
            if model.stop_training:
                break

        setup.optimizer.finalize(setup.model.trainable_variables)
        model.history.programs = _programs_of(engine)
        callbacks.callback_list.on_train_end(logs)
    return model.history


def _require_workers_alike(builder: StepBuilder, training: state.Training) -> None:
    """Raises WorkersDifferError on every worker if they would train otherwise than each other."""
    held_by_all = [v for v in training.variables["optimizer"] if id(v) not in training.holders]
    checksums = checksums_of({**training.variables, "optimizer": held_by_all})
    builder.fingerprint.require_alike(
        "fit, built", **training.description, cut=training.cut, checksums=checksums
    )


def _validation_callbacks(callbacks: Callbacks, model: keras.Model) -> Callbacks:
    return Callbacks(
        callbacks.callback_list,
        model,
        verbose=0,
        epochs=1,
        steps=None,
        history=False,
        validates=True,
    )


def _programs_of(engine: Engine) -> dict[str, tuple[int, float]]:
    """Returns how many programs were made for each purpose, and the seconds of their first calls.

    A purpose for which there is none is left out.
    """
    programs = {}
    for name, program_of_step in engine.programs.items():
        seconds = list(program_of_step.seconds.values())
        if seconds:
            programs[name] = (len(seconds), sum(seconds))
    return programs


def _unread(logs: LateLogs) -> LateLogs:
    """Returns the logs of a step as they are, for a callback that reads them or does not."""
    return logs


class TrainedEpoch(NamedTuple):
    """An epoch that was trained."""

    logs: dict[str, float]  # of its last step
    throughput: Throughput | None  # None where each call compiled a program


def _train_epoch(
    engine: Engine, dispatches: Iterator[Dispatch], callbacks: Callbacks, steps_done: int
) -> TrainedEpoch:
    """Trains with the dispatches of an epoch, of which some steps may be done already."""
    stopwatch = Stopwatch()
    begin, end = callbacks.hooks("train")
    pending: PendingDispatch | None = None
    for dispatch in dispatches:
        begin(steps_done)
        try:
            with stopwatch.timing(dispatch, engine.programs):
                executed = engine.dispatch(dispatch)
        except (tf.errors.OpError, MemoryError):
            if pending is not None:
                pending.require()  # another worker may have failed for what is known here better
            raise
        if pending is not None:
            # Read only now that the next step is on its way: the device never runs dry.
            pending.require()
        pending = PendingDispatch(engine, executed, dispatch)
        late = LateLogs(executed.logs, pending.require)
        end(steps_done + dispatch.size - 1, functools.partial(_unread, late))
        steps_done += dispatch.steps
        if engine.objective.model.model.stop_training:
            break

    if pending is None:
        raise ValueError(
            "The data ended before the place where training is to go on: pass the data that the "
            "checkpoint was made with."
        )
    logs = dict(late)  # reading them waits for the last step, and raises what went wrong in it
    engine.running.stuck_steps.warn(executed.stuck)
    return TrainedEpoch(logs, stopwatch.read())
