"""The training loop of the course: photos, a vision transformer, AdamW. Each field of `Loop` is one change to it.

`normalised`, `Photos`, `Block` and `ViT` stand in the first cells of notebook 00 letter by letter; workers that do
not inherit a notebook's classes import them from here.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from perflab import paths
from perflab.bench import machine
from perflab.errors import PerflabError

# -- as notebook 00 shows it


def normalised(pixels):
    return (pixels.float() / 255 - 0.45) / 0.23


class Photos(Dataset):
    def __init__(self, paths, side, finish=normalised):
        self.paths, self.side, self.finish = paths, side, finish

    def __len__(self):
        return len(self.paths)

    def photo(self, i):
        return Image.open(self.paths[i]).convert("RGB").resize((self.side, self.side))

    def __getitem__(self, i):
        photo = self.photo(i)
        if random.random() < 0.5:
            photo = ImageOps.mirror(photo)
        pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
        return self.finish(pixels), i % 10  # a made-up label: only the time matters here


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        hidden, back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(hidden, nn.GELU(), back)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)  # attention, written out
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, side, width, depth, heads):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.position = nn.Parameter(torch.zeros((side // 16) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.blocks(self.patches(images).flatten(2).mT + self.position).mean(1))


# -- what its changes need


def as_bytes(pixels):
    """What a dataset hands over that leaves normalising to the device."""
    return pixels


class DraftPhotos(Photos):
    """The same files, decoded at the smallest size that JPEG offers above the one needed."""

    def photo(self, i):
        image = Image.open(self.paths[i])
        image.draft("RGB", (self.side, self.side))
        return image.convert("RGB").resize((self.side, self.side))


class StoredPhotos(Photos):
    """Decoded once and kept as an array of uint8."""

    def __init__(self, paths, side, finish=normalised):
        super().__init__(paths, side, finish)
        self.files = {path: number for number, path in enumerate(dict.fromkeys(paths))}
        first = {path: i for i, path in reversed(list(enumerate(paths)))}
        self.pixels = np.stack([np.array(super(StoredPhotos, self).photo(first[path])) for path in self.files])

    def photo(self, i):
        return Image.fromarray(self.pixels[self.files[self.paths[i]]])


class AttentionBlock(Block):
    """Attention by PyTorch's fused operator."""

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Endless(Sampler):
    """Permutation after permutation: no epoch ends, so no worker starts anew."""

    def __init__(self, n: int):
        self.n = n

    def __iter__(self):
        while True:
            yield from torch.randperm(self.n).tolist()


def ahead(batches: Iterator) -> Iterator:
    """Batches on the device, each copied on a side stream while the one before it is trained on."""
    side = torch.cuda.Stream()

    def copied():
        with torch.cuda.stream(side):
            return [x.to("cuda", non_blocking=True) for x in next(batches)]

    coming = copied()
    while True:
        torch.cuda.current_stream().wait_stream(side)
        batch = coming
        for x in batch:
            x.record_stream(torch.cuda.current_stream())
        yield batch
        coming = copied()


# -- the loop


@dataclass(frozen=True)
class Size:
    """The loop's size on this machine: photos of `side` pixels, the transformer, a batch, how many photos."""

    side: int
    width: int
    depth: int
    heads: int
    batch: int
    photos: int


GPU = Size(side=224, width=384, depth=12, heads=6, batch=64, photos=512)  # ViT-S/16
SMALL_GPU = replace(GPU, batch=16)
CPU = Size(side=96, width=64, depth=2, heads=2, batch=8, photos=64)
SMALL_BYTES = 15 * 2**30
EPOCH_BATCHES = 100


def size() -> Size:
    """ViT-S/16 on a GPU (batches of 64, of 16 below 16 GiB), a tiny transformer on a CPU.

    >>> size().side in (96, 224)
    True
    """
    if machine.device() == "cpu":
        return CPU
    return SMALL_GPU if (machine.gpus()[0]["bytes"] or 0) < SMALL_BYTES else GPU


def photo_paths() -> list[Path]:
    """The course's photos, again and again: an epoch of 100 batches. Raises PerflabError where there are none yet."""
    files = sorted((paths.DATA / "images" / "500x375").glob("*.jpg"))[: size().photos]
    if not files:
        raise PerflabError("The loop has no photos yet: run `python -m perflab data`, which makes them.")
    return list(itertools.islice(itertools.cycle(files), EPOCH_BATCHES * size().batch))


def ready_at_start(loader: DataLoader) -> int:
    """Batches that are there, or on their way, before a loop asks for the first."""
    return loader.num_workers * (1 + (loader.prefetch_factor or 0))


NEEDS_A_DEVICE = ("pinned", "copied_ahead", "compiled", "graphs", "tf32", "bf16")


@dataclass(frozen=True)
class Loop:
    """The course's training loop. The defaults are what most people write; every field is one change.

    Raises PerflabError for changes that do not fit together.

    >>> replace(Loop(), workers=4, pinned=True).workers
    4
    """

    workers: int = 0  # 01
    decode: str = "full"  # 01: "full", "draft" (the same files, decoded smaller) or "stored" (decoded beforehand)
    uint8: bool = False  # 02: the workers hand over bytes, the device normalises
    kept: bool = False  # 02: workers live on after an epoch
    prefetch: int = 2  # 02: batches ahead of each worker
    pinned: bool = False  # 03: pinned memory, copies that the host does not wait for
    copied_ahead: bool = False  # 03: the next batch is copied on a side stream
    log_every: int = 1  # 03: steps from one reading of the loss to the next; 0 never reads it
    fused: bool = False  # 04: the optimizer in a few kernels
    compiled: bool = False  # 04
    graphs: bool = False  # 04: compiled into CUDA graphs
    tf32: bool = False  # 05
    bf16: bool = False  # 05: autocast
    sdpa: bool = False  # 05: scaled_dot_product_attention

    def __post_init__(self):
        if self.decode not in ("full", "draft", "stored"):
            raise PerflabError(f'decode={self.decode!r} is unknown: use "full", "draft" or "stored".')
        if self.copied_ahead and not self.pinned:
            raise PerflabError("A copy from pageable memory holds the host: set pinned=True before copied_ahead=True.")
        if self.graphs and not self.compiled:
            raise PerflabError("graphs=True is a way to compile: set compiled=True, too.")

    @property
    def needs(self) -> list[str]:
        """The changes of this loop that need a GPU."""
        return [name for name in NEEDS_A_DEVICE if getattr(self, name)]

    def photos(self) -> Photos:
        kind = {"full": Photos, "draft": DraftPhotos, "stored": StoredPhotos}[self.decode]
        return kind(photo_paths(), size().side, as_bytes if self.uint8 else normalised)

    def loader(self) -> DataLoader:
        """Batches without end: no epoch is over, so that no start of workers is measured."""
        photos = self.photos()
        more = {}
        if self.workers:
            fork = "fork" if machine.start_method() != "spawn" else None
            more = {"prefetch_factor": self.prefetch, "multiprocessing_context": fork}
        return DataLoader(
            photos, size().batch, sampler=Endless(len(photos)), num_workers=self.workers, pin_memory=self.pinned, **more
        )

    def batches(self, loader: DataLoader) -> Iterator:
        """An iterator over the loader's batches, on the device already where they are copied ahead."""
        batches = iter(loader)
        return ahead(batches) if self.copied_ahead else batches

    def trainer(self) -> "Trainer":
        return Trainer(self)

    def changes(self) -> dict[str, object]:
        """The fields that differ from the loop as most people write it."""
        start = Loop()
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(start, f.name)}


# What each notebook leaves changed. What it tried without gain is in its board, and goes no further.
CARRIED: dict[str, dict[str, object]] = {
    "01": {"workers": machine.cores, "decode": "draft"},
    "02": {"uint8": True},
    "03": {"pinned": True, "copied_ahead": True, "log_every": 50},
    "04": {},
    "05": {"tf32": True, "bf16": True, "sdpa": True, "fused": True, "compiled": True, "graphs": True},
}


def loop_after(notebook: str) -> Loop:
    """The loop with the changes of the notebooks up to this one ("02"); without a GPU, those that need none.

    >>> loop_after("00") == Loop()
    True
    """
    carried: dict[str, object] = {}
    for chapter, changes in CARRIED.items():
        if chapter <= notebook:
            carried |= {name: value() if callable(value) else value for name, value in changes.items()}
    if machine.device() == "cpu":
        carried = {name: value for name, value in carried.items() if name not in NEEDS_A_DEVICE}
    return Loop(**carried)


class Trainer:
    """Model, optimizer and step of a Loop. `step(batch)` trains on a batch as the loader gives it."""

    def __init__(self, loop: Loop):
        self.loop, self.device, self.steps = loop, machine.device(), 0
        torch.manual_seed(0)
        s = size()
        model = ViT(s.side, s.width, s.depth, s.heads)
        if loop.sdpa:
            model.blocks = nn.Sequential(*[AttentionBlock(s.width, s.heads) for _ in range(s.depth)])
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=loop.fused or None)
        self.forward = self.model
        if loop.compiled:
            self.forward = torch.compile(self.model, mode="reduce-overhead" if loop.graphs else None)

    def step(self, batch):
        images, labels = (x.to(self.device, non_blocking=self.loop.pinned) for x in batch)
        if self.loop.uint8:
            images = normalised(images)
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.loop.bf16):
            loss = F.cross_entropy(self.forward(images), labels)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        if self.loop.log_every and self.steps % self.loop.log_every == 0:
            return loss.item()
        return None

    @contextlib.contextmanager
    def settings(self):
        """What the loop sets for the whole process, for a while: TF32, and one thread on a CPU."""
        matmul, convolution, threads = torch.backends.cuda.matmul, torch.backends.cudnn, torch.get_num_threads()
        before = matmul.allow_tf32, convolution.allow_tf32
        matmul.allow_tf32 = convolution.allow_tf32 = self.loop.tf32
        if self.device == "cpu":
            torch.set_num_threads(1)  # the tiny model gains nothing from more
        try:
            yield
        finally:
            matmul.allow_tf32, convolution.allow_tf32 = before
            torch.set_num_threads(threads)
