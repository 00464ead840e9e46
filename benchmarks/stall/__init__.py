"""What a retract costs the scheduler's thread."""
