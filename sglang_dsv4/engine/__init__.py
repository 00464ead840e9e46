"""Where this package meets SGLang: the hooks, and the only names that differ between its releases.

``pools``, ``models`` and ``transfer`` extend classes of the engine that every supported release has; what only some
releases have is named here alone. ``hooks`` is the table of all entries, ``installation`` puts them in place, and
``landed`` checks them. ``releases`` answers every question whose answer differs between releases.
``prealloc_queue`` and ``weight_updater`` are the subclasses; the other modules hold the hooks on functions.
"""
