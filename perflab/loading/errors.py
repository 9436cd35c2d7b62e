"""Why a DataLoader's worker died, from what the loop was told: the cause and the way out, in one sentence."""

import functools
from collections.abc import Callable, Iterator

from perflab.errors import PerflabError

_LESS = "keep less in flight (fewer workers, a lower prefetch_factor, smaller batches, uint8 instead of float32)"

# The words of the message, all of which must occur (lower case), and the sentence. The first match is given.
_UNPICKLABLE = (
    "The dataset cannot be sent to a worker that is started by spawn or forkserver: replace the lambda, the "
    "local class or the open handle that the message names, or start the workers by "
    'multiprocessing_context="fork".'
)
_CAUSES: list[tuple[tuple[str, ...], str]] = [
    (
        ("re-initialize cuda in forked",),
        "A forked worker touched CUDA, which does not outlive a fork: return CPU tensors from the dataset and "
        "move them to the device in the loop.",
    ),
    (
        ("too many open files",),
        "The limit of open files is reached, because each tensor from a worker is an open file until it is let "
        "go: return few and large tensors, clone what you keep of a batch, or raise the limit (ulimit -n).",
    ),
    (
        ("ancdata",),
        "A tensor's file could not be handed over, nearly always because the limit of open files is reached: "
        "return few and large tensors, clone what you keep of a batch, or raise the limit (ulimit -n).",
    ),
    (
        ("bus error",),
        "A worker wrote to memory that is backed by nothing, nearly always because /dev/shm is full: enlarge it "
        f"(docker run --shm-size=8g, or --ipc=host), or {_LESS}; if /dev/shm has room, look for a memory-mapped "
        "file that was cut short.",
    ),
    (
        ("shared memory", "no space left"),
        f"/dev/shm is full: enlarge it (docker run --shm-size=8g, or --ipc=host), or {_LESS}.",
    ),
    (
        ("unable to allocate shared memory",),
        f"Shared memory could not be had, most likely because /dev/shm is full: enlarge it (docker run "
        f"--shm-size=8g, or --ipc=host), or {_LESS}.",
    ),
    (
        ("no space left on device",),
        "A file system is full: look at /dev/shm first and at the folder of temporary files next (df -h), and "
        f"free it, enlarge it, or {_LESS}.",
    ),
    (
        ("killed by signal: killed",),
        "Somebody killed the worker, most likely the system because memory ran out (see dmesg, or oom_kill in "
        f"the cgroup's memory.events): {_LESS}, and pack long Python lists of the dataset into one array.",
    ),
    (
        ("cannot allocate memory",),
        f"Memory ran out when a worker was started or a batch was made: {_LESS}, or start fewer processes.",
    ),
    (
        ("killed by signal: segmentation fault",),
        "A library crashed inside the worker: run the same item with num_workers=0 under python -X faulthandler, "
        "and open what the library holds (HDF5, LMDB, OpenCV) in each worker instead of before the fork.",
    ),
    (
        ("can't get attribute",),
        "The worker cannot import what a notebook cell defined: move the class or function into a .py file, or "
        'start the workers by multiprocessing_context="fork".',
    ),
    (("can't pickle",), _UNPICKLABLE),
    (("cannot pickle",), _UNPICKLABLE),
    (("can't get local object",), _UNPICKLABLE),
    (
        ("exited unexpectedly",),
        "A worker ended without an error of its own reaching the loop: look for its message on stderr (a bus "
        "error there means that /dev/shm is full: docker run --shm-size=8g, or less in flight), run the item "
        "with num_workers=0 to see it, and move a class of a notebook cell into a .py file, because spawn and "
        "forkserver import it.",
    ),
    (
        ("dataloader timed out",),
        "No batch came within the loader's timeout: an item is slower than that, or a worker hangs, often on a "
        'lock that a thread held during the fork; try num_workers=0, then multiprocessing_context="forkserver".',
    ),
    (
        ("killed by signal",),
        "The worker was ended by the signal that the message names: run the same item with num_workers=0 to see "
        "where it happens.",
    ),
]


def explain_worker_death(what: str | BaseException) -> str:
    """The cause and the way out for an error of a DataLoader, or its text; empty for one not known here.

    >>> explain_worker_death("worker (pid 7) is killed by signal: Bus error.")[:48]
    'A worker wrote to memory that is backed by nothi'
    """
    text = " ".join(_chain(what)) if isinstance(what, BaseException) else str(what)
    return next((sentence for words, sentence in _CAUSES if all(w in text.lower() for w in words)), "")


def _chain(error: BaseException | None) -> Iterator[str]:
    """An error and those that it was raised from: torch says "exited unexpectedly" and keeps the cause there."""
    seen = set()
    while error is not None and id(error) not in seen:  # a chain may close on itself
        seen.add(id(error))
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def explained(run: Callable) -> Callable:
    """`run` for `vary`, whose reason for a value that failed is the explanation, where there is one."""

    @functools.wraps(run)
    def explaining(prepared):
        try:
            return run(prepared)
        except PerflabError:
            raise
        except Exception as e:
            if sentence := explain_worker_death(e):
                raise PerflabError(sentence) from e
            raise

    return explaining
