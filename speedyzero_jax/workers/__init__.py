"""The roles of a run, one file each: actor, learner, evaluator."""
