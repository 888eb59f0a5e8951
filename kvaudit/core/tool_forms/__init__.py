"""The forms in which models write tool calls; ``base`` has the base class, ``text`` reads answers."""
