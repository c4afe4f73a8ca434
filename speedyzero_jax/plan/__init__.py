"""Planning: a run's programs compiled for GPUs that need not be there, and their costs."""
