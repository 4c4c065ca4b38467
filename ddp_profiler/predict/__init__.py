"""What was not measured: DDP's schedule replayed under other settings, at other scales."""
