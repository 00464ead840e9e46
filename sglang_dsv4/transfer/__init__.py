"""Device <-> host movement of a request's spans: streams, events, and the choice of path."""
