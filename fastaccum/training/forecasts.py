"""Figures of a step before it runs: a micro-batch that fits, and `Trainer.summary`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras

from fastaccum import checks
from fastaccum.adapters.data_adapters import is_read_once, wrap_sequence
from fastaccum.data.stacks import Batch
from fastaccum.layers import remat
from fastaccum.memory import planner
from fastaccum.memory.analysis import specs
from fastaccum.memory.plan import Plan, Policy
from fastaccum.memory.summary import Summary, summary
from fastaccum.step import compilable
from fastaccum.step.options import Options
from fastaccum.training.step_builder import StepBuilder


def make_plan(
    builder: StepBuilder,
    options: Options,
    sample: Batch,
    *,
    global_batch_size: int,
    at_most: int | None = None,
    memory_limit: int | str | None = None,
    recompute: Literal["auto"] | None = None,
    verbose: Literal["auto", 0, 1, 2] = "auto",
    bound_suffices: bool = False,
) -> Plan:
    """Plans the micro-batch for data like a sample; the arguments are those of `fastaccum.plan`.

    Args:
        builder: builds the step that is compiled for the plan.
        options: the options of the step.
        sample: specs of a micro-batch.
        global_batch_size: as for `fastaccum.plan`.
        at_most: the most rows of a micro-batch; None for any number.
        memory_limit: as for `fastaccum.plan`.
        recompute: as for `fastaccum.plan`.
        verbose: as for `fastaccum.plan`.
        bound_suffices: skips the compilation if, on a CPU, an upper bound of the step's memory is
            within the limit. The plan then shows this bound.
    """
    builder.fingerprint.require_alike(
        "plan",
        global_batch_size=global_batch_size,
        memory_limit=memory_limit,
        recompute=recompute,
        verbose=verbose,
        at_most=at_most,
    )
    if recompute is not None:
        checks.one_of("recompute", recompute, ("auto",))
    if options.jit_compile is False:
        raise ValueError(
            "jit_compile=False: the memory of a step is read off XLA's plan, and without XLA "
            "there is none. Make the Trainer with jit_compile='auto', or pass a batch_size."
        )
    # The end of the errors for what XLA cannot compile.
    instead = "pass a batch_size: what fits is read off an XLA program"
    compilable.require(builder.setup.model, instead)

    all_rows = checks.whole_number("global_batch_size", global_batch_size)
    replicas = builder.setup.replicas
    replica_count = 1 if replicas is None else replicas.count
    sizes = planner.candidates(all_rows, replica_count, at_most)
    largest_size = sizes[-1]
    engine = builder.get_or_build(specs(sample, largest_size), options)
    compilable.require_no_python(builder.calling_python, instead)

    policies: Sequence[Policy] = (None,)  # no recomputation but the model's own
    # A model on which the user called `fa.remat` keeps the policy that it was given.
    if recompute and not remat.installed(engine.objective.model.model):
        policies = planner.RECOMPUTED
    search = planner.Planner(
        engine,
        sample,
        all_rows,
        replicas=replicas,
        dispatched=options.steps_per_execution,
        verbose=verbose,
        bound_suffices=bound_suffices,
    )
    with engine.translate_errors():
        return search.plan(sizes, memory_limit, policies)


def plan_for_data(builder: StepBuilder, options: Options, data: Any, **limits: Any) -> Plan:
    """Plans the micro-batch for data as `fit` takes them.

    `limits` are the other arguments of `fastaccum.plan`.
    """
    if hasattr(data, "__next__") or isinstance(wrap_sequence(data), keras.utils.PyDataset):
        raise TypeError(f"sample is a {type(data).__name__}: pass one of its batches, as a tuple.")
    with checks.naming("sample"):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    source = builder.setup.make_source(x, y, sample_weight, options, batch_size=None, what="sample")
    return make_plan(builder, options, source.sample, **limits)


def summarize(
    builder: StepBuilder,
    options: Options,
    x: object,
    y: object,
    sample_weight: object,
    batch_size: int | None,
) -> Summary:
    """Summarizes the step for data as `fit` takes them, or for the data seen first if x is None.

    The step is compiled; nothing is run.
    """
    if is_read_once(x):
        raise TypeError(
            f"x is a {type(x).__name__}, and reading a batch from it would lose that batch: pass "
            "one of its batches."
        )
    sample = builder.sample
    if x is not None:
        sample = builder.setup.make_source(x, y, sample_weight, options, batch_size=None).sample
    if sample is None:
        raise ValueError("x=None, and this Trainer has seen no data yet: pass x and y as for fit.")
    if batch_size is not None:
        sample = specs(sample, checks.whole_number("batch_size", batch_size))
    if options.jit_compile is False:
        raise ValueError(
            "jit_compile=False: there is no XLA program to summarize. Pass jit_compile='auto'."
        )
    # The end of the errors for what XLA cannot compile.
    instead = "do without a summary, whose figures are those of an XLA program"
    compilable.require(builder.setup.model, instead)
    engine = builder.get_or_build(sample, options)
    compilable.require_no_python(builder.calling_python, instead)
    with engine.translate_errors():
        return summary(engine, sample, builder.training_layout(options))
