"""Agents: what each stores per step, how it acts, what it learns from, and its configuration.

The value of the setting `agent` names a module: one of this package, or any importable one. It
exports `AGENT_CONFIG`, a subclass of `config.schema.AgentConfig`, and `make_agent`.
"""
