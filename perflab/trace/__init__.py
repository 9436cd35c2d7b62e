"""Traces of torch.profiler: how busy the device was, why it was idle, and what is wrong. In reading order:

- read: the events of a file, as tables of whole nanoseconds
- host: where the host was at a moment: step, annotation, operator, line
- trace: `read_trace` gives a Trace: busy share, kernels, gaps, memory, findings
- gaps: each stretch without work has one cause
- faults: what a trace shows to be wrong, where, and what mending it can gain
- profile: `profiled` records a few steps, with the price of profiling beside them
- explorer: a window that moves over recorded traces
- exercises: the questions of notebook 06
"""
