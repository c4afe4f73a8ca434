"""Studies: sets of runs that answer a question, trained sequentially or in parallel."""
