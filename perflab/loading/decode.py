"""Ways to get an image's pixels: all of them, fewer of them, another decoder, the GPU, or stored beforehand.

DataLoader workers import this file: torch, numpy and PIL may enter, nothing that draws or teaches.
"""

import contextlib
import io
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from perflab.bench import machine
from perflab.errors import PerflabError

from .images import StagedPhotos


class StagedDraft(StagedPhotos):
    """StagedPhotos whose JPEG is decoded at a half, a quarter or an eighth, never below `side` (Image.draft).

    JPEG stores blocks of 8 x 8 frequencies: leaving out the high ones gives the smaller image directly.
    """

    def decode(self, data: bytes):
        with Image.open(io.BytesIO(data)) as image:
            shrink = self.side / min(image.size)
            image.draft("RGB", (math.ceil(image.width * shrink), math.ceil(image.height * shrink)))
            return image.convert("RGB")


class VisionPhotos(StagedPhotos):
    """StagedPhotos decoded and resized by torchvision, with antialiasing. Raises PerflabError where it is missing."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        _torchvision()

    def decode(self, data: bytes) -> torch.Tensor:
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)

    def resize(self, image: torch.Tensor) -> torch.Tensor:
        return fitted(image, self.side)


class JpegBytes(StagedPhotos):
    """The files as they are: item i is (uint8 tensor of the file's bytes, label). For a decoder that takes a
    whole batch; `as_list` collates them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.fromfile(self.paths[index], dtype=np.uint8)), index % 10


def as_list(items: Sequence[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Files of different length cannot be stacked: the batch is a list."""
    return [file for file, _ in items], torch.tensor([label for _, label in items])


def ahead(batches: Iterable) -> Iterator:
    """The same batches in the same order: a thread reads the next one while the loop works on this one."""
    left, end = iter(batches), object()
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, left, end)
        while (batch := coming.result()) is not end:
            coming = reader.submit(next, left, end)
            yield batch


def decode_on_gpu(files: Sequence[torch.Tensor], side: int) -> torch.Tensor:
    """JPEG files as a batch of uint8 (n, 3, side, side) on the current CUDA device, by nvJPEG in torchvision.

    Raises PerflabError without a CUDA device or without torchvision.
    """
    if why := machine.missing("cuda"):
        raise PerflabError(f"decoding on the GPU: {why}.")
    _torchvision()
    from torchvision.io import ImageReadMode, decode_jpeg

    images = decode_jpeg(list(files), ImageReadMode.RGB, device="cuda")
    if len({image.shape for image in images}) == 1:  # a kernel for all of them, not one for each
        return fitted(torch.stack(images), side)
    return torch.stack([fitted(image, side) for image in images])


def fitted(image: torch.Tensor, side: int) -> torch.Tensor:
    """uint8 (..., 3, h, w) to (..., 3, side, side): the short side is resized, the long side cut at its centre."""
    from torchvision.transforms.v2 import functional

    return functional.center_crop(functional.resize(image, [side], antialias=True), [side, side])


def _torchvision():
    if why := machine.missing("torchvision"):
        raise PerflabError(f"{why}: pip install torchvision, in the version that fits this torch.")


class Arrays(Dataset):
    """Pixels decoded beforehand: item i is (uint8 tensor (3, side, side), label), from a memory-mapped file.

    The file is opened anew in each process, so that nothing is shared but the system's page cache.
    """

    def __init__(self, file: str | Path):
        self.file, self.pixels = str(file), None
        self.length = len(np.load(self.file, mmap_mode="r"))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.read(index)), index % 10

    def read(self, index: int) -> np.ndarray:
        if self.pixels is None:
            self.pixels = np.load(self.file, mmap_mode="r")
        return np.array(self.pixels[index])

    def __getstate__(self):
        return {**vars(self), "pixels": None}


@contextlib.contextmanager
def stored(dataset: Dataset) -> Iterator[Arrays]:
    """The dataset's tensors as one uint8 array on disk, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="perflab-") as folder:
        file = Path(folder, "pixels.npy")
        np.save(file, torch.stack([dataset[i][0] for i in range(len(dataset))]).numpy())
        yield Arrays(file)


def psnr(image: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of uint8 pixels, 10 log10(255^2 / mean squared error); infinite if equal.

    Tensors or arrays, of one shape.
    """
    difference = torch.as_tensor(image).cpu().double() - torch.as_tensor(reference).cpu().double()
    error = difference.square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf
