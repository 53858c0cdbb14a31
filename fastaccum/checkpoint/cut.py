"""How an update's rows are cut into pieces, which a resumed training may do otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from fastaccum.fingerprint.values import Json


def other_product(saved: Json, now: Mapping[str, int], wanted: int | None) -> str:
    """Returns what to say of an update with another number of rows of arrays than `wanted`.

    Returns "" where the number is right.
    """
    size = now.get("batch_size")
    steps = now["gradient_accumulation_steps"]
    if wanted is None or size is None:
        return ""

    if wanted % size == 0:
        fitting_size = size
        fitting_steps = wanted // size
    elif wanted % steps == 0:
        fitting_size = wanted // steps
        fitting_steps = steps
    else:
        fitting_size = wanted
        fitting_steps = 1
    before = f"{saved['batch_size']} x {saved['gradient_accumulation_steps']}"
    return (
        f"batch_size * gradient_accumulation_steps must be {wanted}, as saved ({before}), and is "
        f"{size} x {steps}: batch_size={fitting_size} with "
        f"gradient_accumulation_steps={fitting_steps} would do"
    )


def other_pieces(saved: Json, now: Mapping[str, int]) -> str:
    """Returns how two cuts differ, as "batch_size 8 x 4 instead of 16 x 2"."""
    values_then: Json = {name: saved[name] for name in now}
    values_now: Json = dict(now)

    size_then = values_then["batch_size"]
    size_now = values_now["batch_size"]
    steps_then = values_then["gradient_accumulation_steps"]
    steps_now = values_now["gradient_accumulation_steps"]
    have_sizes = size_then is not None and size_now is not None
    if have_sizes and (size_now != size_then or steps_now != steps_then):
        values_then["batch_size"] = f"{size_then} x {steps_then}"
        values_now["batch_size"] = f"{size_now} x {steps_now}"
        del values_now["gradient_accumulation_steps"]  # it is in the product

    lines = []
    for name, value in values_now.items():
        if value != values_then[name]:
            lines.append(f"{name} {value} instead of {values_then[name]}")
    return ", ".join(lines)
