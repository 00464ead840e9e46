"""Moves a request's bytes between dozens of device buffers and the units of its host copy.

``copier`` moves them at the speed of the link, ``reference`` moves them plainly, ``verify`` compares.
"""
