"""Warns of programs that are compiled for many shapes, and says what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastaccum.basics.warnings import warn
from fastaccum.step.signatures import Signature

Shape = tuple[int, ...]

# Shapes that a warning lists; of more it lists the first ones and the last.
SHAPES_SHOWN = 4

_FEWER_SIZES = "Make batches of a few sizes, such as by dataset.unbatch().batch(batch_size)."
_FEWER_LENGTHS = (
    "Where the model leaves padding out, as by a mask, pad to a few lengths: "
    "dataset.padded_batch(batch_size, padded_shapes), or dataset.bucket_by_sequence_length(..., "
    "pad_to_bucket_boundary=True) with batches that fill an update each. "
    "Trainer(max_programs=...) is how many lengths fastaccum pads to by itself "
    "(docs/guides/varying-batches.md)."
)


class Retraces:
    """Warns of a program that is compiled for `many` shapes.

    Programs that share the object are warned of once, all together.
    """

    def __init__(self, many: int = 32) -> None:
        self._many = many
        self._warned = False

    def note(self, seconds: Mapping[Signature, float], axes: Sequence[str]) -> None:
        """Counts a program's signatures, of which the last one is new.

        `seconds` has what the first call with each of them took, `axes` the names of the first axes
        of their tensors.
        """
        newest = list(seconds)[-1]
        programs = []  # the shapes of each one's tensors
        for signature in seconds:
            if signature.structure == newest.structure:
                programs.append(signature.shapes)
        if self._warned or len(programs) < self._many:
            return
        self._warned = True

        shapes = _most_varied(programs)
        names = []
        only_rows_differ = True
        for axis, lengths in enumerate(zip(*shapes, strict=False)):
            if len(set(lengths)) == 1:
                continue
            if axis < len(axes):
                names.append(axes[axis])
            else:
                names.append("lengths")
                only_rows_differ = False

        shown = [str(shape) for shape in shapes]
        if len(shown) > SHAPES_SHOWN:
            shown = [*shown[: SHAPES_SHOWN - 1], "...", shown[-1]]
        remedy = _FEWER_LENGTHS
        if only_rows_differ:
            remedy = _FEWER_SIZES
        warn(
            f"{len(programs)} programs were made so far, one for each kind of stack, which took "
            f"{sum(seconds.values()):.0f} s; all stay in memory. What differs: "
            f"{', '.join(dict.fromkeys(names))}. One tensor came in {len(shapes)} shapes, "
            f"[{', '.join(axes)}, ...]: {', '.join(shown)}. {remedy}"
        )


def _most_varied(programs: Sequence[Sequence[Shape]]) -> list[Shape]:
    """Returns the shapes of the tensor that came in the most, in the order in which they came."""
    most: list[Shape] = []
    for shapes_of_one in zip(*programs, strict=False):
        distinct = list(dict.fromkeys(shapes_of_one))
        if len(distinct) > len(most):
            most = distinct
    return most
