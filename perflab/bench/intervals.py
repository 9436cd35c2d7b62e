"""Arithmetic of intervals in whole nanoseconds: unions, what is left out of them, which encloses which."""

import numpy as np

Intervals = tuple[np.ndarray, np.ndarray]  # starts and ends, int64


def union(start: np.ndarray, end: np.ndarray) -> Intervals:
    """The same stretches of time, merged where they touch or overlap, in order. Empty intervals are dropped."""
    some = end > start
    start, end = start[some], end[some]
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    first = np.ones(len(start), bool)
    first[1:] = start[1:] > end[:-1]
    return start[first], end[np.append(np.flatnonzero(first)[1:] - 1, len(end) - 1)] if len(end) else end


def length(spans: Intervals) -> int:
    """Nanoseconds in merged intervals."""
    return int((spans[1] - spans[0]).sum())


def between(spans: Intervals) -> Intervals:
    """The gaps inside merged intervals, from the first start to the last end."""
    return spans[1][:-1], spans[0][1:]


def without(spans: Intervals, others: Intervals) -> Intervals:
    """What of `spans` no interval of `others` covers; both merged."""
    if not len(spans[0]) or not len(others[0]):
        return spans
    low, high = int(min(spans[0][0], others[0][0])), int(max(spans[1][-1], others[1][-1]))
    free = np.append(low, others[1]), np.append(others[0], high)
    return common(spans, free)


def common(a: Intervals, b: Intervals) -> Intervals:
    """Where both hold; each in order and without overlaps."""
    edges = np.unique(np.concatenate([*a, *b]))
    if len(edges) < 2:
        return edges[:0], edges[:0]
    inside = (covered(a, edges[:-1], edges[1:]) > 0) & (covered(b, edges[:-1], edges[1:]) > 0)
    return union(edges[:-1][inside], edges[1:][inside])


def parents(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For intervals of one thread, in order of (start, -end): the index of the innermost that encloses each, or -1."""
    found = np.full(len(start), -1, np.int64)
    open_: list[int] = []
    ends = end.tolist()
    for i, begun in enumerate(start.tolist()):
        while open_ and ends[open_[-1]] <= begun:
            open_.pop()
        if open_:
            found[i] = open_[-1]
        open_.append(i)
    return found


def covered(spans: Intervals, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Nanoseconds of each stretch [start, end) that merged intervals cover."""
    if not len(spans[0]):
        return np.zeros(len(start), np.int64)
    origin = spans[0][0]  # so that a float holds each nanosecond
    edges = np.column_stack(spans).ravel() - origin
    lengths = np.cumsum(spans[1] - spans[0])
    before = np.column_stack([np.append(0, lengths[:-1]), lengths]).ravel()
    until_end, until_start = (np.interp(time - origin, edges, before) for time in (end, start))
    return np.rint(until_end - until_start).astype(np.int64)
