"""Rewrites the measured tables of README.md and of the documentation from a run."""

import pathlib
import re

from benchmarks.support.scores import number

ROOT = pathlib.Path(__file__).parents[2]
WORKLOADS = (
    "MLP 128",
    "MLP 2048",
    "GPT",
    "GPT 32k",
    "ConvNet",
    "Conv1D",
    "ResNet20",
    "MobileNet",
    "U-Net",
    "Keras GPT",
    "KerasHub GPT-2",
)

# The measure, and what the tables call it. README.md has those against others, docs/performance.md
# what ours costs.
AGAINST_OTHERS = {
    "fit: Keras GA default / ours": "`fit`: Keras 3's accumulation, its defaults / ours",
    "fit: Keras GA best tuned / ours": "`fit`: Keras 3's accumulation, tuned / ours",
    "fit: Keras GA best tuned / ours tuned": (
        "`fit`: Keras 3's accumulation, tuned / ours with 10 steps per execution"
    ),
    "fit: Keras on JAX / ours": (
        "`fit`: Keras 3's accumulation on its JAX backend, its defaults / ours"
    ),
    "first epoch, cold: Keras GA default / ours": (
        "first epoch of a process: Keras 3's accumulation, its defaults / ours"
    ),
    "first epoch, cold: Keras on JAX / ours": (
        "first epoch of a process: Keras 3's accumulation on its JAX backend, its defaults / ours"
    ),
    "fit: gradient-accumulator / ours": "`fit`: tf-keras with `gradient-accumulator` / ours",
    "fit with Dropout: Keras GA, jit / ours": (
        "`fit` with Dropout: Keras 3's accumulation, with XLA / ours"
    ),
    "fit with Dropout: Keras GA, no jit / ours": (
        "`fit` with Dropout: Keras 3's accumulation, without XLA / ours"
    ),
    "train step: eager loop / ours": "train step: hand-written eager loop / ours",
    "train step: tf.function loop / ours": "train step: hand-written `tf.function` loop / ours",
    "train step: full batch XLA / ours": "train step: one XLA step on the full batch / ours",
    "train step: JAX scan / ours": "train step: JAX, `lax.scan` / ours",
    "train step: JAX optax.MultiSteps / ours": "train step: JAX, `optax.MultiSteps` / ours",
    "train step: PyTorch eager / ours": "train step: PyTorch / ours",
    "train step: torch.compile / ours": "train step: PyTorch, `torch.compile` / ours",
    "train step: addons LAMB loop / ours": "train step with LAMB: tensorflow-addons' loop / ours",
}
COST = {
    "fit / bare train step": "`fit` / the train step alone",
    "fit: with Dropout / without": "`fit` with Dropout / without",
    "time per example: 64 micro-batches / 1": "time of the same rows, in 64 micro-batches / in 1",
    "steps per execution: 1 / 32": "`fit`, `steps_per_execution=1` / `=32`",
    "fraction of the matmul rate": "arithmetic done a second / in matrix products alone",
    "temp memory: 64 micro-batches / 2": "working memory, with 64 micro-batches / with 2",
    "temp memory beyond a plain micro-step, bytes per parameter": "working memory beyond one "
    "micro-batch without accumulation, bytes per parameter",
}
KERNELS = (
    "linear_cross_entropy: temp memory / unfused",
    "linear_cross_entropy: time / unfused",
    "attention: temp memory, 8,192 tokens / 2,048",
    "attention: time / unfused",
    "LayerStack: temp memory / unrolled",
    "LayerStack: step / unrolled without recomputation",
    "LayerStack: first step, depth 48 / 4",
    "weight-gradient error: fp32 / plain autodiff",
    "train step: fp32 weight gradients / without",
    "train step: kernels / unfused",
    "peak memory on an H200, GiB",
)


def update(scores):
    """Puts the scores of a run between `<!-- measured -->` and `<!-- end -->` of the three files.

    Returns:
        The measures of the tables that the run has no figure for; they have no row.
    """
    _replace(ROOT / "README.md", by_workload(AGAINST_OTHERS, scores))
    _replace(ROOT / "docs" / "performance.md", by_workload(COST, scores))
    _replace(ROOT / "docs" / "kernels.md", kernels(scores))
    measured = {score.measure for score in scores}
    return [measure for measure in (*AGAINST_OTHERS, *COST, *KERNELS) if measure not in measured]


def by_workload(measures, scores):
    """Writes a table with a row for each measure and a column for each workload, if measured."""
    figures = {}
    for score in scores:
        if score.measure in measures:
            figures[score.measure, score.workload] = number(score.value)
    measured = {workload for _, workload in figures}
    workloads = [workload for workload in WORKLOADS if workload in measured]
    rows = [["", *workloads], ["---"] * (1 + len(workloads))]
    for measure, words in measures.items():
        cells = [figures.get((measure, workload), "") for workload in workloads]
        if any(cells):
            rows.append([words, *cells])
    return _table(rows)


def kernels(scores):
    """Writes a table with a row for each kernel's measure and size."""
    of_kernels = [score for score in scores if score.measure in KERNELS]
    of_kernels.sort(key=lambda score: KERNELS.index(score.measure))
    rows = [["measure", "on", "figure", ""], ["---"] * 4]
    for score in of_kernels:
        rows.append([score.measure, score.workload, number(score.value), score.note])
    return _table(rows)


def _table(rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _replace(path, table):
    after, count = re.subn(
        r"(?s)(<!-- measured -->\n).*?(<!-- end -->)",
        lambda markers: f"{markers[1]}\n{table}\n\n{markers[2]}",
        path.read_text(),
    )
    if count != 1:
        raise ValueError(
            f"{path.name} has {count} places between <!-- measured --> and <!-- end -->; it "
            "needs one."
        )
    path.write_text(after)
