"""Notebooks 04-06: operators on the device, from the launch to the trace."""
