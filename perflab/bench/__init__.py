"""How to measure, alike for every chapter. Nothing of `show`, `learn` or a chapter may enter.

study       vary and observe: the way in           plan        what is measured, and for how long
schedule    rounds in random order, failures       timing      seconds of one call, host and device
result      raw samples with their provenance      estimate    intervals, findings, the knee
record      the logbook and recorded machines      units       numbers with units; settings: the budget
conditions  what else went on meanwhile            machine     what this computer is and may use
interrupt   Ctrl-C at a safe place                 cleanup     nothing is left behind
process     a call in a new interpreter            device_lock one measurement at a time on a device
profiler    torch.profiler set up alike            intervals   unions of spans of time; utilisation: the driver's
code        file and line of the learner's code    files       atomic writes; progress: the bar
"""
