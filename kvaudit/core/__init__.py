"""What every part of kvaudit speaks in: records, errors, the spec, whole files. Knows no torch, no other room."""
