"""A DataLoader like another one, with some arguments changed. What was built is never touched."""

from torch.utils.data import DataLoader, IterableDataset

# As DataLoader's own arguments are named; the rest decides how samples become batches.
_KEPT = (
    "dataset",
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
    kept = {name: getattr(loader, name) for name in _KEPT}
    if "batch_sampler" not in changes:
        kept |= _batching(loader)
    kept |= changes
    if not kept["num_workers"]:
        kept |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
    return DataLoader(**kept)


def _batching(loader: DataLoader) -> dict:
    """The arguments that decide how samples become batches."""
    if loader.batch_sampler is not None and loader.batch_size is None:  # it was given, not made by DataLoader
        return {"batch_sampler": loader.batch_sampler}
    batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset):
        batching["sampler"] = loader.sampler
    return batching
