"""`Trainer.summary`: the sample that it is of, and its step."""

from __future__ import annotations

from fastaccum import checks
from fastaccum.adapters.data_adapters import is_read_once
from fastaccum.memory.analysis import specs
from fastaccum.memory.summary import Summary, summary
from fastaccum.step import compilable
from fastaccum.step.options import Options
from fastaccum.training.step_builder import StepBuilder


def summarize(
    builder: StepBuilder, options: Options, x: object, y: object, sample_weight: object, batch_size: int | None
) -> Summary:
    """Compiles the step for data as `fit` takes them, or for the data seen first where x is None; runs nothing."""
    if is_read_once(x):
        raise TypeError(f"x is a {type(x).__name__}, which would lose what is read of it: pass one of its batches.")
    sample = builder.sample
    if x is not None:
        sample = builder.recipe.make_source(x, y, sample_weight, options, batch_size=None).sample
    if sample is None:
        raise ValueError("x=None, and this Trainer has seen no data yet: pass x and y as for fit.")
    if batch_size is not None:
        sample = specs(sample, checks.whole_number("batch_size", batch_size))
    if options.jit_compile is False:
        raise ValueError("jit_compile=False: there is no XLA program to summarize. Pass jit_compile='auto'.")
    compilable.require(builder.recipe.model, "do without a summary, whose figures are those of an XLA program")
    step = builder.get_or_build(sample, options)
    with step.translate_errors():
        return summary(step, sample, builder.training_layout(options))
