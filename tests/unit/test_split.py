"""The time split on loops whose shares are planted."""

import time

import pytest
from torch.utils.data import DataLoader, Dataset

from perflab import PerflabError, split
from perflab.bench import machine

pytestmark = pytest.mark.timed


class Slow(Dataset):
    def __init__(self, sleep_s):
        self.sleep_s = sleep_s

    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep(self.sleep_s)
        return i


def step(batch):
    time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_a_planted_wait_is_found(share):
    """Within 5 points on a quiet machine; the interval must hold it everywhere, give or take what sleeps cost."""
    seen = split(step, DataLoader(Slow(0.02 * share / (1 - share)), batch_size=1), budget_s=4)
    wait = seen.share("wait")
    assert abs(wait.mid - share) < 0.12
    assert wait.lo - 0.05 <= share <= wait.hi + 0.05


@pytest.mark.slow
def test_workers_hide_what_they_can():
    loader = DataLoader(Slow(0.01), batch_size=1, num_workers=2, multiprocessing_context="fork")
    assert split(step, loader, budget_s=6).share("wait").mid < 0.25


def test_persistent_workers_live_through_the_ends_of_epochs():
    loader = DataLoader(
        Slow(0.001), batch_size=16, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    seen = split(step, loader, budget_s=2)
    assert not seen.result.reasons and seen.share("wait").mid < 0.6
    assert len(list(loader)) == 4  # and the loader is still the learner's


def test_any_iterable_will_do_and_shares_add_up():
    seen = split(step, [1, 2, 3], budget_s=3)
    assert abs(seen.share("wait").mid) < 0.1
    assert sum(e.mid for e in seen.known().values()) == pytest.approx(1, abs=0.05)
    assert seen.bound("wait").mid < 1.2
    if not machine.cuda_devices():
        assert seen.share("copy").why == "no CUDA device here"
    assert repr(seen) == "Split split: shares of wait, copy, host, device in one step (timed)"


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: split(step, 7), "iterable"),
        (lambda: split(7, [1]), "function"),
        (lambda: split(step, [1]).share("gpu"), "wait, copy, host, device"),
        (lambda: split(step, (i for i in range(9))), "only once"),
        (lambda: split(step, [1], steps=0), "1 or more"),
    ],
)
def test_a_wrong_call_is_one_sentence(call, word):
    with pytest.raises(PerflabError, match=word):
        call()


def test_a_loader_without_a_batch_says_so():
    seen = split(step, DataLoader(Slow(0), batch_size=128, drop_last=True))
    assert "gives no batch" in seen.share("wait").why and "gives no batch" in str(seen)


def test_a_step_that_raises_is_a_reason():
    def bad(batch):
        raise ValueError("wrong shape")

    seen = split(bad, [1, 2])
    assert "wrong shape" in seen.share("wait").why and "wrong shape" in str(seen)
