"""What is measured, where it is written and how it is shown.

`names` says what each metric means, `rates` turns events into numbers, `recorder` writes them, `jsonl` reads them
back, `board` lays them out to be read, `display` shows that. Nothing here knows of jax, of processes, or of what the
numbers are for; import the module you need (reading a run's metrics loads neither rich nor TensorBoard).
"""
