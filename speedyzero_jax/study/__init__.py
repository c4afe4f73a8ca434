"""Studies: the runs that answer a question, trained one after another or side by side."""
