"""Exercises of notebook 01: cores for a model's demand, and the same pixels at twice the rate."""

import itertools

import torch
from torch.utils.data import DataLoader

from perflab.bench import cleanup
from perflab.bench.study import vary
from perflab.learn.question import INCORRECT, Outcome, Problem, numeric, takes, timed

from .decode import psnr
from .images import StagedPhotos, images

SIDE, COUNT, PSNR_DB = 224, 16, 30

_cores = numeric(
    39,
    "a second of 3,000 images holds 39 core-seconds of decoding.",
    [
        (3000 / 13, "that divides; a second needs 3,000 times 13 ms of work."),
        (39_000, "those are milliseconds of work in each second: how many cores is that?"),
        (1000 / 13, "that is what one core decodes in a second; how many of them make 3,000?"),
    ],
    "each second brings 3,000 images of 13 ms each: how many seconds of work is that?",
    example="one number, such as 8",
    tolerance=0.015,
)


def _plain(paths) -> DataLoader:
    return DataLoader(StagedPhotos(paths=paths), batch_size=4)


def _pixels(batches) -> list[torch.Tensor]:
    """The images of all batches; a batch is a tensor, or a pair of tensors and labels."""
    rows = []
    try:
        for batch in itertools.islice(batches, 2 * COUNT):
            rows += list(batch if isinstance(batch, torch.Tensor) else batch[0])
    finally:
        cleanup.close(batches)
    return rows


def _fed(answer) -> Outcome:
    if wrong := takes(answer, ["paths"]):
        return wrong
    paths = images("1080p").paths[:COUNT]
    loader = answer(paths)
    if isinstance(loader, list | tuple):
        return Outcome(INCORRECT, "a list holds what was loaded once; a loader loads anew in each epoch.")
    expected, rows = _pixels(_plain(paths)), _pixels(loader)
    if len(rows) != COUNT:
        return Outcome(INCORRECT, f"{COUNT} images went in and {len(rows)} came out.")
    shapes = {(tuple(x.shape), str(x.dtype)) for x in rows}
    if shapes != {((3, SIDE, SIDE), "torch.uint8")}:
        others = ", ".join(f"{shape} of {dtype}" for shape, dtype in sorted(shapes))
        return Outcome(INCORRECT, f"each image is uint8 of shape (3, {SIDE}, {SIDE}), not {others}.")
    likeness = min(psnr(a, b) for a, b in zip(rows, expected, strict=True))
    if likeness < PSNR_DB:
        nearest = [max(range(COUNT), key=lambda k, x=x: psnr(x, expected[k])) for x in rows]
        moved = sorted(nearest) == list(range(COUNT)) != nearest
        why = "they come in another order." if moved else "look at what your way of decoding leaves out."
        return Outcome(INCORRECT, f"the pixels are not those of the full decode ({likeness:.0f} dB): {why}")
    gain = vary(
        "loader",
        {"plain": _plain, "yours": answer},
        _epoch,
        prepare=lambda make: make(paths),
        study="01.exercise",
        per="image",
        work=COUNT,
        budget_s=4,
    ).ratio("plain", "yours")
    return timed(
        gain,
        2,
        f"the same pixels ({likeness:.0f} dB or more), at least twice as fast.",
        "the pixels are right, but the loader is not twice as fast: decode less, then share.",
    )


def _epoch(batches):
    for _ in batches:
        pass


PROBLEMS = {
    "01.1": Problem(
        "A model trains on 3,000 images a second. Reading and decoding one of them takes 13 ms of a core. How many "
        "cores must do nothing but load?",
        _cores,
        (
            "How many images does one core decode in a second?",
            "Images a second times seconds an image: the seconds cancel, and a number of cores remains.",
        ),
        "3000 * 0.013",
    ),
    "01.2": Problem(
        "Write a function that takes paths of large JPEG files and returns a loader of batches. Its images are those "
        f"of StagedPhotos(paths=paths): uint8 of shape (3, {SIDE}, {SIDE}), in the same order, at least "
        f"{PSNR_DB} dB alike. "
        "Made once, it is at least twice as fast over several epochs as "
        "DataLoader(StagedPhotos(paths=paths), batch_size=4).",
        _fed,
        (
            "What did the study of decoders say about full and draft?",
            "StagedDraft takes the same arguments as StagedPhotos; keep the order, so no shuffle. Workers come on top: "
            "small batches share out evenly.",
        ),
        """from torch.utils.data import DataLoader
from perflab.bench import machine
from perflab.loading.decode import StagedDraft

def feed(paths):
    return DataLoader(
        StagedDraft(paths=paths),
        batch_size=4,
        num_workers=min(4, machine.cores()),
        persistent_workers=True,
        multiprocessing_context="fork",
    )""",
    ),
}
