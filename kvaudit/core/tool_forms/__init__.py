"""The forms in which models write tool calls, one per file; ``base`` has the contract, ``reading`` reads answers."""
