"""Facilities of the machine: memory, compilation, devices."""
