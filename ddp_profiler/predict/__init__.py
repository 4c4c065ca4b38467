"""What would be: the plan of a training run, and step times that were not measured."""
