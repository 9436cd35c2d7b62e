"""A DataLoader like another one, with some arguments changed. What was built is never touched."""

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

# As DataLoader's own arguments are named; the rest decides how samples become batches.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def rebuilt(loader: DataLoader, **changes) -> DataLoader:
    """A new DataLoader over the same dataset, in the same batches and the same order, with `changes`.

    What only workers can have (prefetch_factor, persistent_workers, a start method, a timeout) is left
    out where `num_workers` becomes 0, and prefetch_factor goes back to its default where workers come in.
    """
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)} | {"dataset": loader.dataset}
    if (loader.batch_size is None and loader.batch_sampler is not None) or _own(loader.batch_sampler):
        kept["batch_sampler"] = loader.batch_sampler
    else:
        kept |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            kept["sampler"] = loader.sampler
    if "batch_sampler" in changes:
        kept = {name: x for name, x in kept.items() if name not in ("batch_size", "drop_last", "sampler")}
    kept |= changes
    if not kept["num_workers"]:
        kept |= {
            "prefetch_factor": None,
            "persistent_workers": False,
            "multiprocessing_context": None,
            "timeout": 0,
        }
    return DataLoader(**kept)


def _own(batch_sampler) -> bool:
    """Is it a batch sampler of the learner's own, not the one that DataLoader makes?"""
    return batch_sampler is not None and type(batch_sampler) is not BatchSampler


def batches_drawn(loader: DataLoader):
    """The sampler that draws a batch's indices; None where there is none: an iterable dataset, or no batching."""
    return None if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
