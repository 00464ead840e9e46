"""What the hooks cost a decode step in which nothing is retracted."""
