"""The replay: storage of steps, selection of what is trained on, and upkeep of what is stored."""
