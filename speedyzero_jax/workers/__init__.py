"""The roles of a run: actor, learner, sweeper and evaluator, and what they share."""
