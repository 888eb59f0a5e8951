"""Entries kept as packed codes: ``codes`` is the arithmetic, ``store`` keeps them, ``hints`` what rounding decided."""
