"""Exercises of notebook 02: a dataset with three faults, and the bytes that a loader keeps in flight."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from perflab.bench.study import vary
from perflab.learn.question import INCORRECT, Outcome, Problem, numeric, timed

from .guards import guards

ITEMS, COLUMNS, BATCH = 128, 64, 16
HEEDED = ("same samples", "none lost or doubled", "random streams", "file handles")


class Readings(Dataset):
    """The dataset of the exercise as it stands in the notebook, with its three faults."""

    def __init__(self, path):
        self.path = path
        self.rng = np.random.default_rng()

    def __len__(self):
        return len(Path(self.path).read_text().splitlines())

    def __getitem__(self, i):
        number, *values = Path(self.path).read_text().splitlines()[i].split(",")
        row = [float(value) for value in values]
        return {"number": int(number), "row": row, "shift": self.rng.random()}


def write_readings(path: Path) -> np.ndarray:
    """Write the file of the exercise; gives its rows, float64 (ITEMS, COLUMNS). Line i has number 1000 + i."""
    rows = np.random.default_rng(0).random((ITEMS, COLUMNS)).round(5)
    numbers = 1000 + np.arange(ITEMS)
    np.savetxt(path, np.column_stack([numbers, rows]), ["%d", *["%.5f"] * COLUMNS], delimiter=",")
    return rows


def _mended(answer) -> Outcome:
    if not callable(answer):
        return Outcome(INCORRECT, "the answer is a class that takes the path of the file, such as Mended.")
    with tempfile.TemporaryDirectory(prefix="perflab-") as folder:
        path = Path(folder) / "readings.csv"
        rows = write_readings(path)
        data = answer(str(path))
        if wrong := _wrong_item(data, rows):
            return Outcome(INCORRECT, wrong)
        if faults := " ".join(_faults(data, path)):
            return Outcome(INCORRECT, f"the samples are right in this process, but something is left. {faults}")
        return _speed(answer, str(path))


def _wrong_item(data, rows: np.ndarray) -> str:
    """What is wrong with the samples as this process reads them, or ""."""
    if len(data) != ITEMS:
        return f"the file has {ITEMS} lines, and the dataset {len(data)} items."
    for i, row in enumerate(rows):
        item = data[i]
        if not isinstance(item, dict) or not {"number", "row", "shift"} <= set(item):
            return 'an item is a dictionary with "number", "row" and "shift".'
        values = np.asarray(item["row"], float)
        if int(item["number"]) != 1000 + i or values.shape != (COLUMNS,) or not np.allclose(values, row, atol=1e-4):
            return f"item {i} must hold the number and the {COLUMNS} values of line {i}, as before."
    return ""


def _faults(data, path: Path) -> Iterator[str]:
    """A sentence for every fault that is left."""
    before = _bytes_read()
    batch = default_collate([data[i] for i in range(BATCH)])
    if (_bytes_read() - before) / BATCH > path.stat().st_size / 2:
        yield "Every item still reads the whole file: what all items share belongs in __init__."
    if not (isinstance(batch["row"], torch.Tensor) and batch["row"].shape == (BATCH, COLUMNS)):
        yield f"A batch still holds {COLUMNS} tensors instead of one: give the row as an array or a tensor."
    for alarm in guards(_loader(data, persistent_workers=False)).alarms:
        if alarm.about in HEEDED:
            yield f"{alarm.what} {alarm.way_out}"


def _bytes_read() -> int:
    """The bytes that this process has read from files so far; 0 where the system does not count them."""
    me = psutil.Process()
    return me.io_counters().read_chars if hasattr(me, "io_counters") else 0


def _loader(data, **how) -> DataLoader:
    return DataLoader(data, BATCH, num_workers=2, multiprocessing_context="fork", **how)


def _read(loader: DataLoader):
    for _ in loader:
        pass


def _speed(answer, path: str) -> Outcome:
    gain = vary(
        "dataset",
        {"as it was": Readings, "mended": answer},
        _read,
        prepare=lambda make: _loader(make(path), persistent_workers=True),
        study="02.exercise",
        budget_s=2,
    ).ratio("as it was", "mended")
    return timed(
        gain,
        2,
        "the same samples, streams of their own, one tensor a batch, and at least twice as fast.",
        "samples, streams and batches are right, but it is not twice as fast yet.",
    )


WORKERS, AHEAD, IMAGES = 8, 5, 64
GIB = WORKERS * AHEAD * IMAGES * (3 * 224 * 224) * 4 / 2**30  # 3 channels of 224 x 224 numbers of 4 bytes

_in_flight = numeric(
    GIB,
    "that is what waits before the first step; the batch in the loop's hands comes on top.",
    [
        (GIB * 2**30 / 1e9, "that is in GB, of 1e9 bytes; a GiB has 2**30."),
        (GIB / 4, "a float32 takes 4 bytes."),
        (GIB / WORKERS, "each of the workers has its own batches ahead."),
        (GIB / AHEAD, "prefetch_factor is a number of batches for each worker."),
        (GIB / WORKERS / AHEAD, "that is one batch."),
    ],
    "multiply workers, batches ahead, images, channels, height, width and bytes.",
    example="one number, in GiB",
    tolerance=0.03,  # one batch more, that of the loop's hands, is right too
)


PROBLEMS = {
    "02.1": Problem(
        "Readings has three faults. Write a class Mended that takes the same path: item i holds the number, "
        "the row and a random shift as before, the same for any number of workers, with shifts that differ "
        "between workers and between epochs, with one tensor for the rows of a batch, and loading at least "
        "twice as fast. Give the class to check.",
        _mended,
        (
            "What does each item do that could be done once? An open file is no part of it: workers that are "
            "forked share its offset.",
            "What does default_collate make of a list of numbers, and what of an array?",
            "Which generators does torch seed apart in each worker, and anew in each epoch?",
        ),
        """import numpy as np
import torch
from torch.utils.data import Dataset

class Mended(Dataset):
    def __init__(self, path):
        table = np.loadtxt(path, delimiter=",")
        self.numbers, self.rows = table[:, 0].astype(int), table[:, 1:].astype(np.float32)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return {"number": self.numbers[i], "row": self.rows[i], "shift": torch.rand(())}""",
    ),
    "02.2": Problem(
        "A loader has 8 workers and prefetch_factor=5. A batch is 64 images of 3 x 224 x 224 in float32. How "
        "many GiB of shared memory do the batches in flight take before the first step?",
        _in_flight,
        (
            "How many batches are in flight?",
            "A batch is 64 x 3 x 224 x 224 numbers of 4 bytes; a GiB is 2**30 bytes.",
        ),
        "8 * 5 * 64 * 3 * 224 * 224 * 4 / 2**30",
    ),
}
