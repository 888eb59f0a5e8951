"""The answers behind a drift, to look at: the pairs of a run that flipped, written as pages without a server."""
