"""Cost model of runs on GPUs: compiles their programs ahead of time, without needing a GPU."""
