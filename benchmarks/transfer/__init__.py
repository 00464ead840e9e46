"""Save and load of one request against the link, and how the cost grows."""
