"""Plain serving (no disaggregation): a retracted request comes back from its copy, as an extend of one token."""
