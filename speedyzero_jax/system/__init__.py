"""Facilities of the machine: memory, compilation, costs of programs, and patches of Orbax."""
