"""Damages each loaded copy of a server on purpose, as a file says: a model package, never for real requests.

``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.livetest.zeroing``, and a word in the file that ``ZERO_FAMILY_FILE`` names
(see ``switch``).
"""

VARIABLE = "ZERO_FAMILY_FILE"
OFF = "off"  # the word that leaves every load as it is
