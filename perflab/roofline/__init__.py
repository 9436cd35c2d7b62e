"""The roofline: is an operator limited by arithmetic, by bandwidth, or by neither? In reading order:

- flops: how many floating-point operations an operator does on each element, by convention
- work: `counted`, the FLOPs and the bytes of any call, without a clock
- gpus: the roofs of a device, and what makers print (data/gpus.toml)
- peaks: the roofs of this machine, measured by a copy and by products
- operators: the five operators of notebook 05, at their sizes and with their two changes
- roofline: `place` names the limit of a call; its picture and its explorer
- checks: what two changes did, beside what the model said
- precision: `audit` of mixed precision; TF32
- exercises: the questions of notebook 05
"""
