"""Runs of several processes: roles, services and clients, messages, rendezvous, supervision."""
