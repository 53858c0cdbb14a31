"""`Trainer`: Keras's fit, evaluate and predict over the fused train step."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NoReturn

import keras

from fastaccum import checks
from fastaccum.adapters.callbacks import Callbacks
from fastaccum.adapters.own_loss import Reduction
from fastaccum.adapters.storage import StateDtype
from fastaccum.basics import arguments
from fastaccum.checkpoint.saver import Saver
from fastaccum.distribute import workers
from fastaccum.layers.attention import FlashAttention
from fastaccum.layers.float8 import Float8
from fastaccum.layers.scan import ScanLayers
from fastaccum.memory.plan import Plan
from fastaccum.memory.summary import Summary
from fastaccum.step import compilable
from fastaccum.step import compile_cache as compile_caches
from fastaccum.step import compiler_ir as ir
from fastaccum.step import loss_scale as loss_scales
from fastaccum.step.engine import Engine
from fastaccum.step.options import JitCompile, OnNonfinite, Options, Schedule, ShardOptimizer
from fastaccum.step.train_step import StepResult
from fastaccum.training.evaluation import Evaluation, predict
from fastaccum.training.fit import (
    Verbose,
    check_batch_size,
    describe_training,
    draw_seed,
    make_validation,
    plan_micro_batch,
    say_advice,
    split_validation,
    train,
)
from fastaccum.training.forecasts import plan_for_data, summarize
from fastaccum.training.reading import reading
from fastaccum.training.step_builder import StepBuilder
from fastaccum.training.throughput import Throughput
from fastaccum.training.train_step_inputs import TrainStepInputs
from fastaccum.training.training_setup import TrainingSetup

# Arguments that are no options: an attribute of the same name would have no effect.
_FIXED = ("model", "loss", "loss_weights", "metrics", "weighted_metrics")


class Trainer:
    """Trains a Keras model with gradient accumulation.

    A train step takes `gradient_accumulation_steps` micro-batches of `batch_size` rows and applies
    one update, all in one XLA program. The update equals, to float32 rounding, that of Keras's own
    step on all these rows at once:

        update = optimizer( sum_ij w_ij * grad(l_ij) / denominator )

    Here i counts the micro-batches and j their rows or tokens; w are their weights and l their
    losses. The denominator is the one that the loss's `reduction` defines over the full batch. A
    short last batch counts by the rows that it holds; an update in which no row or token counts
    (all labels ignored, say) changes nothing. Batch statistics, as of BatchNormalization, are those
    of each micro-batch.

    The model is trained in place: save it, as any Keras model, by
    `trainer.model.save("model.keras")`.

    Embeddings differ from Keras 3 on purpose. Their gradient is summed by id before the optimizer
    sees it, as in tf_keras. Keras 3's `fit` doesn't sum it, and optimizers such as Adam then square
    each part of an id by itself.

    Args:
        model: a Keras 3 model, or a tf_keras model. The `jit_compile` and `steps_per_execution`
            that it was compiled with don't count: pass them here.
        optimizer: a Keras 3, tf_keras or tensorflow-addons optimizer; or the name of one, which is
            tf_keras's for a tf_keras model, else Keras 3's. Its schedules and `iterations` count
            updates. None for the one that the model was compiled with, if `loss` is None too, and
            else for a new AdamW.
        loss: a Keras loss or its name; a function `fn(y_true, y_pred)` that returns one loss per
            row or per token, one number for the batch, or a pair `(loss_sum, weight_sum)`; or a
            list or dict of these, by output. None for the model's own loss: the one that it was
            compiled with (with its metrics, if none are given), its `compute_loss`, its `add_loss`,
            or the loss that a Hugging Face model returns. `y` may be left out where the loss
            doesn't need it.
        metrics: as in Keras's `compile`.
        loss_weights: factors of the outputs' losses, as in `compile`. A scalar variable is read in
            each step.
        weighted_metrics: metrics that use the sample weights, as in `compile`.
        gradient_accumulation_steps: micro-batches per update.
        loss_scale: a loss scale, or a number for a static one. "auto" for `DynamicLossScale()` if
            the model computes in float16, and none otherwise.
        clip_norm: clip the gradient of the whole update to this global norm. None for no clipping.
        fp32_weight_gradients: if the model computes in float16 or bfloat16, compute the gradients
            of its kernels and biases in float32, as `fastaccum.kernels.fp32_weight_gradients` does,
            but within the train step alone: the model stays as it is. No effect in float32 and on
            tf_keras models.
        flash_attention: fused attention, in memory linear in the number of tokens, in layers of
            Keras and KerasHub and calls of `keras.ops.dot_product_attention`: "auto" where scores
            are large, masks are causal, windows or padding, and the model has no `compute_loss` of
            its own (with dropout, a window or a soft cap: of long sequences); True in each, or
            ValueError; False in none. `summary()` lists the choices.
        jit_compile: compile with XLA. False runs the same step operation by operation. "auto", as
            in Keras, compiles on a GPU, and on a CPU where the model trains faster so: not where
            convolutions take the time, nor with layers that declare that XLA cannot. The choice is
            made when the step is built, and stands in a checkpoint.
        steps_per_execution: train steps in one call of the program. Callbacks see the last step of
            each call, as in Keras.
        on_nonfinite: what to do about a step whose gradient, loss or statistics are not finite, if
            no lower loss scale is left to try. Such a step never changes anything. "skip" goes on,
            and raises `NonFiniteError` after 10 of them in a row. "raise" raises it at the first.
        max_programs: how many sizes of a micro-batch get a program of their own, where batches have
            other numbers of rows, or other lengths, and are padded to the next of these sizes
            (docs/guides/varying-batches.md). Fewer compile sooner; more waste less. "auto" is 4.
        float8: multiply in float8 in training, by `fa.kernels.matmul_float8`: in Dense and
            EinsumDense layers, so in the projections of attention too, but not in the last layer,
            in layers of your own classes, and where a kernel's sizes are not multiples of 16.
            LoRA's own matrices, other operations, evaluation and prediction stay in half precision,
            weights and checkpoints in float32. "auto" where the device has such products (compute
            capability 8.9) and a layer is large enough to gain by them; True wherever it can be, on
            any device. `summary()` lists the layers (docs/guides/float8.md).
        scan_layers: run layers that repeat, such as a transformer's blocks, as one loop, which is
            traced and compiled once. The result is the same, to float32 rounding, and the model
            stays as it is. It applies where XLA compiles the step, to layers in a graph, and to
            those that a `call` calls one after the other. True for two layers or more, False for
            none. With True, layers of your own classes count as the same if their attributes are:
            what tells them apart must stand there, and what they compute must leave by their
            outputs. "auto" for four or more layers of Keras and KerasHub where a loop runs no
            slower: on a CPU, where what a layer hands on to the next has at most 8,192 elements.
            `summary()` lists the loops, and why other layers are not in one.
        optimizer_state_dtype: how the optimizer's slots are stored between updates; each update
            reads them as float32 and computes in float32. "float32" leaves them as Keras makes
            them, in the dtype of their weights. "bfloat16" halves them, and rounds stochastically.
            "int8" quarters them, in blocks of 256 with a scale; slots of vectors and of fewer than
            4,096 numbers stay in float32. For optimizers of Keras 3 that are elementwise, such as
            SGD, Adam, AdamW, Nadam, Adamax, RMSprop, Adagrad, Adadelta and Lion; ValueError for
            others (docs/guides/few-bytes.md).
        stochastic_rounding: round bfloat16 slots stochastically, and weights of a model under the
            policy "bfloat16", whose updates are computed in float32. False rounds to nearest, as
            Keras does: an update of less than half a unit of the last place is lost.
        shard_optimizer: under tf.distribute, share the optimizer's slots out over the replicas,
            each of which then updates the weights whose slots it has. The result is the same; see
            docs/distributed.md. "auto" does so where all slots would not fit each device.
        own_loss_reduction: whether a scalar that the model computes itself (in `compute_loss`, or
            for `add_loss`) is the "mean" or the "sum" over the rows of a micro-batch, which
            fastaccum can't see. With "sum", a penalty on weights counts once for each micro-batch:
            make it a regularizer. A loss that is neither (a masked mean, a comparison of rows) is
            computed for each micro-batch by itself, with a warning where that can be seen.
        compile_cache: the folder of compiled programs that this process has to use. TensorFlow
            reads as it begins where programs are kept: set the environment variable
            FASTACCUM_COMPILE_CACHE to the folder, and import fastaccum before TensorFlow. The next
            process that traces the same programs in the same order loads them from there, if
            versions, device and flags are the same.

    Raises:
        TypeError: if the model, optimizer, loss or a metric is not one.
        ValueError: if a number is out of its range, a name is unknown, the model overrides
            `train_step`, there is no loss, the optimizer accumulates or scales by itself, or XLA
            cannot compile a layer. Later: if an attribute is set after the train step was built
            with it.
        RuntimeError: if this process does not use `compile_cache`.

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="line")
    >>> trainer = Trainer(model, "sgd", "mse", gradient_accumulation_steps=4)
    >>> trainer
    Trainer(Sequential 'line', optimizer=SGD, gradient_accumulation_steps=4, precision=float32)
    >>> x = np.random.default_rng(0).normal(size=(100, 2)).astype("float32")
    >>> history = trainer.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=20, verbose=0)
    >>> history.history["loss"][-1] < history.history["loss"][0] / 5
    True
    """

    gradient_accumulation_steps: int
    steps_per_execution: int
    loss_scale: loss_scales.LossScale
    clip_norm: float | None
    fp32_weight_gradients: bool
    flash_attention: FlashAttention
    jit_compile: JitCompile
    on_nonfinite: OnNonfinite
    float8: Float8
    scan_layers: ScanLayers
    optimizer_state_dtype: StateDtype
    stochastic_rounding: bool
    shard_optimizer: ShardOptimizer
    max_programs: int | Literal["auto"]
    own_loss_reduction: Reduction

    def __init__(
        self,
        model: arguments.KerasModel,
        optimizer: arguments.KerasOptimizer | str | None = None,
        loss: arguments.LossArgument = None,
        metrics: arguments.MetricsArgument = (),
        *,
        loss_weights: arguments.WeightsArgument = None,
        weighted_metrics: arguments.MetricsArgument = (),
        gradient_accumulation_steps: int = 1,
        loss_scale: loss_scales.LossScale | float | Literal["auto"] | None = "auto",
        clip_norm: float | None = None,
        fp32_weight_gradients: bool = True,
        flash_attention: FlashAttention = "auto",
        jit_compile: JitCompile = "auto",
        steps_per_execution: int = 1,
        on_nonfinite: OnNonfinite = "skip",
        float8: Float8 = False,
        scan_layers: ScanLayers = "auto",
        optimizer_state_dtype: StateDtype = "float32",
        stochastic_rounding: bool = True,
        shard_optimizer: ShardOptimizer = "auto",
        max_programs: int | Literal["auto"] = "auto",
        own_loss_reduction: Reduction = "mean",
        compile_cache: str | os.PathLike[str] | None = None,
    ):
        values = dict(locals())  # of the arguments, by name
        if compile_cache is not None:
            compile_caches.require(compile_cache)
        self.model = model
        self._setup = TrainingSetup.build(
            model,
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            weighted_metrics=weighted_metrics,
        )
        self._model = self._setup.model
        self._optimizer = self._setup.optimizer
        self._replicas = self._setup.replicas

        values["loss_scale"] = loss_scales.get(loss_scale, self._model.compute_dtype)
        self._options = Options(**{name: values[name] for name in Options.names()})
        self._setup.require_replicas(self._options)
        vars(self).update(vars(self._options))
        self._builder = StepBuilder(self._setup)
        self._step_inputs = TrainStepInputs(self._builder, lambda: self._present_options)
        if self._options.jit_compile is True:
            compilable.require(self._model)

    def __setattr__(self, name: str, value: Any) -> None:
        is_made = "_options" in vars(self)  # false within __init__, also that of a subclass
        if is_made and name in Options.names():
            if name == "loss_scale":
                value = loss_scales.get(value, self._model.compute_dtype)
            is_built = self._builder.engine is not None
            self._options = self._options.replace(name, value, built=is_built)
            value = getattr(self._options, name)
        elif is_made and name in _FIXED and type(self) is Trainer:
            raise AttributeError(
                f"{name} cannot be set, and training would not read it: make a new Trainer with it."
            )
        elif not name.startswith("_") and not hasattr(self, name):
            close_names = get_close_matches(name, Options.names(), n=1, cutoff=0.8)
            if close_names:
                raise AttributeError(
                    f"Trainer has no attribute {name!r}: did you mean {close_names[0]}?",
                    name=name,
                    obj=self,
                )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "A Trainer holds compiled programs and cannot be copied: copy its model, and make a "
            "new one."
        )

    def __repr__(self) -> str:
        scale = ""
        if not isinstance(self.loss_scale, loss_scales.NoLossScale):
            scale = f", loss_scale={self.loss_scale}"
        dtype = self.optimizer_state_dtype
        state = "" if dtype == "float32" else f", optimizer_state_dtype={dtype}"
        return (
            f"Trainer({type(self.model).__name__} {self.model.name!r}, "
            f"optimizer={type(self.optimizer).__name__}, "
            f"gradient_accumulation_steps={self.gradient_accumulation_steps}, "
            f"precision={self._model.compute_dtype}{state}{scale})"
        )

    @property
    def optimizer(self) -> arguments.KerasOptimizer:
        """The optimizer object that trains the model."""
        return self._optimizer.optimizer

    @property
    def throughput(self) -> Throughput | None:
        """The speed of the last epoch of `fit`, without the time to compile and to validate.

        Its `steps_per_second` times the `flops` of `summary`, divided by a device's peak, is the
        MFU. Callbacks find an epoch's speed in `on_epoch_end`. None if each call of the epoch
        compiled a program, as a single update does.

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = Trainer(model, "sgd", "mse", gradient_accumulation_steps=4)
        >>> x = keras.ops.ones((100, 2))
        >>> history = trainer.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
        >>> trainer.throughput.steps, trainer.throughput.rows
        (4, 100)
        """
        return self._builder.throughput

    @workers.abort_peers_on_error
    def fit(
        self,
        x: arguments.Data | None = None,
        y: arguments.Arrays | None = None,
        batch_size: int | Literal["auto"] | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: arguments.CallbacksArgument = None,
        validation_split: float = 0.0,
        validation_data: arguments.Data | None = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: arguments.Arrays | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        global_batch_size: int | None = None,
        resume: Collection[str] | str = (),
    ) -> keras.callbacks.History:
        """Trains for `epochs` passes, with the arguments and callbacks of Keras's `fit`.

        These things differ from Keras:

        - `batch_size` is that of a micro-batch.
        - `steps_per_epoch` and the batch numbers that callbacks see count train steps, that is,
          updates.
        - `class_weight` and `sample_weight` are multiplied if both are given.
        - The logs also have `grad_norm` and `loss_scale`, of the last step, and `skipped_steps`,
          the steps of the epoch so far that changed nothing because a value was not finite.
        - The logs that batch callbacks get are a mapping, which waits for the step only when it is
          read.

        As in Keras, `keras.utils.set_random_seed` determines the order of shuffled rows, and data
        that ends before `steps_per_epoch` ends the epoch with a warning. A KerasHub task that has a
        preprocessor gets its raw inputs, in order, as in its own `fit`.

        With `checkpoint_dir`, `fit` saves the state of the training there. The same call, made
        again, continues from the last good checkpoint, with the same results, bit for bit, as if it
        had never stopped (docs/reliability.md). It may split the same update into other pieces, by
        another `batch_size`, accumulation or number of devices; the results are then equal to
        float32 rounding. If the training was complete, it returns the `History` at once. SIGTERM
        saves, then raises `fastaccum.Preempted`, which ends the process with code 143. Data from
        Python code (generators, `keras.utils.PyDataset`, `tf.py_function`) is read again from the
        start of the epoch and must be the same.

        Args:
            checkpoint_dir: a folder for the checkpoints of this training alone. If it holds some,
                the last good one determines where training continues, and `initial_epoch` is
                ignored.
            checkpoint_every: the number of train steps between two checkpoints. None for one after
                every epoch.
            keep: how many checkpoints are kept, the newest ones.
            global_batch_size: rows of an update, with `batch_size="auto"`. The micro-batch is then
                the largest that fits the device, as `fastaccum.plan` finds it, and
                `gradient_accumulation_steps` is set accordingly. The result is the same, bit for
                bit, as with that `batch_size`. Batches of a `tf.data.Dataset` are cut anew.
            resume: names of the optimizer's settings that are taken as they are now, where the
                checkpoint has others: "learning_rate" (a number, a schedule, or what callbacks
                set), "weight_decay" or another of its numbers. A schedule counts from the updates
                that are done. Without a name, a setting that differs is refused. A setting that is
                as it was saved keeps what training made of it, so a script may go on naming it.

        Returns:
            The `History`, which is also `model.history`. Its attribute `programs` has, for each
            kind of program that was compiled or traced so far, how many there are and the seconds
            of their first calls.

        Raises:
            TypeError, ValueError: raised before any weight moves if data does not fit, or if none
                of the checkpoints in `checkpoint_dir` is good, or they are of another model,
                optimizer, loss scale or batch plan, or their place cannot be found in other pieces;
                raised with no weight moved by them if labels or ids are out of range.
            NonFiniteError: raised if training can only skip its steps (see `on_nonfinite`).
            OutOfMemoryError: raised before any weight moves if a train step cannot fit the device,
                or where memory ran out, with the `batch_size` that fits.
            RuntimeError: raised if a checkpoint could not be written.
            Preempted: raised after SIGTERM, with the state saved.
        """
        schedule = Schedule(
            epochs,
            initial_epoch,
            steps_per_epoch,
            validation_steps,
            validation_batch_size,
            validation_freq,
        )
        saver = Saver(checkpoint_dir, checkpoint_every, keep, resume)
        class_weights = checks.class_weight(class_weight)
        setup = self._setup
        builder = self._builder
        options = self._present_options

        data, validation_data = split_validation(
            setup, options, (x, y, sample_weight), validation_split, validation_data
        )
        builder.fingerprint.require_alike(
            "fit",
            **dataclasses.asdict(schedule),
            class_weight=class_weights,
            checkpoint_dir=checkpoint_dir is not None,
            checkpoint_every=checkpoint_every,
            resume=sorted(saver.resumes_with),
            validation_data=validation_data is not None,
        )
        seed = draw_seed(shuffle, setup.replicas)
        micro_batch_size = check_batch_size(batch_size, global_batch_size)
        source = setup.make_source(
            *data,
            options,
            batch_size=micro_batch_size,
            shuffle=shuffle,
            seed=seed if shuffle else None,
            class_weight=class_weights,
        )
        if global_batch_size is not None:
            plan = plan_micro_batch(builder, options, source, global_batch_size, verbose)
            source.rebatch(plan.batch_size)
            micro_batch_size = plan.batch_size
            self.gradient_accumulation_steps = plan.accumulation_steps
            options = self._present_options

        sample = source.sample
        engine = builder.get_or_build(sample, options)
        engine.objective.losses.require_classes(class_weights)
        engine.count_tokens(sample.x)
        stacks = source.stacks(
            builder.training_layout(options),
            schedule.steps_per_epoch,
            schedule.epochs - schedule.initial_epoch,
        )
        evaluation = make_validation(
            builder, options, schedule, validation_data, micro_batch_size, sample
        )
        stacks.reset()

        callback_list = Callbacks(
            callbacks,
            self.model,
            verbose=verbose,
            epochs=schedule.epochs,
            steps=stacks.steps_per_epoch,
            history=True,
        )
        if engine.elsewhere:
            callback_list.require_none(
                "SwapEMAWeights",
                "which swaps averages on all replicas: pass shard_optimizer=False",
            )
        say_advice(callback_list, builder, engine, options, schedule, stacks)
        describe = functools.partial(
            describe_training,
            builder,
            options,
            engine,
            sample,
            stacks,
            callback_list,
            class_weights,
        )
        return train(
            builder,
            engine,
            stacks,
            callback_list,
            saver,
            schedule=schedule,
            evaluation=evaluation,
            describe=describe,
            verbose=verbose,
        )

    @workers.abort_peers_on_error
    def evaluate(
        self,
        x: arguments.Data | None = None,
        y: arguments.Arrays | None = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: arguments.Arrays | None = None,
        steps: int | None = None,
        callbacks: arguments.CallbacksArgument = None,
        return_dict: bool = False,
    ) -> float | list[float] | dict[str, float]:
        """Computes the loss and the metrics of all data, as Keras's `evaluate` does.

        The loss is that of all rows as one batch: the sum of the losses divided by the sum of the
        weights, not a mean of the batches' means. Weights and state stay as they are.

        Args:
            x: as `fit` takes it: arrays [rows, ...], a `tf.data.Dataset`, or another source.
            y: as `fit` takes it.
            batch_size: rows of a batch; None for 32. A dataset has its own.
            verbose: "auto", 0, 1 or 2, as in Keras.
            sample_weight: as `fit` takes it.
            steps: the number of batches to evaluate; None for all of them.
            callbacks: Keras's callbacks, whose hooks of tests are called with numbers of batches.
            return_dict: True for a dict of the loss and the metrics by name.

        Returns:
            The loss, a float. With metrics, a list of the loss and the metrics, in Keras's order.

        Raises:
            TypeError, ValueError: raised if the data does not fit the model, or labels or ids are
                out of range.
            OutOfMemoryError: raised if the batches do not fit the device.

        >>> dense = keras.layers.Dense(1, kernel_initializer="ones")
        >>> model = keras.Sequential([keras.Input((2,)), dense])
        >>> trainer = Trainer(model, "sgd", "mse", metrics=["mae"])
        >>> x = keras.ops.ones((5, 2))  # whose outputs are 2
        >>> trainer.evaluate(x, keras.ops.zeros((5, 1)), batch_size=4, verbose=0)
        [4.0, 2.0]
        >>> trainer.evaluate(x, keras.ops.zeros((5, 1)), verbose=0, return_dict=True)
        {'loss': 4.0, 'mae': 2.0}
        """
        self._builder.fingerprint.require_alike("evaluate", steps=steps)
        checks.true_or_false("return_dict", return_dict)
        options = self._present_options
        data = self._setup.make_source(
            x, y, sample_weight, options, batch_size=batch_size, steps="steps"
        )
        evaluation = Evaluation(self._builder, data, options, steps)
        hooks = Callbacks(
            callbacks,
            self.model,
            verbose=verbose,
            epochs=1,
            steps=evaluation.batches,
            history=False,
        )
        with reading(evaluation):
            logs = evaluation(hooks)
        if return_dict:
            return logs
        return evaluation.in_order(logs)

    @workers.abort_peers_on_error
    def predict(
        self,
        x: arguments.Data,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: arguments.CallbacksArgument = None,
    ) -> Any:
        """Computes the model's outputs for `x`, by the model's own `predict`.

        Args:
            x: the model's inputs: arrays [rows, ...], a `tf.data.Dataset` of batches, or another
                source that Keras's `predict` takes.
            batch_size: rows of a batch; None for 32. A dataset has its own.
            verbose: "auto", 0, 1 or 2, as in Keras.
            steps: the number of batches to predict; None for all of them.
            callbacks: Keras's callbacks, whose hooks of predictions are called.

        Returns:
            The outputs for all rows, NumPy arrays [rows, ...] of the dtypes that the model
            computes, in the structure of its outputs.

        Raises:
            TypeError, ValueError: raised if the model cannot be called with x, or if x holds no
                rows.

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = Trainer(model, "sgd", "mse")
        >>> outputs = trainer.predict(keras.ops.ones((5, 2)), verbose=0)
        >>> outputs.shape, str(outputs.dtype)
        ((5, 1), 'float32')
        """
        self._builder.fingerprint.require_alike("predict", steps=steps)
        return predict(
            self._model, x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks
        )

    @workers.abort_peers_on_error
    def train_step(self, stack: tuple[arguments.Arrays | None, ...]) -> StepResult:
        """Runs one train step, of as many micro-batches as the stack has.

        Args:
            stack: `(x, y)` or `(x, y, sample_weight)`, every tensor or array of
                [micro-batches, rows, ...].

        Returns:
            The step's figures, scalars on the device. Reading one of them waits for the step.

        Raises:
            ValueError: raised if axes do not match, or labels or ids are out of range. On a GPU,
                which is not waited for, the latter comes at the next call.
            NonFiniteError: raised if training can only skip its steps (see `on_nonfinite`). On a
                GPU it comes at the next call, too.

        >>> dense = keras.layers.Dense(1, kernel_initializer="ones")
        >>> model = keras.Sequential([keras.Input((2,)), dense])
        >>> trainer = Trainer(model, "sgd", "mse")
        >>> x = keras.ops.ones((4, 8, 2))  # 4 micro-batches of 8 rows, whose outputs are 2
        >>> result = trainer.train_step((x, keras.ops.zeros((4, 8, 1))))
        >>> float(result.loss), float(result.weight)
        (4.0, 32.0)
        """
        return self._step_inputs.run(stack)

    @workers.abort_peers_on_error
    def summary(
        self,
        x: arguments.Data | None = None,
        y: arguments.Arrays | None = None,
        batch_size: int | None = None,
        sample_weight: arguments.Arrays | None = None,
        verbose: bool = True,
    ) -> Summary:
        """Prints a train step's parameters, FLOPs, memory by kind and compiled programs.

        The step is compiled where that was not done yet; nothing is run.

        Args:
            x: as `fit` takes it; only shapes and dtypes are read. None for the data that the
                trainer has seen first.
            y: as `fit` takes it.
            batch_size: rows of a micro-batch, as in `fit`; a dataset's, too, whose batches may
                differ.
            sample_weight: as `fit` takes it.
            verbose: False prints nothing.

        Returns:
            The figures: `flops`, `memory` and the others of the table, which is its `str`. Under
            tf.distribute they are those of one replica.

        Raises:
            TypeError: raised if x is an iterator, which could not be read again.
            ValueError: raised if there is no x and the trainer has seen none, if a dataset comes
                without batch_size, or if there is no XLA program.

        >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(10)])
        >>> trainer = Trainer(model, "sgd", "mse", gradient_accumulation_steps=4)
        >>> x, y = keras.ops.ones((64, 100)), keras.ops.ones((64, 10))
        >>> summary = trainer.summary(x, y, batch_size=16, verbose=False)
        >>> summary.trainable_parameters, summary.memory.by_kind["weights"]
        (1010, 4040)
        """
        summary = summarize(self._builder, self._present_options, x, y, sample_weight, batch_size)
        if checks.true_or_false("verbose", verbose):
            print(summary)
        return summary

    def compiler_ir(
        self, stack: tuple[arguments.Arrays | None, ...], stage: ir.Stage = "optimized_hlo"
    ) -> str | bytes:
        """Returns the train step as XLA compiles it for a stack of this shape; nothing is run.

        Args:
            stack: as `train_step` takes it. Only shapes and dtypes are read.
            stage: how far the program is compiled: "stablehlo" or "hlo" is the program as it was
                traced, "optimized_hlo" what XLA runs. "hlo_no_metadata" leaves the operations'
                names out, and "optimized_hlo_dot" is a graph for Graphviz. Those that end with
                "_serialized" are protocol buffers: "stablehlo_serialized", "hlo_serialized",
                "optimized_hlo_serialized", and "optimized_hlo_proto_serialized" with the plan of
                the memory.

        Returns:
            The program as text; as bytes if it is serialized.

        Raises:
            ValueError: raised without XLA, for another stage, if the stack does not fit the model,
                or under tf.distribute, where a step is several programs.

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = Trainer(model, "sgd", "mse", jit_compile=True)
        >>> stack = keras.ops.ones((4, 8, 2)), keras.ops.zeros((4, 8, 1))
        >>> "known_trip_count" in trainer.compiler_ir(stack)  # the loop over micro-batches
        True
        """
        return ir.compiler_ir(*self._step_inputs.program(stack), stage=stage)

    def memory_analysis(self, stack: tuple[arguments.Arrays | None, ...]) -> ir.MemoryAnalysis:
        """Returns XLA's memory plan of the train step for a stack of this shape; nothing is run.

        Args:
            stack: as `train_step` takes it. Only shapes and dtypes are read.

        Returns:
            Bytes: `argument_bytes`, `output_bytes`, `alias_bytes`, `temp_bytes` and `peak_bytes`.

        Raises:
            ValueError: raised as by `compiler_ir`.

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = Trainer(model, "sgd", "mse", jit_compile=True)
        >>> stack = keras.ops.ones((4, 8, 2)), keras.ops.zeros((4, 8, 1))
        >>> plan = trainer.memory_analysis(stack)
        >>> plan.argument_bytes >= 4 * 8 * 3 * 4  # the stack alone
        True
        """
        return ir.memory_analysis(*self._step_inputs.program(stack))

    def _plan(self, sample: arguments.Data, **limits: Any) -> Plan:
        return plan_for_data(self._builder, self._present_options, sample, **limits)

    @property
    def _present_options(self) -> Options:
        """Returns the options as the attributes are now, which a subclass may define."""
        return Options(**{name: getattr(self, name) for name in Options.names()})

    @property
    def _engine(self) -> Engine | None:
        return self._builder.engine
