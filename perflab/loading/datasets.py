"""Datasets with a planted pace, so that what a knob does is known before it is measured.

DataLoader workers import this file: torch, numpy and PIL may enter, nothing that draws or teaches.
"""

import time

import torch

# Seconds that an item takes: the same each time, or short with every fifth one long. "even" and "bursty"
# have the same mean; "slow" has twice the mean.
PACES = {
    "even": (0.003,) * 5,
    "bursty": (0.001, 0.001, 0.001, 0.001, 0.011),
    "slow": (0.006,) * 5,
}


class Paced(torch.utils.data.Dataset):
    """Item i is i, after a sleep of `pace[i % len(pace)]` seconds, as a read from a remote store would take."""

    def __init__(self, pace: tuple[float, ...], items: int):
        self.pace, self.items = pace, items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> int:
        time.sleep(self.pace[i % len(self.pace)])
        return i
