"""Launchers, one file each: they start the worker processes of a run, which claim units in its folder."""
