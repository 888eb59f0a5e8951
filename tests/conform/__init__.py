"""The conformance suite: what every policy is held to, found in the registry or in ``--policy-file``."""
