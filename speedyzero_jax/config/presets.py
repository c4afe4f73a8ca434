"""Files of presets: their names, their `base` presets, and their settings, not yet parsed."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.yaml_files import mapping, named_in_errors, read_yaml, strings

AGENT_KEY = "agent"  # the one key without a section
_CONFIGS = Path(__file__).resolve().parents[2] / "configs"

Leaves = dict[str, Any]  # dotted key -> string or list of strings, not yet parsed


def preset_names() -> list[str]:
  """Names of the presets in `configs/`."""
  return sorted(path.stem for path in _CONFIGS.glob("*.yaml"))


def preset_titles() -> dict[str, str]:
  """Preset name -> first line of its file."""
  paths = ((name, _CONFIGS / f"{name}.yaml") for name in preset_names())
  return {n: p.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for n, p in paths}


def preset_path(preset: str, folder: Path) -> Path:
  """Path of a preset, given its name or its path relative to `folder`."""
  if preset.endswith((".yaml", ".yml")):
    return folder / preset
  if preset not in preset_names():
    near = difflib.get_close_matches(preset, preset_names(), n=3, cutoff=0.5)
    raise ConfigError(
      f"unknown preset {preset!r}; the nearest: {', '.join(near or preset_names()) or 'none'}"
    )
  return _CONFIGS / f"{preset}.yaml"


class Settings(NamedTuple):
  """Settings of a preset for all games, or for one game (`games: {NAME: ...}`)."""

  path: Path
  game: str | None
  leaves: Leaves


def read_preset(path: Path, parents: tuple[Path, ...] = ()) -> list[Settings]:
  """Reads the settings of the file's `base` presets in order, then the file's own."""
  path = path.resolve()
  with named_in_errors(path):
    if path in parents:
      raise ConfigError("base: a preset must not be based on itself, directly or indirectly")
    document = read_yaml(path.read_text(encoding="utf-8"))
    bases = strings(document.pop("base", []), "base")
    games = mapping(document.pop("games", None), "games")
    own = [Settings(path, None, leaves_of(document))]
    for game, settings in games.items():
      leaves = leaves_of(mapping(settings, f"games.{game}"))
      if leaves.keys() & {"env.game", AGENT_KEY}:
        raise ConfigError("games: env.game and agent can't be set for a single game")
      own.append(Settings(path, game, leaves))
    paths = [preset_path(base, path.parent) for base in bases]
  return [part for base in paths for part in read_preset(base, (*parents, path))] + own


def leaves_of(document: Mapping[str, Any]) -> Leaves:
  """Flattens nested sections and dotted keys into dotted key -> unparsed value."""
  result: Leaves = {}
  for key, value in document.items():
    if key == AGENT_KEY or "." in key:
      leaves = {key: value}
    else:
      section = mapping(value, key)
      leaves = {f"{key}.{name}": leaf for name, leaf in section.items()}
    if duplicates := result.keys() & leaves.keys():
      raise ConfigError(f"duplicate key {min(duplicates)!r}")
    result |= leaves
  return result
