"""Time and machines: the round loop, where cohorts run, evaluation and checkpoints."""
