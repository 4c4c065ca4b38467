"""Lives inside the training process: clock, marks, the adapter to DDP, the measured loop."""
