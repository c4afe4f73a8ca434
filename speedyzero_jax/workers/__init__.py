"""Workers of a run: actor, learner, sweeper and evaluator, and the weights they share."""
