"""How far next-token distributions moved on the reference's own answers (E8): measured here, shown by reports."""
