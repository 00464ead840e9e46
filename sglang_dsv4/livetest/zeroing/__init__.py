"""A model package for one check: a decode server that damages what it loads, on purpose.

``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.livetest.zeroing``, and a word in the file that ``ZERO_FAMILY_FILE`` names
(see ``switch``). Never for real requests.
"""

VARIABLE = "ZERO_FAMILY_FILE"
OFF = "off"  # the word that leaves every load as it is
