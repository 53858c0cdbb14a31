"""`fastaccum.plan`: the micro-batch with which an update fits the device."""

from __future__ import annotations

from typing import Literal

from fastaccum.basics import arguments
from fastaccum.distribute import workers
from fastaccum.memory.plan import Plan
from fastaccum.trainer import Trainer
from fastaccum.training.fit import Verbose

_plan = workers.abort_peers_on_error(Trainer._plan)


def plan(
    trainer: Trainer,
    sample: arguments.Data,
    *,
    global_batch_size: int,
    memory_limit: int | str | None = None,
    recompute: Literal["auto"] | None = None,
    verbose: Verbose = "auto",
) -> Plan:
    """Finds the micro-batch with which an update of `global_batch_size` rows fits the device.

    It compiles the train step for about five micro-batches at most, and reads XLA's plan of the
    memory of each. No data is made, no program is kept, and trainer and model stay as they are.
    `fit(..., batch_size="auto", global_batch_size=N)` does the same with its own data.

    The micro-batch divides the global batch, and is a multiple of the number of devices. It is the
    largest that fits. Worker processes agree on one that fits all of them.

    Args:
        trainer: a `Trainer`, trained or not.
        sample: data as `fit` takes it: `(x, y)`, `(x, y, sample_weight)`, or a `tf.data.Dataset` of
            batches. Only the shapes of its rows are read.
        global_batch_size: rows of an update.
        memory_limit: bytes of each device, or a string such as "16GiB". By default the environment
            variable FASTACCUM_MEMORY_LIMIT, or else what is free on the device, less a twentieth.
        recompute: "auto" to look for a policy of `fastaccum.remat` if no micro-batch fits, the one
            that computes least again first. The model stays as it is: pass it to `fastaccum.remat`
            with that policy.
        verbose: 0 for no messages on stderr about what is being compiled.

    Returns:
        A `Plan`. To train with it, set `trainer.gradient_accumulation_steps =
        plan.accumulation_steps` and pass `batch_size=plan.batch_size` to `fit`.

    Raises:
        OutOfMemoryError: raised if no micro-batch fits: what the smallest needs, and for what.
        TypeError, ValueError: raised if the sample does not fit the model, if the replicas do not
            divide the global batch, or without XLA.

    >>> import keras
    >>> import numpy as np
    >>> hidden = keras.layers.Dense(64, "relu")
    >>> model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
    >>> trainer = Trainer(model, "sgd", "mse")
    >>> sample = np.zeros((1, 8)), np.zeros((1, 1))
    >>> chosen = plan(trainer, sample, global_batch_size=4, memory_limit="1GiB")
    >>> chosen.batch_size, chosen.accumulation_steps
    (4, 1)
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"trainer={trainer!r} is not a fastaccum.Trainer: pass fastaccum.Trainer(model, ...)."
        )
    return _plan(
        trainer,
        sample,
        global_batch_size=global_batch_size,
        memory_limit=memory_limit,
        recompute=recompute,
        verbose=verbose,
    )
