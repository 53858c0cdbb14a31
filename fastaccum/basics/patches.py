"""Process-wide patches of other packages: why each is needed, how it ends, and what it needs.

A patch replaces an attribute of a class or a module, which the whole process shares. All patches
stand here, but those of `fastaccum.addons`: a process has these only if it imports that module,
whose one purpose they are. Nothing is imported here, since `import fastaccum` needs no TensorFlow:
each function gets what it patches.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

# An attribute of an optimizer: True if Keras skipped its state in a file, as one of other weights.
SKIPPED = "fastaccum_skipped"


def mark_skipped_state(optimizers: ModuleType) -> None:
    """Makes `keras.optimizers.Optimizer.load_own_variables` mark the optimizer as `SKIPPED` or not.

    Reason: Keras only warns as it loads a model, and a Trainer that is made later has to know that
    the optimizer starts without its state.
    End: none. The method does what Keras's does.
    Without the method, in another release of Keras: no optimizer is marked or warned of.
    """
    load = getattr(optimizers.Optimizer, "load_own_variables", None)
    if load is None:
        return

    @functools.wraps(load)
    def load_own_variables(optimizer: Any, store: Any) -> None:
        vars(optimizer)[SKIPPED] = len(store.keys()) != len(optimizer.variables)
        load(optimizer, store)

    optimizers.Optimizer.load_own_variables = load_own_variables


def replace_attention(nn: Any, find_formula: Callable[[], Callable[..., Any] | None]) -> Any:
    """Makes `dot_product_attention` of Keras's backend call what `find_formula` returns, if any.

    It returns Keras's own formula, which is called where `find_formula` returns None.

    Reason: all layers of Keras and KerasHub end in this function, also those that hold
    `keras.ops.dot_product_attention` itself, where no layer's method could be replaced.
    End: none. Outside of a trace with fused attention, `find_formula` returns None.
    Without the module, in another release of Keras: the caller makes no patch, layers take their
    own formula, and a warning says so.
    """
    unfused = nn.dot_product_attention
    signature = inspect.signature(unfused)

    @functools.wraps(unfused)
    def dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        formula = find_formula() or unfused
        arguments = signature.bind(*args, **kwargs).arguments
        return formula(**arguments)

    nn.dot_product_attention = dot_product_attention
    return unfused


@contextlib.contextmanager
def variable_values(
    variable_class: type, name: str, read: Callable[[Any], Any], write: Callable[[Any, Any], None]
) -> Iterator[None]:
    """Reads and writes the attribute `name` of all Keras variables by functions inside the block.

    Reason: a model's layers read their variables themselves, and one program for each device has
    to be traced, so that each variable stands for its component on one device.
    End: that of the block. The values of variables, which their own dicts hold, are as before.
    Without the attribute, in another release of Keras: `read` raises a KeyError, so that training
    on several devices fails as it is traced.
    """
    setattr(variable_class, name, property(read, write))
    try:
        yield
    finally:
        delattr(variable_class, name)
