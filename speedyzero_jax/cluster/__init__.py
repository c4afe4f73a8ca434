"""Several processes: roles, services and clients, messages, rendezvous and supervision."""
