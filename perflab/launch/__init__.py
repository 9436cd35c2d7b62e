"""Launching: what it costs to start an operator, and how to pay it once. Notebook 04, in the order of reading.

dispatch   the chain of operators that is timed, what the dispatcher calls, whose a kernel is
hierarchy  thread, warp, CTA, cluster, grid, as the driver tells of them
timeline   a model of the host that launches and the device that computes, with its explorer
compile    torch.compile with a cache of its own: seconds, kernels, graphs
breaks     where compiling stops, and which guard makes it compile anew
waits      where the host waits for the device, and what else forbids a CUDA graph
graphs     a capture done right, of a call and of a training step
exercises  04.1 to 04.3
"""
