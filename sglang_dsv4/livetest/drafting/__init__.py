"""A model package for live checks: a target and a draft that agrees with it exactly where its window is right.

``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.livetest.drafting``: the weights alone, of a NextN draft (see ``weights``)
or, where the model's config has one, of a DSpark draft (see ``recall``). With a word in the file that
``DRAFTING_ARM_FILE`` names, and ``DRAFTING_STEPS_FILE`` for what it sees, the server also loses of each resumed
request's draft what the word says (see ``switch``). Never for real requests.
"""

PACKAGE = __name__
WORD, STEPS = "DRAFTING_ARM_FILE", "DRAFTING_STEPS_FILE"
NO_RETRACT = "no retract"  # the request that would be retracted is only remembered
WITHOUT = "without the draft's family"  # its window holds another request's rows, its state the prompt's end
ROWS = "with its rows"
BOTH = "with its rows and state"  # what a server does
ZEROED = "its rows zeroed"
ARMS = (NO_RETRACT, WITHOUT, ROWS, BOTH, ZEROED)
