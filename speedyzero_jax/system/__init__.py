"""Facilities of the machine: memory and compilation."""
