"""The forms in which models write tool calls in their text; ``base`` has the base class, ``text`` reads answers."""
