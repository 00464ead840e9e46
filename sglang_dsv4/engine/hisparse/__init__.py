"""Keeps a retracted request's rows in the HiSparse coordinator's host pool, and gives them back."""
