"""What ``stress`` and ``drill`` are made of: live servers, the requests they get, and what is read from them."""
