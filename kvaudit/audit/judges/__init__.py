"""Judges that decide whether an answer refuses: one file each, blind to arm and policy, each with its card."""
