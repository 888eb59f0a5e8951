"""The forms in which models write tool calls; ``base`` has the contract, ``text`` reads answers."""
