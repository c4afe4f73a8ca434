"""The work of a run: acting, learning, sweeping and evaluating, and the weights they share."""
