"""What the figures of docs/results come from: a room each, with what it shows, its command and its machine."""
