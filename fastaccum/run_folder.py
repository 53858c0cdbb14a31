"""The folder that a run leaves behind: config.json, metrics.csv, curve.png, model.keras."""

import csv
import itertools
import json
from pathlib import Path

COLUMNS = (
    "step",
    "seconds",
    "tokens_per_second",
    "bits_per_byte",
    "held_out_bits_per_byte",
    "loss_scale",
    "grad_norm",
    "skipped_steps",
)


class RunFolder:
    """Writes a run's files into `path`, which is new or empty.

    Args:
        path: the folder; made with its parents.

    Raises:
        FileExistsError: something is there already.
        OSError: it cannot be made.

    >>> import tempfile
    >>> run = RunFolder(Path(tempfile.mkdtemp()) / "run")
    >>> run.write_config({"steps": 2})
    >>> run.add_row({"step": 1, "bits_per_byte": 8.0})
    >>> sorted(path.name for path in run.path.iterdir())
    ['config.json', 'metrics.csv']
    """

    def __init__(self, path):
        self.path = Path(path)
        refuse_used(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.rows = []

    def write_config(self, config):
        """Writes config.json."""
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def add_row(self, row):
        """Appends to metrics.csv a dict with keys of `COLUMNS`; what is missing stays blank."""
        with open(self.path / "metrics.csv", "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if not self.rows:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)

    def save_model(self, model):
        """Writes model.keras; `import fastaccum.transformer`, then `keras.models.load_model` reads it."""
        model.save(self.path / "model.keras")

    def draw_curve(self):
        """Draws curve.png, bits per byte over steps.

        Returns:
            False where matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for column, label, style in (
            ("bits_per_byte", "training", "-"),
            ("held_out_bits_per_byte", "held out", "o-"),
        ):
            points = [(row["step"], row[column]) for row in self.rows if column in row]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
        axes.set(xlabel="step", ylabel="bits per byte")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path / "curve.png", dpi=150)
        return True


def refuse_used(path):
    """Raises FileExistsError unless `path` is an empty folder or nothing at all."""
    if path.is_dir():
        if any(path.iterdir()):
            raise FileExistsError(f"{str(path)!r} has files in it, which are not overwritten: name a new folder")
    elif path.exists() or path.is_symlink():
        raise FileExistsError(f"{str(path)!r} is no folder: name a new one")


def unused_path(path):
    """`path`, or the first of path-2, path-3, ... that does not exist.

    >>> unused_path("no/such/run").as_posix()
    'no/such/run'
    """
    numbered = (Path(f"{path}-{n}") for n in itertools.count(2))
    return next(p for p in itertools.chain([Path(path)], numbered) if not p.exists())
