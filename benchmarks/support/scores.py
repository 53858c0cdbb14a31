"""The figures of a run: rows of the result table, the bar that each must reach, and how they are
written.
"""

import dataclasses
import operator
import statistics

# (measure, workload): ("at least" or "at most", the bar)
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
    **{
        (f"train step: {peer} / ours", "ConvNet"): (">=", 1.0)
        for peer in ("JAX scan", "PyTorch eager", "torch.compile")
    },
    **{
        (f"fit: Keras GA {settings} / ours", workload): (">=", bar)
        for settings, bar in (("default", 1.2), ("best tuned", 1.1))
        for workload in ("ConvNet", "Conv1D", "ResNet20", "MobileNet", "U-Net")
    },
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
    "programs compiled in a ragged epoch, plain": ("<=", 1),
    "programs compiled in a ragged epoch, batch statistics": ("<=", 2),
    "linear_cross_entropy: temp memory / unfused": ("<=", 0.08),
    "linear_cross_entropy: time / unfused": ("<=", 1.10),
    "attention: temp memory, 8,192 tokens / 2,048": ("<=", 4.3),
    "attention: time / unfused": ("<=", 0.8),
    "weight-gradient error: fp32 / plain autodiff": ("<=", 0.2),
    "train step: kernels / unfused": ("<=", 1.0),
    "train step: fp32 weight gradients / without": ("<=", 1.02),
    "train step, 4 logical devices: slots shared out / all on each": ("<=", 1.10),
}


@dataclasses.dataclass(frozen=True)
class Score:
    """One figure: what was measured, on which workload, and what the figure needs beside it to be
    read.
    """

    measure: str
    workload: str
    value: float
    note: str = ""

    @property
    def bar(self):
        return BARS.get((self.measure, self.workload)) or COMMON_BARS.get(self.measure)

    @property
    def verdict(self):
        if self.bar is None:
            return ""
        relation, limit = self.bar
        reached = {">=": operator.ge, "<=": operator.le}[relation](self.value, limit)
        return "reached" if reached else "MISSED"


def of_run(run):
    """The scores of all the benchmarks of a run."""
    extra = [benchmark.get("extra_info", {}) for benchmark in run["benchmarks"]]
    return [Score(**score) for info in extra for score in info.get("scores", [])]


def number(value):
    """Three digits from 1 on, two below.

    >>> number(21.54), number(1.003), number(0.01373), number(-181.4)
    ('21.5', '1.00', '0.014', '-181')
    """
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if size < 10 else 1}f}" if size >= 0.1 else f"{value:.2g}"


def ratio(numerators, denominators):
    """The median of the ratios round by round: a slow moment of the machine slows both sides of a
    round.
    """
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def milliseconds(times, updates):
    """For a note: the median time of one update, and that of the fastest round, which other loads
    disturbed least.
    """
    median, fastest = (
        1e3 * seconds / updates for seconds in (statistics.median(times), min(times))
    )
    return f"{median:.3g} (fastest {fastest:.3g}) ms an update"


def markdown(scores):
    """The table, as Markdown that also reads well in a terminal."""
    rows = [("measure", "workload", "figure", "bar", "", "note")]
    for score in scores:
        bar = f"{score.bar[0]} {score.bar[1]:g}" if score.bar else ""
        rows.append(
            (score.measure, score.workload, f"{score.value:.4g}", bar, score.verdict, score.note)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    )
