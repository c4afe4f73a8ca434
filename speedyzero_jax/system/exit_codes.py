"""Exit codes common to the launchers and the processes of a run, besides 0 and 128 + signal."""

FAILED = 1
USAGE_ERROR = 2  # bad command line, configuration or run folder
