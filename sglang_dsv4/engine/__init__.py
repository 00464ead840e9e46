"""Meets SGLang: holds its hooks, and the only names that differ between its releases.

``pools``, ``models`` and ``transfer`` extend classes of the engine that every supported release has. ``hooks`` has the
table of all entries; ``releases`` answers every question whose answer differs between releases; ``state`` keeps the
server's facts and each request's; ``coverage`` says what a server does not get, and why; ``retract`` has what every
retract needs. ``decode``, ``plain``, ``hisparse``, ``page_major`` and ``metadata`` serve a kind of server each.
"""
