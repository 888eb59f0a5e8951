"""Judges that decide whether an answer refuses, one file each; no judge is told which arm or policy gave the answer.

Each judge has a card, the table of its errors against human labels.
"""
