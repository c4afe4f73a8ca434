"""Platform support: memory, compilation, program dispatch, exit codes and patches of Orbax."""
