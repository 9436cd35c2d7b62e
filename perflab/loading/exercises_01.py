"""Exercises of notebook 01: cores for a model's demand, and the same pixels at twice the rate."""

import itertools
import math

import torch
from torch.utils.data import DataLoader

from perflab.bench import cleanup
from perflab.bench.estimate import HOLDS, NOT
from perflab.bench.study import vary
from perflab.learn.question import CANNOT, CORRECT, INCORRECT, Outcome, Problem, as_number

from .decode import psnr
from .images import Photos, images


def _cores(answer) -> Outcome:
    """A model takes 3,000 images a second; an image costs 13 ms of a core."""
    if math.isnan(answer := as_number(answer)):
        return Outcome(INCORRECT, "the answer is one number, such as 8.")
    if math.isclose(answer, 39, abs_tol=0.6):
        return Outcome(CORRECT, "a second of 3,000 images holds 39 core-seconds of decoding.")
    if math.isclose(answer, 3000 / 13, rel_tol=0.01):
        return Outcome(INCORRECT, "that divides; a second needs 3,000 times 13 ms of work.")
    if math.isclose(answer, 39000, rel_tol=0.02):
        return Outcome(INCORRECT, "those are milliseconds of work in each second: how many cores is that?")
    if math.isclose(answer, 1000 / 13, rel_tol=0.01):
        return Outcome(INCORRECT, "that is what one core decodes in a second; how many of them make 3,000?")
    return Outcome(INCORRECT, "each second brings 3,000 images of 13 ms each: how many seconds of work is that?")


SIDE, COUNT, PSNR_DB = 224, 16, 30


def _paths():
    return images("1080p").paths[:COUNT]


def _plain(paths) -> DataLoader:
    return DataLoader(Photos(paths=paths), batch_size=4)


def _pixels(batches) -> list[torch.Tensor]:
    """The images of all batches; a batch is a tensor, or a pair of tensors and labels."""
    found = []
    try:
        for batch in itertools.islice(batches, 2 * COUNT):
            found += list(batch if isinstance(batch, torch.Tensor) else batch[0])
    finally:
        cleanup.close(batches)
    return found


def _fed(answer) -> Outcome:
    if not callable(answer):
        return Outcome(INCORRECT, "the answer is a function that takes paths and returns a loader.")
    made = answer(_paths())
    if isinstance(made, list | tuple):
        return Outcome(INCORRECT, "a list holds what was loaded once; a loader loads anew in each epoch.")
    wanted, got = _pixels(_plain(_paths())), _pixels(made)
    if len(got) != COUNT:
        return Outcome(INCORRECT, f"{COUNT} images went in and {len(got)} came out.")
    shapes = {(tuple(x.shape), str(x.dtype)) for x in got}
    if shapes != {((3, SIDE, SIDE), "torch.uint8")}:
        seen = ", ".join(f"{shape} of {dtype}" for shape, dtype in sorted(shapes))
        return Outcome(INCORRECT, f"each image is uint8 of shape (3, {SIDE}, {SIDE}), not {seen}.")
    likeness = [psnr(a, b) for a, b in zip(got, wanted, strict=True)]
    if min(likeness) < PSNR_DB:
        nearest = [max(range(COUNT), key=lambda k, x=x: psnr(x, wanted[k])) for x in got]
        moved = sorted(nearest) == list(range(COUNT)) != nearest
        why = "they come in another order." if moved else "look at what your way of decoding leaves out."
        return Outcome(INCORRECT, f"the pixels are not those of the full decode ({min(likeness):.0f} dB): {why}")
    seen = vary(
        "loader",
        {"plain": _plain, "yours": answer},
        _epoch,
        prepare=lambda make: make(_paths()),
        study="01.exercise",
        per="image",
        work=COUNT,
        budget_s=4,
    )
    finding = seen.ratio("plain", "yours").at_least(2)
    if finding.state == HOLDS:
        return Outcome(CORRECT, f"the same pixels ({min(likeness):.0f} dB or more), at least twice as fast.")
    if finding.state == NOT:
        return Outcome(INCORRECT, "the pixels are right, but the loader is not twice as fast: decode less, then share.")
    gain = seen.ratio("plain", "yours")
    return Outcome(CANNOT, f"the pixels are right; it is {gain} times as fast, not clearly twice. Check again later.")


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
        f"of Photos(paths=paths): uint8 of shape (3, {SIDE}, {SIDE}), in the same order, at least {PSNR_DB} dB alike. "
        "Made once, it is at least twice as fast over several epochs as DataLoader(Photos(paths=paths), batch_size=4).",
        _fed,
        (
            "What did the study of decoders say about full and draft?",
            "DraftPhotos takes the same arguments as Photos; keep the order, so no shuffle. Workers come on top: "
            "small batches share out evenly.",
        ),
        """from torch.utils.data import DataLoader
from perflab.bench import machine
from perflab.loading.decode import DraftPhotos

def feed(paths):
    return DataLoader(
        DraftPhotos(paths=paths),
        batch_size=4,
        num_workers=min(4, machine.cores()),
        persistent_workers=True,
        multiprocessing_context="fork",
    )""",
    ),
}
