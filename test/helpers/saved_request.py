"""A saved request, as the tests of traps, of bad input and of DSV4_VERIFY start with it."""

import oracle


def saved(world, tokens=700, slot=1):
    """(request, its bytes, its copy) of a filled pool."""
    oracle.fill(world.pool, tokens)
    request = world.start(slot, tokens)
    return request, world.read(request), world.save(request)
