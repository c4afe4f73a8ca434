"""Agents: each defines its network, acting, loss, stored columns and configuration.

The setting `agent` names a module of this package or any other importable module. The module
exports `AGENT_CONFIG`, a subclass of `config.schema.AgentConfig`, and `make_agent`.
"""
