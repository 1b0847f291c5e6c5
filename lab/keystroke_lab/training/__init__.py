"""What every kind of training shares: the loop, its log, optimizers, schedules and the transformer."""
