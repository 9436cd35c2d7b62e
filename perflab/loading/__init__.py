"""Notebooks 01-03: how images reach the model, from the file to the device."""
