"""Serves without disaggregation: a retracted request comes back from its copy, and decodes on."""
