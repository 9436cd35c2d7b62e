"""Exercises of notebook 02: a dataset with three faults, and the bytes that a loader keeps in flight."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from perflab.bench import cleanup, interrupt
from perflab.bench.study import vary
from perflab.learn.question import INCORRECT, Outcome, Problem, numeric, timed

ITEMS, COLUMNS, BATCH = 128, 64, 16


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
    rows = np.round(np.random.default_rng(0).random((ITEMS, COLUMNS)), 5)
    lines = (",".join([str(1000 + i), *(f"{x:.5f}" for x in row)]) for i, row in enumerate(rows))
    path.write_text("\n".join(lines) + "\n")
    return rows


def _mended(answer) -> Outcome:
    if not callable(answer):
        return Outcome(INCORRECT, "the answer is a class that takes the path of the file, such as Mended.")
    with tempfile.TemporaryDirectory(prefix="perflab-") as folder, interrupt.Interruptible() as door:
        path = Path(folder) / "readings.csv"
        rows = write_readings(path)
        data = answer(str(path))
        if wrong := _wrong_item(data, rows):
            return Outcome(INCORRECT, wrong)
        if left := door.call(lambda: list(_faults(data, path, rows))):
            return Outcome(INCORRECT, f"the samples are right in this process, but {'; and '.join(left)}.")
        return door.call(_speed, answer, str(path))


def _wrong_item(data, rows: np.ndarray) -> str:
    """What is wrong with the samples as this process reads them, or ""."""
    if len(data) != ITEMS:
        return f"the file has {ITEMS} lines, and the dataset {len(data)} items."
    for i in (0, ITEMS - 1, 17):
        item = data[i]
        if not isinstance(item, dict) or not {"number", "row", "shift"} <= set(item):
            return 'an item is a dictionary with "number", "row" and "shift".'
        if not _right(item, i, rows):
            return f"item {i} must hold the number and the {COLUMNS} values of line {i}, as before."
    return ""


def _faults(data, path: Path, rows: np.ndarray) -> Iterator[str]:
    """A sentence for every fault that is left."""
    read = _bytes_read(lambda: [data[i] for i in range(32)]) / 32
    if read > path.stat().st_size / 2:
        yield "every item still reads the whole file: what all items share belongs in __init__"
    stacked = default_collate([data[0], data[1]])["row"]
    if not (isinstance(stacked, torch.Tensor) and stacked.shape == (2, COLUMNS)):
        yield f"a batch still holds {COLUMNS} tensors instead of one: give the row as an array or a tensor"
    if shared := _offset_shared(data, path):
        yield (
            "the file is open before the workers start, so that all of them move one offset and read each "
            "other's lines: open it in each process, or read all of it in __init__"
        )
    try:
        epochs = {kept: _epochs(data, kept) for kept in (False, True)}
    except Exception:
        if shared:  # lines torn by the other worker: that was said
            return
        raise
    right = min(sum(_right(item, i, rows) for i, item in enumerate(epoch)) for two in epochs.values() for epoch in two)
    if wrong := ITEMS - right:
        yield f"{wrong} of {ITEMS} samples are other ones as soon as there are two workers"
    shifts = [[{item["shift"] for item in epoch} for epoch in two] for two in epochs.values()]
    enough = 0.95 * ITEMS  # float32 may draw a number twice
    if min(len(epoch) for two in shifts for epoch in two) < enough:
        yield "two workers draw the same shifts: a generator made before the fork is copied into both"
    elif any(len(one & other) > ITEMS - enough for one, other in shifts):
        yield "each epoch draws the shifts of the one before again: the seed must differ between epochs too"


def _bytes_read(work: Callable) -> int:
    """The bytes that this process reads from files meanwhile; 0 where the system does not count them."""
    me = psutil.Process()
    if not hasattr(me, "io_counters"):
        return 0
    before = getattr(me.io_counters(), "read_chars", 0)
    work()
    return getattr(me.io_counters(), "read_chars", 0) - before


def _offset_shared(data, path: Path) -> bool:
    """Does a worker move the offset of a file that this process has open?"""
    data[0]  # what is opened lazily is open now
    fds = [int(fd) for fd in os.listdir("/proc/self/fd")] if Path("/proc/self/fd").is_dir() else []
    ours = [fd for fd in fds if os.path.realpath(f"/proc/self/fd/{fd}") == str(path.resolve())]
    before = [os.lseek(fd, 0, os.SEEK_CUR) for fd in ours]
    list(_loader(data, False, workers=1))
    return [os.lseek(fd, 0, os.SEEK_CUR) for fd in ours] != before


def _loader(data, kept: bool, workers: int = 2, **how) -> DataLoader:
    return DataLoader(data, BATCH, num_workers=workers, persistent_workers=kept, multiprocessing_context="fork", **how)


def _epochs(data, kept: bool) -> list[list[dict]]:
    """Two epochs of single items, as two workers give them; nothing is collated."""
    loader = _loader(data, kept, collate_fn=_plain)
    try:
        return [[item for batch in loader for item in batch] for _ in range(2)]
    finally:
        cleanup.end_loader_workers(loader)


def _plain(items: list[dict]) -> list[dict]:
    return [{"number": int(x["number"]), "row": np.asarray(x["row"], float), "shift": float(x["shift"])} for x in items]


def _right(item: dict, i: int, rows: np.ndarray) -> bool:
    row = np.asarray(item["row"], float)
    return int(item["number"]) == 1000 + i and row.shape == (COLUMNS,) and np.allclose(row, rows[i], atol=1e-4)


def _read(loader: DataLoader):
    for _ in loader:
        pass


def _speed(answer, path: str) -> Outcome:
    gain = vary(
        "dataset",
        {"as it was": Readings, "mended": answer},
        _read,
        prepare=lambda make: _loader(make(path), True),
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
        (GIB * 2**10, "that is in MiB; the question is about GiB."),
        (GIB * 2**30, "that is in bytes; the question is about GiB."),
        (GIB / 4, "a float32 takes 4 bytes."),
        (GIB / WORKERS, "each of the workers has its own batches ahead."),
        (GIB / AHEAD, "prefetch_factor is a number of batches for each worker."),
        (GIB / IMAGES, f"that is one image for each batch; there are {IMAGES}."),
        (GIB / 3, "an image has three channels."),
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
