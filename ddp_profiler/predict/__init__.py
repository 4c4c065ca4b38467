"""What was not measured: steps replayed under other settings and scales, plans of runs."""
