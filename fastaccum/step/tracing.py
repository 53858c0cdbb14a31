"""Traces functions: by XLA's rules for random keys, in graphs that can be freed, and by Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction, PolymorphicFunction

from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.kernels.random_keys import hoist_prng_key


class TracedFunction:
    """A `tf.function`, the attribute `function`, that can be retraced, with or without XLA."""

    function: PolymorphicFunction

    def __init__(self, function: Callable[..., object], jit_compile: bool):
        self._drawing = hoist_prng_key()(function)
        self.jit_compile = jit_compile
        TracedFunction.retrace(self)

    def trace(self, *args: object) -> ConcreteFunction:
        """Returns the concrete function for nests of tensors or specs; traces it if need be."""
        with _interruptible(), graph_scoped_gradients(), without_collection():
            eagerly = tf.config.functions_run_eagerly()
            tf.config.run_functions_eagerly(False)  # a trace calls nothing eagerly
            try:
                return self.function.get_concrete_function(*args)
            finally:
                tf.config.run_functions_eagerly(eagerly)

    def retrace(self) -> None:
        """Lets go of what was traced: each kind of call traces and compiles the function anew."""
        self.function = tf.function(self._drawing, jit_compile=self.jit_compile, autograph=False)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Turns the garbage collector off inside the block: a trace makes many objects that stay."""
    with contextlib.ExitStack() as undone:
        if gc.isenabled():
            undone.callback(gc.enable)
        gc.disable()
        yield


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end a trace.

    The C++ of a trace drops a KeyboardInterrupt, or makes an error of another kind of it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    interrupts = []

    def note(*args: Any) -> None:
        try:
            before(*args)
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
            raise

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)
        if interrupts:
            raise KeyboardInterrupt


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a function by AutoGraph, inline.

    A nested tf.function would hide the function's operations.
    """
    enabled = private.ag_ctx.ControlStatusCtx(private.ag_ctx.Status.ENABLED)
    return private.autograph.convert(recursive=True, conversion_ctx=enabled)(function)
