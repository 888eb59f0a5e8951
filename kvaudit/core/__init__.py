"""The types and functions that all packages of kvaudit share. It imports no torch and no other package of kvaudit."""
