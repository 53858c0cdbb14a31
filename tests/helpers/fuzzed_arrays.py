"""Arrays that random calls name: right ones, and ones of other shapes, dtypes and kinds."""

import numpy as np
import tensorflow as tf
from random_calls import NAMES, Values, without

WRONG_DTYPES = ("int32", "complex64", "bool", "object", "str", "M8[s]", "longdouble", "uint8", "S3")


def array(*shape, dtype="float32", seed=0, high=5):
    """Draws normal numbers, or whole ones below `high`, as the dtype has them."""
    rng = np.random.default_rng((seed, *shape))
    values = rng.normal(size=shape)
    if dtype == "bfloat16":
        return np.asarray(values, tf.bfloat16.as_numpy_dtype)
    if np.issubdtype(np.dtype(dtype), np.integer):
        values = rng.integers(0, high, shape)
    return np.asarray(values).astype(dtype)


def spoiled(values, *first):
    """Returns a copy with these values in the first places."""
    values = np.array(values)
    values.reshape(-1)[: len(first)] = first[: values.size]
    return values


def masked(values):
    return np.ma.masked_array(values, np.arange(np.size(values)).reshape(np.shape(values)) == 0)


def from_a_graph(values):
    """Returns a tensor of a graph that has been left."""
    left = []
    tf.function(lambda t: left.append(t + 0), autograph=False).get_concrete_function(
        tf.constant(values)
    )
    return left[0]


NAMES |= {"array": array, "spoiled": spoiled, "masked": masked, "from_a_graph": from_a_graph}


def code_of_array(shape, dtype="float32", seed=0, **more):
    named = {"dtype": dtype, "seed": seed, **more}
    return f"array({', '.join([*map(str, shape), *(f'{k}={v!r}' for k, v in named.items())])})"


def tensor(shape, dtype, seed, *, integral=False, **more):
    """Values for a tensor: forms of a right one, and tensors of other shapes, dtypes and kinds."""
    right = code_of_array(shape, dtype, seed, **more)
    plain = code_of_array(shape, "float32", seed)
    forms = [
        f"tf.constant({right})",
        right,
        f"np.array({right}, order='F')",
        f"tf.Variable({right})",
    ]
    if dtype in ("float32", "int32"):
        forms.append(f"keras.Variable({right}, dtype={dtype!r})")
        if 0 not in shape:
            forms.append(f"{right}.tolist()")
    shapes = [[*shape, 1], [1, *shape], []]
    if shape:
        shapes += [shape[1:], shape[:-1], *([n, *shape[1:]] for n in (0, 1, 7))]
        shapes += [[*shape[:-1], n] for n in (0, 2, 7)]
    odd = [f"tf.constant({code_of_array(s, dtype, seed, **more)})" for s in shapes if s != shape]
    odd += [f"{plain}.astype({d!r})" for d in WRONG_DTYPES if d != dtype and not integral]
    for other in ("float64", "float32", "float16", "bfloat16", "int64"):
        odd.append(f"tf.constant({code_of_array(shape, other, seed)})")
    odd += [f"{right}.astype({'>i4' if integral else '>f4'!r})", f"keras.KerasTensor({shape})"]
    odd += [f"tf.TensorSpec({shape})", f"keras.Input({tuple(shape)[1:]})"]
    if shape:
        odd += [f"masked({right})", f"from_a_graph({right})"]
        odd.append(f"tf.IndexedSlices({right}, tf.range({shape[0]}), {shape})")
    if len(shape) > 1 and dtype != "bfloat16":
        odd += [f"tf.sparse.from_dense({right})", f"tf.RaggedTensor.from_tensor({right})"]
    if not integral:
        odd += [f"tf.constant(spoiled({right}, {v}))" for v in ("nan", "inf", "-inf", "nan, inf")]
    return Values(forms, odd=[*odd, *without("None")])
