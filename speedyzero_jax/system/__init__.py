"""Facilities of the machine: memory, compilation, and patches of Orbax."""
