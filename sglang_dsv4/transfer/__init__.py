"""A retracted request's bytes lie scattered over dozens of device buffers; a copy of them is one packed run of blocks.

``copier`` moves them at the speed of the link, ``reference`` moves them plainly, ``verify`` compares.
"""
