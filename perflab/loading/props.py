"""A small synthetic text, made when it is asked for: where epochs are short and many.

DataLoader workers import this file: torch, numpy and PIL may enter, nothing that draws or teaches.
"""

import itertools

import numpy as np
import torch

from perflab.errors import PerflabError

SYLLABLES = [a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]


class Sentences(torch.utils.data.Dataset):
    """Item i is (int64 tokens (length,), label i % 2): a sentence is split into words and looked up.

    The words follow Zipf's law, as those of a language do. All text lies in one array of bytes with one
    of offsets: workers share both, while a list of strings would be copied into each of them.
    """

    def __init__(self, sentences: int = 512, words: int = 24, length: int = 32, seed: int = 0):
        if min(sentences, words, length) < 1:
            raise PerflabError(f"{sentences} sentences of {words} words, {length} tokens: give 1 or more of each")
        names = [first + second for first, second in itertools.product(SYLLABLES, SYLLABLES)]
        rank = np.random.default_rng(seed).zipf(1.2, (sentences, words)) % len(names)
        lines = [" ".join(names[r] for r in row).encode() for row in rank]
        self.text = np.frombuffer(b"".join(lines), np.uint8)
        self.ends = np.cumsum([len(line) for line in lines])
        self.vocabulary = {name: number for number, name in enumerate(names, start=1)}  # 0 fills up
        self.length = length

    def __len__(self) -> int:
        return len(self.ends)

    def sentence(self, i: int) -> str:
        start = self.ends[i - 1] if i else 0
        return self.text[start : self.ends[i]].tobytes().decode()

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        tokens = [self.vocabulary[word] for word in self.sentence(i).split()][: self.length]
        row = np.zeros(self.length, np.int64)
        row[: len(tokens)] = tokens
        return torch.from_numpy(row), i % 2
