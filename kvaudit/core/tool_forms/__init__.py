"""The forms in which models write tool calls, one file a form. ``base`` has the contract, ``reading`` reads answers."""
