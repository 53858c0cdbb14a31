"""Figures of a run as rows of the result table, and the bars that they must reach."""

import dataclasses
import operator
import statistics

# The networks of convolutions that `fit` trains.
_CONVOLUTIONAL = ("ConvNet", "Conv1D", "ResNet20", "MobileNet", "U-Net")

# (measure, workload): (">=" or "<=", the bar)
BARS = {
    ("fit: Keras GA default / ours", "MLP 128"): (">=", 12),
    ("fit: Keras GA best tuned / ours", "MLP 128"): (">=", 5),
    ("fit: Keras GA best tuned / ours", "MLP 2048"): (">=", 1.8),
    ("fit: Keras GA best tuned / ours", "GPT"): (">=", 1.2),
    ("train step: eager loop / ours", "MLP 128"): (">=", 40),
    ("train step: eager loop / ours", "GPT"): (">=", 5),
    ("train step: tf.function loop / ours", "MLP 128"): (">=", 7),
    ("train step: tf.function loop / ours", "GPT"): (">=", 1.5),
    ("train step: full batch XLA / ours", "GPT"): (">=", 0.95),
    ("train step: full batch XLA / ours", "MLP 2048"): (">=", 0.85),
    ("train step: JAX scan / ours", "GPT"): (">=", 1.6),
    ("train step: PyTorch eager / ours", "GPT"): (">=", 1.0),
    ("train step: torch.compile / ours", "GPT"): (">=", 0.9),
    ("train step: tf.function loop / ours", "ConvNet"): (">=", 1.05),
    ("train step: JAX scan / ours", "ConvNet"): (">=", 1.0),
    ("train step: PyTorch eager / ours", "ConvNet"): (">=", 1.0),
    ("train step: torch.compile / ours", "ConvNet"): (">=", 1.0),
    **{("fit: Keras GA default / ours", name): (">=", 1.2) for name in _CONVOLUTIONAL},
    **{("fit: Keras GA best tuned / ours", name): (">=", 1.1) for name in _CONVOLUTIONAL},
    ("fit / bare train step", "MLP 128"): ("<=", 1.3),
    ("fit / bare train step", "GPT"): ("<=", 1.03),
    ("time per example: 64 micro-batches / 1", "GPT"): ("<=", 1.10),
    ("dispatch at 2,000 variables, ms", "2,000 variables"): ("<=", 3),
    ("steps per execution: 1 / 32", "MLP 128"): (">=", 1.3),
    ("peak memory on an H200, GiB", "GPT 1.3B"): ("<=", 100),
}
# These hold for every workload.
COMMON_BARS = {
    "LayerStack: first step, depth 48 / 4": ("<=", 1.25),
    "LayerStack: step / unrolled without recomputation": ("<=", 1.3),
    "LayerStack: temp memory / unrolled": ("<=", 0.25),
    "temp memory: 64 micro-batches / 2": ("<=", 1.01),
    "temp memory beyond a plain micro-step, bytes per parameter": ("<=", 4.2),
    # One of a whole update of equal rows, and one that is open in the rows.
    "programs compiled in a ragged epoch, plain": ("<=", 2),
    "programs compiled in a ragged epoch, batch statistics": ("<=", 2),
    "linear_cross_entropy: temp memory / unfused": ("<=", 0.08),
    "linear_cross_entropy: time / unfused": ("<=", 1.10),
    "attention: temp memory, 8,192 tokens / 2,048": ("<=", 4.3),
    "attention: time / unfused": ("<=", 0.8),
    "weight-gradient error: fp32 / plain autodiff": ("<=", 0.2),
    "train step: kernels / unfused": ("<=", 1.0),
    "train step: fp32 weight gradients / without": ("<=", 1.02),
    "train step: bfloat16 / float32 slots": ("<=", 1.25),
    "train step: int8 / float32 slots": ("<=", 1.25),
    "train step, 4 logical devices: slots shared out / all on each": ("<=", 1.10),
}


@dataclasses.dataclass(frozen=True)
class Score:
    """Figure of one measure on one workload.

    Args:
        measure: what was measured, with its unit if it is not a ratio.
        workload: its name.
        value: the figure.
        note: what a reader needs beside the figure.
    """

    measure: str
    workload: str
    value: float
    note: str = ""

    @property
    def bar(self):
        """The relation and the bar, or None."""
        return BARS.get((self.measure, self.workload)) or COMMON_BARS.get(self.measure)

    @property
    def bar_text(self):
        """The bar as tables show it."""
        if self.bar is None:
            return ""
        relation, limit = self.bar
        return f"{relation} {limit:g}"

    @property
    def verdict(self):
        """ "reached" or "MISSED", or nothing where there is no bar."""
        if self.bar is None:
            return ""
        relation, limit = self.bar
        compare = {">=": operator.ge, "<=": operator.le}[relation]
        return "reached" if compare(self.value, limit) else "MISSED"


def of_run(run):
    """Reads the scores of all the benchmarks of a run."""
    scores = []
    for benchmark in run["benchmarks"]:
        extra_info = benchmark.get("extra_info", {})
        scores += [Score(**score) for score in extra_info.get("scores", [])]
    return scores


def number(value):
    """Writes a figure with three digits from 1 on, with two below.

    >>> number(21.54), number(1.003), number(0.01373), number(-181.4)
    ('21.5', '1.00', '0.014', '-181')
    """
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.2g}"


def ratio(numerators, denominators):
    """Returns the median of the ratios round by round.

    A slow moment of the machine slows both sides of a round, so it cancels.
    """
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def milliseconds(times, updates):
    """Writes the median time of one update, and that of the fastest round, for a note.

    Other work on the machine disturbed the fastest round least.

    Args:
        times: seconds of a block of updates, one for each round.
        updates: how many a block has.
    """
    median = 1e3 * statistics.median(times) / updates
    fastest = 1e3 * min(times) / updates
    return f"{median:.3g} (fastest {fastest:.3g}) ms an update"


def markdown(scores):
    """Writes the table as Markdown that also reads well in a terminal."""
    rows = [("measure", "workload", "figure", "bar", "", "note")]
    for score in scores:
        figure = f"{score.value:.4g}"
        rows.append(
            (score.measure, score.workload, figure, score.bar_text, score.verdict, score.note)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
