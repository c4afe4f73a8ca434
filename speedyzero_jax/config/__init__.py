"""Configuration: typed sections, presets, overrides and their validation."""
